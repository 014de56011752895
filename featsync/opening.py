"""Opens a session: looks up tables, decides how each is read, and finds its caches."""

from __future__ import annotations

from featsync.caches import caches_of
from featsync.dynamic_reads import DynamicReads
from featsync.flights import Mover
from featsync.partitioned_table import PartitionedTable
from featsync.remote_rows import RemoteRows
from featsync.routes import route_of
from featsync.session import Session
from featsync.settings import PlannerSettings
from featsync.sources import Sources
from featsync.table import DynamicTable

__all__ = ["open_session"]


def open_session(
    sources: Sources,
    settings: PlannerSettings,
    transport: str,
    mover: Mover,
    staleness: int | str = 0,
) -> Session:
    """Begin an iteration of a loader; not collective.

    Args:
        sources: The features.
        settings: Of the Planner.
        transport: How rows of other ranks come.
        staleness: Steps that rows which change may lag behind.
        mover: What outlives the iteration; what was chosen is noted in its stats.

    Raises:
        ConfigError: Settings that do not fit the features, or those of another loader or rank.
        CapacityError: The memory for a cache is not there.
    """
    tables = sources.tables()
    split = {key: t for key, t in tables.items() if isinstance(t, PartitionedTable)}
    routes = {key: route_of(table, transport) for key, table in split.items()}
    tables |= {key: route.table for key, route in routes.items()}
    for table in tables.values():
        if not isinstance(table, PartitionedTable):
            mover.worker.admit(table)
    caches = caches_of(sources, tables, settings, mover)
    far = {}
    for key, route in routes.items():
        is_split = route.table is split[key]
        stats = mover.stats.features[key]
        stats.transport = route.transport
        by_thread = is_split and not mover.worker.runs_calls
        stats.why += f"; {route.why}" + "; by a thread" * by_thread
        # A cache in memory is no nearer than memory; one on another device is nearer than all.
        if is_split and mover.device.torch_device.type == "cpu":
            far[key] = route.is_far
    remote = RemoteRows(split, routes) if split else None
    changing = {key: t for key, t in tables.items() if isinstance(t, DynamicTable)}
    dynamic = DynamicReads(changing, staleness, mover) if changing else None
    return Session(tables, caches.own, mover, remote, caches.shared, far, dynamic)
