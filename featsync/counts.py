"""What was moved, whence, how long it took, and why it was done so."""

from __future__ import annotations

from dataclasses import dataclass, field

from featsync.plan import FeatureKey, FeaturePlan


@dataclass
class FeatureStats:
    """One feature's counts since the last `Stats.reset`.

    Attributes:
        rows: Rows delivered, by source: ``host`` (the home table, where this rank reads it),
            ``cache``, ``peer`` (sent by another rank). What a minibatch wants of a peer in several
            places is sent once and copied: all places but one count as ``host``.
        row_bytes: Bytes of one row; 0 until it is known.
        rows_kept: Rows written to the cache.
        rows_patched: Rows read again because somebody wrote them meanwhile (dynamic features); the
            others of them were clean.
        staleness: The most steps that delivered rows lacked, where a ``staleness`` allows any.
        transport: How rows of other ranks come; ``local`` if there are none.
        why: The reasons for what was chosen, in words.
    """

    rows: dict[str, int] = field(default_factory=lambda: {"host": 0, "cache": 0, "peer": 0})
    row_bytes: int = 0
    rows_kept: int = 0
    rows_patched: int = 0
    staleness: int = 0
    transport: str = "local"
    why: str = ""

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes delivered, by source."""
        return {source: count * self.row_bytes for source, count in self.rows.items()}

    @property
    def hit_rate(self) -> float:
        """Share of the rows that the cache served; 0.0 before the first."""
        total = sum(self.rows.values())
        return self.rows["cache"] / total if total else 0.0

    def count(self, plan: FeaturePlan, num_of_peers: int = 0) -> None:
        """Add one minibatch, of which other ranks send so many rows."""
        self.rows["host"] += plan.fetch.num_home - num_of_peers
        self.rows["peer"] += num_of_peers
        self.rows["cache"] += plan.fetch.num_cached
        if plan.keep is not None:
            self.rows_kept += len(plan.keep.positions)

    def count_sent(self, num_rows: int) -> None:
        """Of a minibatch that was added, other ranks sent so many rows after all."""
        self.rows["host"] -= num_rows
        self.rows["peer"] += num_rows


@dataclass
class Stats:
    """One loader's counts since the last `reset`; the same object as long as the loader lives.

    Attributes:
        features: Per feature; filled when the loader is first iterated.
        minibatches: Minibatches delivered.
        plan_s: Seconds spent planning, on the trainer's thread.
        transfer_s: Seconds the worker spent moving rows.
        wait_s: Seconds the trainer waited for rows.
    """

    features: dict[FeatureKey, FeatureStats] = field(default_factory=dict)
    minibatches: int = 0
    plan_s: float = 0.0
    transfer_s: float = 0.0
    wait_s: float = 0.0

    def reset(self) -> None:
        """Set all counts to zero; what was chosen, and why, stays."""
        self.minibatches = 0
        self.plan_s = self.transfer_s = self.wait_s = 0.0
        for feature in self.features.values():
            feature.rows = dict.fromkeys(feature.rows, 0)
            feature.rows_kept = feature.rows_patched = feature.staleness = 0

    @property
    def hit_rate(self) -> float:
        """Share of all rows that caches served."""
        rows = sum(sum(feature.rows.values()) for feature in self.features.values())
        cached = sum(feature.rows["cache"] for feature in self.features.values())
        return cached / rows if rows else 0.0

    @property
    def rows(self) -> int:
        """Rows delivered, of all features."""
        return sum(sum(feature.rows.values()) for feature in self.features.values())

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes delivered, by source, of all features."""
        total = {"host": 0, "cache": 0, "peer": 0}
        for feature in self.features.values():
            for source, count in feature.bytes.items():
                total[source] += count
        return total
