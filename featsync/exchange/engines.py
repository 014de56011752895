"""Finds the engine of a process group, or starts it."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from featsync.exchange.engine import Engine
from featsync.exchange.links import Links
from featsync.offers import agree, attempt
from featsync.profile import load_profile, shipped_profile
from featsync.world import World

__all__ = ["engine_of"]

# gloo gives up the whole group when one wait takes longer, so the engine waits by itself, for a
# sign from the owner, and goes to gloo for what is under way already.
_GROUP_TIMEOUT = timedelta(hours=12)

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
            links = Links.connect(world, timeout)
            group = _own_group(process_group)
            engine = _ENGINES[name] = Engine(world, links, group, profile, timeout)
    return engine


def _own_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Make a group for rows alone, so that they never wait for the user's collectives."""
    ranks = (
        list(range(dist.get_world_size()))
        if process_group is None
        else dist.get_process_group_ranks(process_group)
    )
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=_GROUP_TIMEOUT, backend="gloo", use_local_synchronization=True
    )
    return group
