"""A lane: one configuration, loaded by one process a rank, that waits until it is told to run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from featsync.allocator import KEEP_ENVIRONMENT
from featsync.bench.protocol import EpochReport, Progress, RankSpec, Ready, RunEpoch
from featsync.rank_processes import RankProcesses, environment_of_ranks


class Lane:
    """The processes of one configuration.

    Attributes:
        name: Of the configuration.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.name = spec.lane
        self._num_ranks = spec.world_size
        self._processes = RankProcesses(
            "featsync.bench.rank",
            spec.lane,
            spec.world_size,
            lambda rank, store_file: replace(spec, rank=rank, store_file=store_file),
            _environment(os.environ, spec),
            spec.timeout,
        )

    def wait_ready(self) -> dict[str, object]:
        """Wait until all ranks have loaded; give what the first says of the workload."""
        return self._processes.wait_ready(Ready)[0].workload

    def run(
        self, request: RunEpoch, on_progress: Callable[[Progress], None] | None = None
    ) -> list[EpochReport]:
        """Run one epoch on all ranks and give what each measured.

        Raises:
            FeatsyncError: What a rank raised, or that one died or fell silent.
        """

        def on_sign(rank: int, sign: object) -> None:
            if isinstance(sign, Progress) and on_progress is not None and rank == 0:
                on_progress(sign)

        requests = dict.fromkeys(range(self._num_ranks), request)
        return list(self._processes.ask(requests, EpochReport, on_sign).values())

    def finish(self) -> None:
        """End all processes in order; those that do not follow are killed."""
        self._processes.finish()

    def kill(self) -> None:
        """End all processes at once; idempotent."""
        self._processes.kill()


def _environment(inherited: Mapping[str, str], spec: RankSpec) -> dict[str, str]:
    """The environment of a rank: the threads and the allocator of its lane."""
    environment = environment_of_ranks(inherited, spec.threads)
    for name, value in KEEP_ENVIRONMENT.items():
        environment.pop(name, None)
        if spec.config.allocator == "keep":
            environment[name] = value
    return environment
