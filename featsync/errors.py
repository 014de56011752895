"""Every error featsync raises on purpose, sorted by who has to act on it.

Each message says where, what was found, what is allowed and what to do. Facts are passed
positionally to ``Exception.__init__``: pickle rebuilds an exception from its ``args`` alone, and
errors travel between processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FeatsyncError(Exception):
    """Base of all errors below, so a caller can catch the package as a whole."""


class ConfigError(FeatsyncError, ValueError):
    """The configuration or an argument is wrong: its author has to change it."""


class HostError(FeatsyncError, ImportError):
    """DGL GraphBolt is missing, or does not match the torch that is installed."""


class CapacityError(FeatsyncError):
    """Memory that was asked for is not there: give less, or free some."""


class FeatureError(FeatsyncError, IndexError):
    """A minibatch asks a feature for rows that it does not have: table and graph do not match."""


class FeatureChangedError(FeatsyncError):
    """A static feature was written while its rows were read ahead: the loop's author acts."""


class PlanError(FeatsyncError):
    """An invariant of a plan is broken: a fault of featsync, please report it."""


class PeerError(FeatsyncError):
    """Another rank, or a helper process, did not do its part: look at that one first.

    Attributes:
        peer: Who was waited for, in words ("rank 3", "mover process 4711").
    """

    def __init__(self, message: str, peer: str) -> None:
        super().__init__(message, peer)
        self.peer = peer

    def __str__(self) -> str:
        return str(self.args[0])


class PeerTimeoutError(PeerError):
    """The peer gave no sign in time: check that it is alive, or allow more time."""


def unknown_name(where: str, name: object, known: Iterable[str]) -> ConfigError:
    """Build the one message used wherever a configured name is not known.

    Example:
        >>> print(unknown_name("plan_feature.retention", "windw", ["lru", "window"]))
        plan_feature.retention = 'windw' is not known; it can be lru, window. Did you mean 'window'?
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ConfigError(f"{where} = {name!r} is not known; it can be {', '.join(names)}.{hint}")
