"""At which address the other ranks reach this one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from featsync.errors import ConfigError
from featsync.world import World

__all__ = ["own_address"]

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent to it: connecting a datagram socket only picks the way


def own_address(world: World) -> str:
    """Find the address that other ranks can use.

    Between ranks of one machine the loopback. Else the interface that ``GLOO_SOCKET_IFNAME`` names,
    as for gloo; else the one that leads to ``MASTER_ADDR``; else what the host's name stands for.

    Raises:
        ConfigError: ``GLOO_SOCKET_IFNAME`` names no interface that has an address.
    """
    if len(world.ranks_of_host) == world.size:
        return _LOOPBACK
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        return _address_of_interface(interfaces.split(",")[0])
    master = os.environ.get("MASTER_ADDR")
    if master:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((master, _ANY_PORT))
            return str(way.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


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
