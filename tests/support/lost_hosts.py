"""Two groups of ranks, each on two machines: one loses a rank, the other its link."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from cluster import Cluster
from featsync.errors import PeerError, PeerTimeoutError
from support.hosts import HostRanks
from support.processes import wait_until


class Seen(NamedTuple):
    """How a rank's loop ended."""

    kind: type
    peer: str
    words: str
    moment: float
    extra: Any = None


def kill_and_unplug(body: Callable[[int], Seen | None], sign: str) -> list[Seen | None]:
    """Kill rank 2, on which rank 0 depends, then take down the link between ranks 1 and 3.

    Args:
        body: Runs on ranks 0 to 3, two a machine; leaves a file ``<sign>.<rank>`` in the folder
            when it is at work, and ``saw.<rank>`` when its loop has failed.
        sign: See above.

    Returns:
        What each rank saw: the right kinds of error, of the right ranks, in time.
    """
    with Cluster(hosts=2) as cluster:
        run = HostRanks(cluster, 2, body, together=False, timeout_s=120)
        signs = [run.folder / f"{sign}.{rank}" for rank in range(4)]
        assert wait_until(lambda: all(path.exists() for path in signs), 90)
        (victim,) = [p for p in cluster.machines[1].processes() if p.rank == 2]
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.time()
        assert wait_until((run.folder / "saw.0").exists, 20)
        cluster.link.set_up(1, False)
        unplugged = time.time()
        found = run.results(dead=[2])
    assert found[2] is None
    zero, one, three = found[0], found[1], found[3]
    assert (zero.kind, zero.peer) == (PeerError, "rank 1 (global rank 2)")
    assert "has ended, and with it went the rows that it held" in zero.words
    assert zero.moment - killed < 10
    assert (one.kind, one.peer) == (PeerTimeoutError, "rank 1 (global rank 3)")
    assert (three.kind, three.peer) == (PeerTimeoutError, "rank 0 (global rank 1)")
    assert all(4 < seen.moment - unplugged < 30 for seen in (one, three))
    return found
