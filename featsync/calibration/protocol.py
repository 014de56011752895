"""What the command and the processes of the ranks say to each other; all of it is pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from featsync.calibration.samples import Setting


@dataclass(frozen=True)
class RankSpec:
    """All that a rank needs to know.

    Attributes:
        rank: Its number.
        num_ranks: How many there are.
        store_file: Where they meet.
        settings: What messages will carry, the largest last.
        timeout: Seconds after which a silent peer is given up.
    """

    rank: int
    num_ranks: int
    store_file: str
    settings: Sequence[Setting]
    timeout: float


@dataclass(frozen=True)
class SignOfLife:
    """Getting ready takes a while."""


@dataclass(frozen=True)
class Ready:
    """A rank has its tables.

    Attributes:
        ways: How rows can come here.
    """

    ways: Sequence[str]


@dataclass(frozen=True)
class Prepare:
    """Asks to choose rows of each other rank, or own ones, so that fetching can begin at once.

    Attributes:
        way: How they are to come.
        setting: How many, and of which width.
        times: How often to fetch, other rows each time.
    """

    way: str
    setting: Setting
    times: int


@dataclass(frozen=True)
class Prepared:
    """The rows are chosen."""


@dataclass(frozen=True)
class FetchPrepared:
    """Asks to fetch what was prepared, one after the other."""


@dataclass(frozen=True)
class Fetched:
    """Rows came, and are right.

    Attributes:
        seconds: What each fetch took, of the rows of all other ranks together.
        messages: In each of them.
    """

    seconds: Sequence[float]
    messages: int


@dataclass(frozen=True)
class RunPython:
    """Asks to keep Python busy on the main thread.

    Attributes:
        seconds: For how long.
        beside: What a thread of this rank fetches meanwhile; ``None``: nothing.
        setting: What its messages carry.
    """

    seconds: float
    beside: str | None
    setting: Setting


@dataclass(frozen=True)
class KeepFetching:
    """Asks to fetch rows of rank 0, again and again.

    Attributes:
        seconds: For how long.
        way: How they are to come.
        setting: What a message carries.
    """

    seconds: float
    way: str
    setting: Setting


@dataclass(frozen=True)
class Ran:
    """What a rank got done.

    Attributes:
        work: How far its Python counted.
        seconds: In how long, without the time in which the main thread had no core.
        messages: That came to it meanwhile.
    """

    work: int
    seconds: float
    messages: int
