"""Run one function on ranks of several pretended machines, and fail as one test."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster import Cluster

_TESTS = Path(__file__).parent.parent


class HostRanks:
    """Ranks of a gloo group on the machines of a cluster, each a process.

    Args:
        cluster: Where.
        ranks: How many on each machine.
        body: ``body(rank, *args)`` runs on all of them, with a default process group; importable by
            name, and what it returns pickles.
        args: Handed to ``body``.
        torchrun: Whether torchrun starts them.
        together: Whether they wait for each other at the end.
        timeout_s: Seconds from the start until everything has to be over.

    Attributes:
        folder: A folder that all ranks see; to ``body`` it is ``TEST_FOLDER`` in the environment.
    """

    def __init__(
        self,
        cluster: Cluster,
        ranks: int,
        body: Callable[..., Any],
        *args: Any,
        torchrun: bool = False,
        together: bool = True,
        timeout_s: float = 120.0,
    ) -> None:
        self._size = len(cluster.machines) * ranks
        self._timeout_s = timeout_s
        self._scope = tempfile.TemporaryDirectory()
        self.folder = Path(self._scope.name)
        (self.folder / "job").write_bytes(pickle.dumps((body, args, together, timeout_s)))
        start = cluster.torchrun if torchrun else cluster.plain
        env = {
            "PYTHONPATH": os.pathsep.join([str(_TESTS.parent), str(_TESTS)]),
            "TEST_FOLDER": str(self.folder),
        }
        self._run = start([sys.executable, "-m", "support.hosts"], ranks, env)

    def results(self, dead: Collection[int] = ()) -> list[Any]:
        """Wait for all ranks, and return what each returned, in order.

        Args:
            dead: Ranks that do not come to an end; ``None`` stands for what they return.

        Raises:
            AssertionError: A rank raised: the traceback of each that did.
            ClusterError: A rank is still running at the end of the time.
        """
        with self._scope:
            try:
                statuses = self._run.wait(self._timeout_s, self._timeout_s if dead else 5.0)
            finally:
                answers = [self._answer(rank) for rank in range(self._size)]
                failures = [failure for failure, _ in answers if failure is not None]
                # What a rank says of itself tells more than that others wait for it.
                assert not failures, "\n".join(failures)
        expected = {f"rank {rank}" for rank in dead}
        odd = {label: s for label, s in statuses.items() if s and label not in expected}
        assert not odd, "\n".join(
            f"{label} ended with exit status {status}:\n{self._run.last_lines(label)}"
            for label, status in odd.items()
        )
        for label in statuses:
            # What goes wrong at the exit of a program changes its status no more.
            assert "Traceback" not in self._run.last_lines(label), self._run.last_lines(label)
        return [result for _, result in answers]

    def _answer(self, rank: int) -> tuple[str | None, Any]:
        path = self.folder / f"answer.{rank}"
        return pickle.loads(path.read_bytes()) if path.exists() else (None, None)


def main() -> None:
    """Run on each rank, and leave an answer in the folder."""
    folder, rank = Path(os.environ["TEST_FOLDER"]), int(os.environ["RANK"])
    body, args, together, timeout_s = pickle.loads((folder / "job").read_bytes())
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        answer = None, body(rank, *args)
        if together:
            dist.barrier()
            time.sleep(0.3)  # see `support.ranks`; here ranks are slower
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it was, the test must hear of it
        answer = f"rank {rank} failed:\n{traceback.format_exc()}", None
    draft = folder / f"draft.{rank}"
    draft.write_bytes(pickle.dumps(answer))
    draft.rename(folder / f"answer.{rank}")
    sys.exit(answer[0] is not None)


if __name__ == "__main__":
    main()
