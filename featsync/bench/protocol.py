"""What the driver and the processes of a lane say to each other; all of it is pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from featsync.bench.check_rows import RowCheck
from featsync.bench.steps import SimulatedStep
from featsync.config import Config

Model = Literal["sage", "none"]


@dataclass(frozen=True)
class RankSpec:
    """All that one process of a lane needs to know.

    Attributes:
        lane: Name of the lane, for messages.
        config: The configuration that the lane holds loaded.
        rank: Its rank, of ``world_size``.
        world_size: Ranks of the lane.
        store_file: Where the ranks of the lane meet.
        threads: Threads of torch's operators.
        model: What a step is, unless it is simulated.
        simulated: A simulated step in the place of the model.
        modules: Modules to import first, which register the user's own stages.
        timeout: Seconds after which a silent peer is given up.
    """

    lane: str
    config: Config
    rank: int
    world_size: int
    store_file: str
    threads: int = 1
    model: Model = "sage"
    simulated: SimulatedStep | None = None
    modules: tuple[str, ...] = ()
    timeout: float = 300.0


@dataclass(frozen=True)
class RunEpoch:
    """Asks for one epoch.

    Attributes:
        kind: ``timed``; ``warm_up``, where minibatches are compared when they come and again after
            their step; or ``floor``: no features, the model fed with resident ones.
        number: Counts the epochs of a lane; decides which minibatch is kept to be compared.
        with_marks: Whether to send the times of each minibatch.
    """

    kind: Literal["timed", "warm_up", "floor"]
    number: int = 0
    with_marks: bool = False


@dataclass(frozen=True)
class Ready:
    """A process has loaded its configuration.

    Attributes:
        workload: Facts about dataset and model, for the report.
    """

    workload: dict[str, object]


@dataclass(frozen=True)
class Progress:
    """A sign of life within an epoch.

    Attributes:
        minibatches: Steps done.
    """

    minibatches: int


@dataclass(frozen=True)
class EpochReport:
    """What one rank measured in one epoch.

    Attributes:
        wall_s: Length of the epoch.
        cpu_s: CPU seconds of the process, its threads and children.
        next_s: Seconds spent waiting for minibatches.
        minibatches: Steps done.
        rows: Rows delivered, by source.
        num_bytes: The same in bytes.
        check: Rows compared with the tables, and those that differed.
        transport: How the rows of each feature came.
        why: The reasons for what was chosen for each feature.
        stages: Seconds that the stages say they spent, by what for.
        marks: Per minibatch, when it was asked for, when it came, when its step was over.
    """

    wall_s: float
    cpu_s: float
    next_s: float
    minibatches: int
    rows: dict[str, int]
    num_bytes: dict[str, int]
    check: RowCheck = field(default_factory=RowCheck)
    transport: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    marks: list[tuple[float, float, float]] = field(default_factory=list)
