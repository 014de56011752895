"""Retention policies: which rows of a table stay in a cache. Pure decisions, no row is touched.

A new policy is one file with a `Retention` and one line in `RETENTION`; the tests of the contract
run over every name in it.
"""

from __future__ import annotations

from featsync.retention.contract import MAX_WINDOW, Keep, Retention
from featsync.retention.lru import LruRetention
from featsync.retention.none import NoRetention
from featsync.retention.static import StaticRetention
from featsync.retention.window import WindowRetention

RETENTION: dict[str, type[Retention]] = {
    "window": WindowRetention,
    "lru": LruRetention,
    "static": StaticRetention,
    "none": NoRetention,
}

__all__ = ["MAX_WINDOW", "RETENTION", "Keep", "Retention"]
