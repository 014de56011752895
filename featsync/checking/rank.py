"""The process that checks a pipeline on one of several ranks.

Started by `featsync.checking.command` as ``python -m featsync.checking.rank DESCRIPTOR``; the
descriptor is its end of a connection to the command, on which it first gets a `RankSpec`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import torch

from featsync.checking.comparison import Comparison
from featsync.checking.protocol import Compare, Compared, Outcome, RankSpec, Ready
from featsync.rank_program import join_group, serve


def _start(spec: RankSpec, send: Callable[[object], None]) -> Callable[[Compare], Outcome]:
    torch.set_num_threads(1)
    for module in spec.modules:
        importlib.import_module(module)
    join_group(spec.store_file, spec.rank, spec.num_ranks, spec.timeout)
    comparison = Comparison(spec.config, spec.rank)
    send(Ready())
    return lambda request: comparison.run(request.minibatches, lambda done: send(Compared(done)))


if __name__ == "__main__":
    serve(int(sys.argv[1]), _start)
