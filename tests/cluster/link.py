"""The network between machines: veth pairs with a limited rate, and what crossed them.

::

    two machines    eth0 ══════ eth0              the pair itself is the link
    more            eth0 ══ switch ══ eth0 …      a bridge in a network of its own

Each end that sends is limited by a token bucket (``tc tbf``): a frame leaves when there are tokens
for it, and tokens come at the rate. The bucket holds 1 ms of the rate, but at least two of the
frames of up to 64 KiB that the kernel hands over at once; so short messages pass unhindered and
nothing runs ahead of the rate for more than that. Frames wait for 20 ms at most, then they are
dropped, as in a switch with a buffer of so much; TCP on one machine does not fill it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .machines import ClusterError, Machine, call

__all__ = ["INTERFACE", "Link", "Traffic", "bits_a_second", "traffic_of"]

INTERFACE = "eth0"
_NETWORK = "10.77.0"
_WAITS = "20ms"
_LARGEST_FRAME = 1 << 16
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class Traffic(NamedTuple):
    """What one machine sent and received.

    Attributes:
        sent: Bytes, as the network device counts them: headers once for each frame of up to 64 KiB.
        received: The same.
        wire: Bytes sent as a cable of 1,500-byte frames would carry them, which is what the rate
            limits; 0 where no rate is set.
    """

    sent: int
    received: int
    wire: int

    def since(self, before: Traffic) -> Traffic:
        """What came since an earlier look."""
        return Traffic(*(now - then for now, then in zip(self, before, strict=True)))


class Link:
    """Joins machines; goes when they go.

    Args:
        machines: Two or more.
        rate: Of each machine's connection and direction, as ``tc`` takes it ("1gbit"); ``None``:
            not limited.

    Raises:
        ClusterError: The system does not allow it; says what failed.
    """

    def __init__(self, machines: Sequence[Machine], rate: str | None) -> None:
        self._machines = machines
        self._rate = rate
        self._switch = Machine("switch") if len(machines) > 2 else None
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(number: int) -> str:
        """The address of a machine, by its number from 0."""
        return f"{_NETWORK}.{number + 1}"

    def traffic(self, number: int) -> Traffic:
        """What a machine sent and received since it was joined."""
        return traffic_of(self._machines[number].call_network)

    def set_up(self, number: int, up: bool) -> None:
        """Plug a machine in again, or pull the plug."""
        command = ("link", "set", INTERFACE, "up" if up else "down")
        self._machines[number].call_network("ip", *command)

    def close(self) -> None:
        """Remove what is not on any machine; idempotent."""
        if self._switch is not None:
            self._switch.close()

    def _join(self) -> None:
        if self._switch is None:
            first, second = self._machines
            _connect(first, INTERFACE, second, INTERFACE)
        else:
            self._switch.call_network("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.call_network("ip", "link", "set", "bridge", "up")
        for number, machine in enumerate(self._machines):
            if self._switch is not None:
                port = f"port{number}"
                _connect(machine, INTERFACE, self._switch, port)
                self._switch.call_network("ip", "link", "set", port, "master", "bridge", "up")
                self._limit(self._switch, port)
            address = f"{self.address(number)}/24"
            machine.call_network("ip", "address", "add", address, "dev", INTERFACE)
            machine.call_network("ip", "link", "set", INTERFACE, "up")
            self._limit(machine, INTERFACE)

    def _limit(self, machine: Machine, interface: str) -> None:
        if self._rate is None:
            return
        bucket = max(2 * _LARGEST_FRAME, bits_a_second(self._rate) // 8 // 1000)
        limits = ("rate", self._rate, "burst", str(bucket), "latency", _WAITS)
        machine.call_network("tc", "qdisc", "add", "dev", interface, "root", "tbf", *limits)


def bits_a_second(rate: str) -> int:
    """Read a rate like "1gbit" or "100mbit".

    Raises:
        ClusterError: It is none.
    """
    number, unit = rate[:-4], rate[-4:].lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (KeyError, ValueError) as error:
        raise ClusterError(
            f"rate {rate!r}: write a number and one of {', '.join(_UNITS)}, as in 1gbit"
        ) from error


def traffic_of(run: Callable[..., str] = call) -> Traffic:
    """What one machine sent and received since it was joined.

    Args:
        run: Runs a tool in the machine's network; as it is, this process is on that machine.

    Raises:
        ClusterError: It is no machine of a cluster.
    """
    sent, received = _counted(run("cat", "/proc/self/net/dev"))
    (queue, *_) = json.loads(run("tc", "-s", "-j", "qdisc", "show", "dev", INTERFACE))
    return Traffic(sent, received, queue["bytes"] if queue["kind"] == "tbf" else 0)


def _counted(devices: str) -> tuple[int, int]:
    for line in devices.splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            received, *_, sent = counts.split()[:9]
            return int(sent), int(received)
    raise ClusterError(f"there is no {INTERFACE} here: this is no machine of a cluster")


def _connect(first: Machine, name: str, second: Machine, other_name: str) -> None:
    """Make a pair of which neither end is ever in the real machine's network."""
    pair = ["ip", "link", "add", name, "netns", str(first.pid), "type", "veth"]
    call(*pair, "peer", "name", other_name, "netns", str(second.pid))
