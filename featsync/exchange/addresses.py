"""At which addresses the other ranks reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import socket
import struct

from featsync.errors import ConfigError
from featsync.offers import agree, attempt
from featsync.world import World

__all__ = ["find_addresses"]

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent to it: connecting a datagram socket only picks the way
_REMEDY = (
    "Name the network interface that other machines reach, for example GLOO_SOCKET_IFNAME=eth0."
)


def find_addresses(world: World, timeout: float) -> list[str]:
    """Find the addresses that other ranks can use, the best first; collective.

    Between ranks of one network the loopback: two containers may share a machine's memory and yet
    have a network each, or the other way round. Else those of the interfaces that
    ``GLOO_SOCKET_IFNAME`` lists, as for gloo; else the one that leads to ``MASTER_ADDR``; else the
    one that the host's name stands for. Where that is a loopback, as on the machine that
    ``MASTER_ADDR`` is a name of, the one that leads to the other ranks.

    Args:
        world: The ranks.
        timeout: Seconds to wait for the others.

    Raises:
        ConfigError: There is none; says why and what to set.
        PeerError: Another rank has none.
        PeerTimeoutError: Some ranks did not come in time.
    """
    if _is_one_network(world, timeout):
        return [_LOOPBACK]
    nothing: list[str] = []
    found, problem = attempt(_addresses_by_name, nothing)
    others = agree(world, "find its address", found, problem, timeout)
    if _is_loopback(found[0]):
        reached = [first for first, *_ in others if not _is_loopback(first)]
        found, problem = attempt(lambda: [_address_beside(found[0], reached)], nothing)
    agree(world, "find an address that other machines reach", None, problem, timeout)
    return found


def _is_one_network(world: World, timeout: float) -> bool:
    """Whether all ranks see one another on the loopback.

    A socket without a file is known by its name within one network, and in no other.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        name = f"\0featsync-{secrets.token_hex(16)}"
        door.bind(name)
        names = world.exchange("tell their networks", name, timeout)
        sees_all = all(_is_seen(other) for other in names)
        return all(world.exchange("tell who shares a network", sees_all, timeout))


def _is_seen(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller:
        try:
            caller.connect(name)
        except OSError:
            return False
        return True


def _addresses_by_name() -> list[str]:
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [_address_of_interface(name) for name in interfaces.split(",")]
    return [_address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname())]


def _address_beside(loopback: str, others: list[str]) -> str:
    """The own address on the way to other ranks."""
    if not others:
        raise ConfigError(
            f"the names of all machines stand for loopbacks, here {loopback}, which other machines "
            f"do not reach. {_REMEDY}"
        )
    return _address_towards(others[0])


def _address_towards(name: str) -> str:
    """The own address on the way to another machine, or to this one."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(place)
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"the way to {name!r} is not known here ({error.strerror}), and with it the address "
            f"that other machines reach. {_REMEDY}"
        ) from error


def _address_of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(
                any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
            )
        except OSError as error:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME = {name!r}: that network interface has no IPv4 address here "
                f"({error.strerror}). Name one that other machines reach, or leave it out."
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
