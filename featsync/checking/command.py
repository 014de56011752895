"""What the command line needs for ``check``, in one place."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from featsync.checking.comparison import Comparison
from featsync.checking.protocol import Compare, Compared, Outcome, RankSpec, Ready
from featsync.checking.report import choices_table, holdings_table, summary
from featsync.config import Config
from featsync.rank_processes import RankProcesses, environment_of_ranks

__all__ = ["Options", "check", "choices_table", "holdings_table", "summary"]

OnProgress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Options:
    """How to check.

    Attributes:
        minibatches: How many each rank compares.
        ranks: Processes; with one, this process does it.
        modules: Modules that each process imports first.
        timeout: Seconds without a sign of life after which a rank is given up.
    """

    minibatches: int
    ranks: int
    modules: tuple[str, ...]
    timeout: float


def check(config: Config, options: Options, on_progress: OnProgress) -> list[Outcome]:
    """Run some minibatches and compare all features with their tables.

    Args:
        config: The pipeline.
        options: How to check it.
        on_progress: Told what is being done, how much of it, and of how much.

    Returns:
        What each rank found.

    Raises:
        FeatsyncError: What the first failing rank raised, or how it ended.
    """
    total = options.minibatches * options.ranks
    on_progress("loading", 0, total)
    if options.ranks == 1:
        comparison = Comparison(config)
        return [
            comparison.run(options.minibatches, lambda done: on_progress("comparing", done, total))
        ]
    done_by_rank = dict.fromkeys(range(options.ranks), 0)

    def on_sign(rank: int, sign: object) -> None:
        if isinstance(sign, Compared):
            done_by_rank[rank] = sign.minibatches
            on_progress("comparing", sum(done_by_rank.values()), total)

    ranks = _ranks(config, options)
    try:
        ranks.wait_ready(Ready)
        requests = dict.fromkeys(done_by_rank, Compare(options.minibatches))
        outcomes = ranks.ask(requests, Outcome, on_sign)
        ranks.finish()
    finally:
        ranks.kill()
    return list(outcomes.values())


def _ranks(config: Config, options: Options) -> RankProcesses:
    def spec_of(rank: int, store_file: str) -> RankSpec:
        return RankSpec(config, rank, options.ranks, store_file, options.modules, options.timeout)

    return RankProcesses(
        "featsync.checking.rank",
        config.name,
        options.ranks,
        spec_of,
        environment_of_ranks(os.environ, threads=1),
        options.timeout,
    )
