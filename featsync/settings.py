"""What the two stages take as arguments, checked when the stage is built."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.cache_size import check_cache_size
from featsync.device import check_device
from featsync.errors import ConfigError, unknown_name
from featsync.plan import FeatureKey
from featsync.retention import MAX_WINDOW, RETENTION
from featsync.transports import TRANSPORTS
from featsync.workers import WORKERS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CACHE_SCOPES = ("rank", "host")

Score = torch.Tensor | NDArray[Any]
Scores = Score | Mapping[str, Score] | None


@dataclass(frozen=True)
class PlannerSettings:
    """Arguments of ``plan_feature``.

    Attributes:
        lookahead: Minibatches whose ids are known ahead, at least 1.
        retention: A name of `RETENTION`.
        score: Per-row scores, by feature (``"node/None/feat"``) or one for all; ``None``: counted
            use.
        device_cache: Rows, a fraction of each table, or bytes of all (``"512MiB"``).
        cache_scope: ``rank`` or ``host``.

    Raises:
        ConfigError: A value is not allowed.
    """

    lookahead: int = 2
    retention: str = "window"
    score: Scores = None
    device_cache: int | float | str = 0
    cache_scope: str = "rank"

    def __post_init__(self) -> None:
        _check_whole("plan_feature.lookahead", self.lookahead, least=1)
        _check_name("plan_feature.retention", self.retention, RETENTION)
        _check_name("plan_feature.cache_scope", self.cache_scope, CACHE_SCOPES)
        check_cache_size(self.device_cache)
        if self.device_cache and self.retention != "none" and self.lookahead > MAX_WINDOW:
            raise ConfigError(
                f"plan_feature.lookahead = {self.lookahead}: with a device_cache it must be at "
                f"most {MAX_WINDOW}"
            )

    def check_scores(self, keys: Collection[FeatureKey]) -> None:
        """Refuse scores of features that are not asked for.

        Raises:
            ConfigError: A name in ``score`` is none of ``keys``.
        """
        names = [str(key) for key in keys]
        for name in self.score if isinstance(self.score, Mapping) else ():
            _check_name("plan_feature.score", name, tuple(names))

    def score_of(self, key: FeatureKey, num_rows: int) -> NDArray[Any] | None:
        """The score of one feature's rows, ``(num_rows,)``, or ``None``.

        Raises:
            ConfigError: It has not one number a row.
        """
        score = self.score.get(str(key)) if isinstance(self.score, Mapping) else self.score
        if score is None:
            return None
        array = np.asarray(score)
        if array.shape != (num_rows,):
            raise ConfigError(
                f"plan_feature.score of {key} has shape {array.shape}; it must be ({num_rows},), "
                f"one number a row. Give a mapping such as {{'{key}': score}} for several features."
            )
        return array


@dataclass(frozen=True)
class SyncerSettings:
    """Arguments of ``sync_feature``.

    Attributes:
        transport: How rows of other ranks come: ``auto``, ``shared_memory`` or ``p2p``.
        worker: A name of `WORKERS`.
        device: Where rows are delivered; ``None``: where they lie.
        staleness: For dynamic features, steps that a read may lag behind; 0 is exact.
        timeout: Seconds without a sign of life from whoever is waited for.
        process_group: Who takes part; ``None``: the default group, if there is one.

    Raises:
        ConfigError: A value is not allowed.
    """

    transport: str = "auto"
    worker: str = "thread"
    device: str | torch.device | None = None
    staleness: int | str = 0
    timeout: float = 60.0
    process_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        _check_name("sync_feature.transport", self.transport, ("auto", *TRANSPORTS))
        _check_name("sync_feature.worker", self.worker, WORKERS)
        check_device(self.device)
        if self.staleness != "any":
            _check_whole("sync_feature.staleness", self.staleness, least=0)
        is_number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not is_number or not 0 < self.timeout < float("inf"):
            raise ConfigError(
                f"sync_feature.timeout = {self.timeout!r}: it must be a number of seconds over 0"
            )


def _check_whole(where: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where} = {value!r}: it must be a whole number, {least} or more")


def _check_name(where: str, name: object, known: Mapping[str, object] | tuple[str, ...]) -> None:
    if not isinstance(name, str) or name not in known:  # a list cannot even be looked up
        raise unknown_name(where, name, known)
