"""Rows of partitioned tables for one iteration of a loader.

::

    minibatch known    announce: whose rows are these?  ─▶ the owners hear of it
    its turn           fetch: ask ─ read own rows ─ put the others' in place ─ copy repeated ones

A row that a minibatch wants in several places comes once, from wherever it lies. Caches hold it for
all of these places, or for none.

Looking whose a row is costs 10 to 20 ns (300,000 ids, one core), so it happens on the worker's
thread, as soon as the ids are known. Where this machine's memory holds all rows, and they are read
from there, it is enough to look where they lie, which costs 1: one gather brings them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.exchange.engine import Engine
from featsync.exchange.split import Repeats, places_of, split_by_rank
from featsync.move import Gather, Move
from featsync.partitioned_table import PartitionedTable
from featsync.plan import FeatureKey, Fetch, Want
from featsync.routes import Route
from featsync.transports import TRANSPORTS, Fetches, Landing, Pull, Transport

__all__ = ["Delivery", "RemoteRows"]

_Way = tuple[str, Engine]


class Delivery(NamedTuple):
    """Where the rows of one feature go.

    Attributes:
        fetch: Which of them are not cached.
        target: ``(num_rows, *row_shape)``, the delivered tensor.
    """

    fetch: Fetch
    target: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Near:
    """Rows that this process reads itself; without ``positions`` they are all that are wanted."""

    source: torch.Tensor
    rows: NDArray[Any]
    positions: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class _Split:
    """One feature's wanted rows of one minibatch."""

    near: _Near | None
    others: Sequence[tuple[_Way, Pull]]
    repeats: Sequence[Repeats]


