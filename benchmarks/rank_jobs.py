"""The process of one rank of `ranks.Ranks`: does what it is told."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from ranks import Description, Done, Job, Ready

from featsync.rank_program import join_group, serve


def _start(description: Description, send: Callable[[object], None]) -> Callable[[object], object]:
    torch.set_num_threads(1)
    join_group(description.store_file, description.rank, description.num_ranks, description.timeout)
    send(Ready())
    return _answer


def _answer(job: Job) -> Done:
    return Done(job.function(*job.args))


if __name__ == "__main__":
    serve(int(sys.argv[1]), _start)
