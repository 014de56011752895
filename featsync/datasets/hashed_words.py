"""Feature hashing: bags of hashed words become rows of any width, without a vocabulary.

Every word adds +1 or -1 to each of `COLUMNS_PER_WORD` columns, which its hash alone decides.
Several columns a word instead of one make it unlikely that two words look alike in a narrow row.
All words weigh the same: weighting rare words up, as tf-idf does, makes their collisions louder
(on the `debian` data at width 128 it costs four points of accuracy).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

COLUMNS_PER_WORD = 4

_BLOCK_ELEMENTS = 1 << 22  # of one block of rows, which is summed in float64
_GOLDEN = 0x9E3779B97F4A7C15

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Bags(NamedTuple):
    """One bag of words a row.

    Attributes:
        lengths: ``(rows,)``, the number of words of each row.
        hashes: ``(lengths.sum(),)``, the 32-bit hashes of the words, row after row.
    """

    lengths: Integers
    hashes: Integers


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit numbers (the finaliser of SplitMix64); equal in, equal out."""
    mixed = values + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def hash_rows(parts: Sequence[Bags], width: int) -> Floats:
    """Turn bags of words into feature rows.

    Args:
        parts: Bags for the same rows; a row gets the words of all of them.
        width: Columns of the result.

    Returns:
        ``(rows, width)`` float32. A row has length ``sqrt(width)``, so its elements are around 1
        in size whatever the width; a row without words is all zero.
    """
    rows = len(parts[0].lengths)
    features = np.zeros((rows, width), dtype=np.float32)
    starts = [np.concatenate([[0], np.cumsum(part.lengths)]) for part in parts]
    step = max(1, _BLOCK_ELEMENTS // width)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        block = np.zeros(((last - first) * width,), dtype=np.float64)
        for part, start in zip(parts, starts, strict=True):
            words = part.hashes[start[first] : start[last]]
            row = np.repeat(np.arange(last - first), part.lengths[first:last])
            block += _sum_words(row, words, width, len(block))
        features[first:last] = _scaled(block.reshape(-1, width))
    return features


def _sum_words(row: Integers, words: Integers, width: int, size: int) -> npt.NDArray[np.float64]:
    salts = np.arange(COLUMNS_PER_WORD, dtype=np.uint64) << np.uint64(32)
    mixed = mix(words.astype(np.uint64)[:, None] + salts)
    # The upper half, seen as a fraction, times the width is the column; the lowest bit is the sign.
    columns = ((mixed >> np.uint64(32)) * np.uint64(width)) >> np.uint64(32)
    signs = 1.0 - 2.0 * (mixed & np.uint64(1)).astype(np.float64)
    cells = row[:, None] * width + columns.astype(np.int64)
    sums = np.bincount(cells.ravel(), weights=signs.ravel(), minlength=size)
    return sums.astype(np.float64, copy=False)


def _scaled(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    length = np.sqrt(np.square(sums).sum(axis=1, keepdims=True))
    scale = np.sqrt(sums.shape[1]) / np.where(length == 0, 1, length)
    scaled: npt.NDArray[np.float64] = sums * scale
    return scaled
