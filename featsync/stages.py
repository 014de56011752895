"""The two stages that stand in the place of ``fetch_feature``.

::

    sampler ─┆─ Planner ── minibatch + Ahead(plan, wants) ── Syncer ── minibatch with features
       cut ──┘  knows ids of n+1 … n+K                       rows of n+1 move while n is used

The thread that asks for a minibatch pulls the source and plans; only moves run elsewhere.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterDataPipe, functional_datapipe, get_worker_info

from featsync._graphbolt import (
    FeatureKeys,
    deliver,
    mark_cut,
    stages_of,
    upstream,
    warn_of_unusable_overlap,
    watch_loop,
)
from featsync.counts import Stats
from featsync.device import open_device
from featsync.errors import ConfigError
from featsync.flights import Flight, Mover
from featsync.opening import open_session
from featsync.plan import FeatureKey, Plan, Want
from featsync.session import Session
from featsync.settings import PlannerSettings, SyncerSettings
from featsync.sources import Sources
from featsync.workers import WORKERS
from featsync.workers.thread import ThreadWorker

_AHEAD = "_featsync_ahead"
_OVER = object()  # in the place of a minibatch after the last


@dataclass(frozen=True)
class Ahead:
    """What the Planner hands on with a minibatch.

    Attributes:
        plan: Keep of the minibatch before, fetch for this one.
        wants: The rows that this minibatch wants.
    """

    plan: Plan
    wants: Mapping[FeatureKey, Want]


@functional_datapipe("plan_feature")
class Planner(IterDataPipe[Any]):
    """Look K minibatches ahead and decide where every feature row should lie.

    Functional name: ``plan_feature``. Takes the place of ``fetch_feature`` together with
    `Syncer`. Decides and touches no row. Building it is not collective.

    Args:
        datapipe: The pipe up to the sampler.
        features: The feature store; any ``gb.FeatureStore``.
        node_feature_keys: As for ``fetch_feature``: names, or names by node type.
        edge_feature_keys: The same for edges; types as ``"source:relation:target"``.
        lookahead: Minibatches whose ids are known ahead, at least 1.
        retention: What the device keeps: a name of `featsync.RETENTION`.
        score: Per-row score ``(num_rows,)`` for ``static`` and for the tie-break, for all features
            or by feature (``{"node/None/feat": score}``); ``None``: counted use.
        device_cache: Per rank: rows of each feature, a fraction of each table, or bytes of all.
        cache_scope: ``rank``: private; ``host``: the ranks of a machine share what they hold.

    Raises:
        ConfigError: A value that is not allowed, or a feature that does not exist.
    """

    def __init__(  # noqa: PLR0913 - the public contract; the same names form the configuration
        self,
        datapipe: IterDataPipe[Any],
        features: Any,
        node_feature_keys: FeatureKeys = None,
        edge_feature_keys: FeatureKeys = None,
        lookahead: int = 2,
        retention: str = "window",
        score: Any = None,
        device_cache: int | float | str = 0,
        cache_scope: str = "rank",
    ) -> None:
        super().__init__()
        self.settings = PlannerSettings(lookahead, retention, score, device_cache, cache_scope)
        self.sources = Sources(features, node_feature_keys, edge_feature_keys)
        self.settings.check_scores(self.sources.keys)
        self.datapipe = mark_cut(datapipe, features)
        self._session: Session | None = None
        if (problem := warn_of_unusable_overlap()) is not None:
            warnings.warn(problem, stacklevel=2)

    def bind(self, session: Session) -> None:
        """Use ``session`` for the iteration that begins next."""
        self._session = session

    def __iter__(self) -> Iterator[Any]:
        """Yield each minibatch of the source once, in order, with its plan."""
        session, self._session = self._session, None
        if get_worker_info() is not None:
            raise ConfigError(
                "plan_feature runs inside a loader worker, where it sees only that worker's share "
                "of the minibatches: another fetch_feature stands behind sync_feature, and "
                "gb.DataLoader cuts the pipe for its workers there too. Put that fetch_feature "
                "before plan_feature, or use num_workers=0."
            )
        if session is None:
            raise ConfigError("plan_feature needs sync_feature behind it: it moves no rows itself")
        source = iter(self.datapipe)
        is_over = False
        error: Exception | None = None
        known: deque[tuple[Any, dict[FeatureKey, Want]]] = deque()
        while True:
            # The window fills two minibatches a step: the first is not kept waiting for all K.
            reach = min(self.settings.lookahead, max(1, session.window.num_planned))
            while not is_over and len(known) < reach:
                try:
                    if (minibatch := next(source, _OVER)) is not _OVER:
                        wants = self.sources.wants_of(minibatch)
                        session.push(wants)
                        known.append((minibatch, wants))
                except Exception as caught:  # noqa: BLE001 - raised below, when it is its turn
                    minibatch, error = _OVER, caught
                is_over = minibatch is _OVER
            if not known:
                break
            minibatch, wants = known.popleft()
            setattr(minibatch, _AHEAD, Ahead(session.window.plan(), wants))
            yield minibatch
            del minibatch
        if error is not None:
            try:
                raise error
            finally:
                del error  # see `Syncer`


@functional_datapipe("sync_feature")
class Syncer(IterDataPipe[Any]):
    """Move the rows of minibatch N+1 as planned, while minibatch N is used.

    Functional name: ``sync_feature``. Needs a `Planner` upstream. Building it is not collective.
    Moves what it is told and decides nothing.

    Args:
        datapipe: The pipe up to ``plan_feature``.
        transport: How rows of other ranks come: ``auto``, ``shared_memory`` or ``p2p``. Tables that
            this rank reads itself need none.
        worker: ``inline``: no overlap; ``thread``; ``process``: a helper program, for shared and
            mapped tables.
        device: Where features are delivered; ``None``: where they lie.
        staleness: For dynamic features only; 0 is exact.
        timeout: Seconds without a sign of life from whoever is waited for.
        process_group: Who takes part; ``None``: the default group if there is one.

    Raises:
        ConfigError: A value that is not allowed, or a device that is not there.
    """

    def __init__(
        self,
        datapipe: IterDataPipe[Any],
        transport: str = "auto",
        worker: str = "thread",
        device: str | torch.device | None = None,
        staleness: int | str = 0,
        timeout: float = 60.0,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self.settings = SyncerSettings(transport, worker, device, staleness, timeout, process_group)
        self.datapipe = datapipe
        self.stats = Stats()
        self._mover: Mover | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield each minibatch once its rows are there.

        Raises:
            ConfigError: No ``plan_feature`` upstream.
            FeatureError: A minibatch names a row that its table does not have.
            Exception: Whatever the source raised, as it raised it, after the minibatches before it.
        """
        planner = self._planner()
        session = self._open(planner)
        planner.bind(session)
        watch_loop(session.close)
        try:
            last: tuple[Any, Flight] | None = None
            is_over = False
            error: Exception | None = None
            source = iter(self.datapipe)
            while not is_over:
                ready, last = last, None
                session.ask()
                try:
                    if (minibatch := next(source, _OVER)) is not _OVER:
                        last = _begin(session, minibatch, ready)
                except Exception as caught:  # noqa: BLE001 - raised below, when it is its turn
                    minibatch, error = _OVER, caught
                is_over = minibatch is _OVER
                del minibatch
                if ready is not None:
                    yield _finish(session, *ready)
                    ready = None
            if error is not None:
                try:
                    raise error
                finally:
                    # Its traceback refers to this frame, which must not refer back: what the frames
                    # hold has to end with the error. A connection to a loader worker, cut short by
                    # another worker's death, is among them, and until it closes that worker waits.
                    del error
        except Exception as failure:
            session.fail(failure)
            raise
        finally:
            session.close()

    def _planner(self) -> Planner:
        found = next((stage for stage in upstream(self) if isinstance(stage, Planner)), None)
        if found is None:
            raise ConfigError("sync_feature needs plan_feature before it, to know what to move")
        return found

    def _open(self, planner: Planner) -> Session:
        if self._mover is None:
            device = open_device(self.settings.device)
            worker = WORKERS[self.settings.worker](device, self.settings.timeout)
            weakref.finalize(self, worker.close)
            caller = worker
            if not worker.runs_calls:
                caller = ThreadWorker(device, self.settings.timeout)
                weakref.finalize(self, caller.close)
            self._mover = Mover(device, worker, self.stats, caller)
        settings = self.settings
        return open_session(
            planner.sources, planner.settings, settings.transport, self._mover, settings.staleness
        )


