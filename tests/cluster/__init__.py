"""A cluster on one Linux machine, to try out and test what several machines do.

Each pretended machine ("host") has a network, processes with a /proc, a /dev/shm and IPC of its
own, so that its ranks share memory with each other and with nobody else. Hosts are joined by a link
of limited rate, whose bytes are counted. Files, users and CPU cores are those of the real machine.

From a checkout, as root (or behind ``unshare --map-root-user --net``)::

    python -m tests.cluster --hosts 2 --ranks 2 --rate 1gbit -- python train.py

In a program::

    with Cluster(hosts=2, rate="1gbit") as cluster:
        run = cluster.torchrun(["python", "train.py"], ranks=2, env={})
        run.wait(time_limit=60)
        print(run.traffic())

Nothing has a name in the system, so nothing can be left behind: all of it ends with the launcher,
however that ends. It needs Linux with veth and tbf, and the programs unshare, nsenter, mount, ip
and tc (util-linux, iproute2). Python's standard library is enough.

Read in this order: `machines` (namespaces), `link` (veth, rate, counts), `launch` (commands on all
hosts), ``__main__``.
"""

from .launch import Cluster, Run, why_impossible
from .link import Link, Traffic, traffic_of
from .machines import ClusterError, Machine

__all__ = [
    "Cluster",
    "ClusterError",
    "Link",
    "Machine",
    "Run",
    "Traffic",
    "traffic_of",
    "why_impossible",
]
