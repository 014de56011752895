"""Finds the engine of a process group, or starts it."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from featsync.errors import PeerTimeoutError
from featsync.exchange.addresses import find_addresses
from featsync.exchange.engine import Engine
from featsync.exchange.links import Links
from featsync.offers import agree, attempt
from featsync.profile import load_profile, shipped_profile
from featsync.world import World

__all__ = ["engine_of"]

# By group, since there is one engine a process and group, however many features and loaders.
_ENGINES: weakref.WeakKeyDictionary[Any, Engine] = weakref.WeakKeyDictionary()
_STARTING = threading.Lock()


def engine_of(process_group: dist.ProcessGroup | None, timeout: float) -> Engine | None:
    """Give the engine of a group; collective among its ranks.

    Args:
        process_group: The ranks that take part; ``None``: all of the default group.
        timeout: Seconds to wait for the others, and without a sign of life later.

    Returns:
        The engine; ``None`` where there is only one rank.

    Raises:
        ConfigError: This process is no member of the group.
        PeerTimeoutError: Some ranks did not come in time.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    name = process_group if process_group is not None else dist.group.WORLD
    with _STARTING:
        engine = _ENGINES.get(name)
        if engine is None:
            world = World.join(process_group, timeout)
            if world.size == 1:
                return None
            # Each rank looks for a profile, to hear of a bad one; all use the first rank's.
            found, problem = attempt(load_profile, shipped_profile())
            profile = agree(world, "tell what transports cost", found, problem, timeout)[0]
            addresses = find_addresses(world, timeout)
            links = Links.connect(world, addresses[0], timeout)
            group = _own_group(world, addresses, timeout)
            engine = _ENGINES[name] = Engine(world, links, group, profile, timeout)
    return engine


def _own_group(world: World, addresses: list[str], timeout: float) -> Any:
    """Make a group for rows alone, so that they never wait for the user's collectives.

    Not by ``new_group``, which goes by what the host's name stands for: often a loopback, which no
    other machine reaches, and none of the user's concern where the default group is NCCL's.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    # Twice, so that there are two connections to each rank, one for each direction of rows: gloo's
    # word that a receive is posted would queue up behind rows that are being sent. See `Engine`.
    devices = [gloo.create_device(hostname=address) for address in addresses]
    options._devices = [device for device in devices for _ in range(2)]
    group, problem = None, None
    try:
        group = gloo(world.store_for("rows"), world.rank, world.size, options)
    except RuntimeError as error:
        problem = PeerTimeoutError(
            f"{world.name(world.rank)} cannot connect to all other ranks for rows, from "
            f"{', '.join(addresses)}: {error}. Ranks on different machines have to reach each "
            "other by TCP on any port.",
            "another rank",
        )
    # Whoever fails does so after timeout at the latest, and only then comes here.
    agree(world, "connect for rows", None, problem, 2 * timeout)
    return group