def stats(dataloader: Any) -> Stats:
    """What a loader's Syncer moved, whence, how long it took, and why.

    Args:
        dataloader: A ``gb.DataLoader``, or the end of a datapipe.

    Returns:
        The living counts; ``reset()`` sets them to zero.

    Raises:
        ConfigError: There is no ``sync_feature`` in the loader.
    """
    syncer = next((stage for stage in stages_of(dataloader) if isinstance(stage, Syncer)), None)
    if syncer is None:
        raise ConfigError("featsync.stats: there is no sync_feature stage in this loader")
    return syncer.stats


def _take_ahead(minibatch: Any) -> Ahead:
    ahead = minibatch.__dict__.pop(_AHEAD, None)
    if not isinstance(ahead, Ahead):
        raise ConfigError(
            "sync_feature got a minibatch without a plan: a stage between plan_feature and "
            "sync_feature made a new one. Put that stage before plan_feature or after sync_feature."
        )
    return ahead


def _begin(session: Session, minibatch: Any, last: tuple[Any, Flight] | None) -> tuple[Any, Flight]:
    ahead = _take_ahead(minibatch)
    return minibatch, session.begin(ahead.plan, ahead.wants, last[1] if last else None)


def _finish(session: Session, minibatch: Any, flight: Flight) -> Any:
    delivered = deliver(minibatch, flight.wants, session.finish(flight))
    if session.is_dynamic:
        delivered._featsync_step = session.step
    return delivered
