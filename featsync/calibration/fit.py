"""From what messages took to the constants of the cost model.

Widths span three decades and messages as much, so a deviation counts by its share of what was
measured: plain least squares would fit the largest message and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from featsync.calibration.samples import Sample
from featsync.profile import Cost

__all__ = ["deviations", "fit_cost"]

Numbers = NDArray[np.float64]


def fit_cost(samples: Sequence[Sample], gil_s: float) -> Cost:
    """Find the constants, none of them negative, whose squared relative deviations are least.

    Args:
        samples: Of one way, at least one, each of more than 0 seconds.
        gil_s: What a message takes from Python, which is measured by itself.
    """
    seconds = np.array([sample.seconds for sample in samples])
    terms = _terms(samples) / seconds[:, None]
    message_s, row_s, byte_s = _least_squares(terms, np.ones(len(samples)))
    return Cost(message_s=message_s, gil_s=gil_s, row_s=row_s, byte_s=byte_s)


def deviations(cost: Cost, samples: Sequence[Sample]) -> Numbers:
    """By which share of what was measured the model is off, for each sample."""
    seconds = np.array([sample.seconds for sample in samples])
    constants = np.array([cost.message_s, cost.row_s, cost.byte_s])
    off: Numbers = np.abs(_terms(samples) @ constants - seconds) / seconds
    return off


def _terms(samples: Sequence[Sample]) -> Numbers:
    """``(num_samples, 3)``: how often each constant counts: once, by rows, by bytes."""
    rows = np.array([sample.setting.rows for sample in samples], np.float64)
    row_bytes = np.array([sample.setting.row_bytes for sample in samples], np.float64)
    return np.stack([np.ones_like(rows), rows, rows * row_bytes], axis=1)


def _least_squares(terms: Numbers, wanted: Numbers) -> list[float]:
    """Least squares with no negative constant.

    The best answer is the unbounded best of those constants that are not 0 in it; three constants
    have seven such sets, which are all tried.
    """
    scale = np.linalg.norm(terms, axis=0)  # seconds a byte and a message are far apart
    best, least = np.zeros(terms.shape[1]), np.inf
    for size in range(1, terms.shape[1] + 1):
        for kept in map(list, itertools.combinations(range(terms.shape[1]), size)):
            found = np.linalg.lstsq(terms[:, kept] / scale[kept], wanted, rcond=None)[0]
            constants = np.zeros_like(best)
            constants[kept] = found / scale[kept]
            error = float(np.linalg.norm(terms @ constants - wanted))
            if (constants >= 0).all() and error < least:
                best, least = constants, error
    return [float(value) for value in best]