class RemoteRows:
    """Splits wanted rows by owner and has transports bring those of other ranks.

    Args:
        tables: The partitioned tables of the loader.
        routes: Of each of them, how other ranks' rows come.
    """

    def __init__(
        self, tables: Mapping[FeatureKey, PartitionedTable], routes: Mapping[FeatureKey, Route]
    ) -> None:
        # What is read as a whole needs no looking, but its ranks are in this together all the same.
        self._tables = {key: t for key, t in tables.items() if routes[key].table is t}
        self._routes = dict(routes)
        engines = [table.parts.engine for table in tables.values()]
        self._sessions = {e: e.open_session() for e in dict.fromkeys(engines) if e is not None}
        self._transports: dict[_Way, Transport] = {}
        for key, table in self._tables.items():
            for name in self._routes[key].by_rank.values():
                way = self._way(table, name)
                if way not in self._transports:
                    engine = way[1]
                    self._transports[way] = TRANSPORTS[name](engine, self._sessions[engine])
        self._splits: dict[int, dict[FeatureKey, _Split]] = {}

    @property
    def keys(self) -> frozenset[FeatureKey]:
        """The features that are brought from here; the others are read as a whole."""
        return frozenset(self._tables)

    def check(self) -> None:
        """Raise what another rank failed with during this iteration.

        Raises:
            PeerError: That rank, and what it said.
        """
        for engine, session in self._sessions.items():
            engine.faults.check(session)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that this iteration ended with an error."""
        for engine in self._sessions:
            engine.fail(error)

    def announce(self, batch: int, wants: Mapping[FeatureKey, Want]) -> None:
        """Split the wanted rows of a minibatch, and tell the owners; on the worker's thread.

        Raises:
            FeatureError: An id lies outside its table.
        """
        splits = {key: self._split(key, wants[key]) for key in self._tables if key in wants}
        self._splits[batch] = splits
        for way, transport in self._transports.items():
            pulls = [pull for _, pull in _of_way(splits, way)]
            if pulls:
                transport.announce(batch, pulls)

    def watch(self, table: PartitionedTable, rank: int) -> Callable[[], None]:
        """Begin to wait for a rank; what this returns raises once the wait is in vain."""
        engine = table.parts.engine
        if engine is None:
            raise ValueError(f"{table.key} lies on one rank only: there is nobody to wait for")
        return engine.vigil(rank, self._sessions[engine]).look

    def fetch(self, batch: int, deliveries: Mapping[FeatureKey, Delivery]) -> Fetches:
        """Make the moves that bring an announced minibatch's rows.

        Args:
            batch: The minibatch.
            deliveries: One for each feature that it wants.

        Returns:
            First those that ask other ranks and read own rows, last those that wait for the others,
            and fill the places of rows that are wanted in several.
        """
        splits = self._splits.pop(batch)
        masks = {key: _mask(delivery.fetch) for key, delivery in deliveries.items()}
        first: list[Move] = []
        last: list[Move] = []
        for way, transport in self._transports.items():
            landings = [
                Landing(pull, _taken(masks[key], pull.positions), deliveries[key].target)
                for key, pull in _of_way(splits, way)
            ]
            if landings:
                fetches = transport.fetch(batch, landings)
                first += fetches.first
                last += fetches.last
        near = [
            _gather(str(key), split.near, masks[key], deliveries[key].target)
            for key, split in splits.items()
            if split.near is not None
        ]
        again = [
            _repeated_rows(key, repeats, masks[key], deliveries[key].target)
            for key, split in splits.items()
            for repeats in split.repeats
        ]
        return Fetches([*first, *near], [*last, *again])

    def num_of_others(
        self, batch: int, deliveries: Mapping[FeatureKey, Delivery]
    ) -> dict[FeatureKey, int]:
        """Rows of each feature that other ranks send, each once; ask before `fetch`."""
        masks = {key: _mask(delivery.fetch) for key, delivery in deliveries.items()}
        counts = dict.fromkeys(deliveries, 0)
        for key, split in self._splits[batch].items():
            for way, pull in split.others:
                if self._transports[way].reads_memory:
                    continue
                mask = _taken(masks[key], pull.positions)
                counts[key] += len(pull.positions) if mask is None else int(mask.sum())
        return counts

    def close(self) -> None:
        """The iteration is over; takes no lock and does not wait."""
        for engine, session in self._sessions.items():
            engine.close_session(session)

    def _split(self, key: FeatureKey, want: Want) -> _Split:
        table, route = self._tables[key], self._routes[key]
        parts = table.parts
        if route.reads_whole and parts.whole is not None:
            rows = places_of(str(key), want.ids, parts.partition)
            return _Split(_Near(parts.whole, rows), (), ())
        near = None
        others = []
        found = split_by_rank(str(key), want.ids, parts.partition)
        for part in found:
            if part.rank == parts.rank:
                near = _Near(parts.readable[part.rank], part.rows, part.positions)
            else:
                pull = Pull(table, part.rank, part.rows, part.positions)
                others.append((self._way(table, route.by_rank[part.rank]), pull))
        return _Split(near, others, [p.repeats for p in found if p.repeats is not None])

    @staticmethod
    def _way(table: PartitionedTable, name: str) -> _Way:
        if table.parts.engine is None:
            raise ValueError(f"{table.key} has rows of other ranks, but there is one rank only")
        return name, table.parts.engine


def _of_way(splits: Mapping[FeatureKey, _Split], way: _Way) -> list[tuple[FeatureKey, Pull]]:
    """The pulls that one transport brings, in an order that is the same every time."""
    return [(key, pull) for key, split in splits.items() for w, pull in split.others if w == way]


def _mask(fetch: Fetch) -> NDArray[np.bool_] | None:
    """``(num_rows,)``: which wanted rows come from home; ``None``: all."""
    if fetch.home_positions is None:
        return None
    mask = np.zeros(fetch.num_rows, np.bool_)
    mask[fetch.home_positions.numpy()] = True
    return mask


def _taken(
    mask: NDArray[np.bool_] | None, positions: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    return None if mask is None else mask[positions]


def _gather(what: str, near: _Near, mask: NDArray[np.bool_] | None, target: torch.Tensor) -> Gather:
    rows, positions = near.rows, near.positions
    if mask is not None:
        taken = mask if positions is None else mask[positions]
        rows = rows[taken]
        positions = np.flatnonzero(mask) if positions is None else positions[taken]
    places = None if positions is None else torch.from_numpy(positions)
    return Gather(what, near.source, torch.from_numpy(rows), target, places)


def _repeated_rows(
    key: FeatureKey, repeats: Repeats, mask: NDArray[np.bool_] | None, target: torch.Tensor
) -> Gather:
    taken = slice(None) if mask is None else mask[repeats.positions]
    return Gather(
        str(key),
        target,
        torch.from_numpy(repeats.sources[taken]),
        target,
        torch.from_numpy(repeats.positions[taken]),
    )
