"""The store that a process group was set up with, through which its ranks meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from featsync.errors import ConfigError, PeerError

__all__ = ["Store", "asked", "corner", "store_of"]


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here; none of it waits for a peer.

    ``get`` would, but only what is there is asked for. ``compare_set`` would answer at once, but in
    torch 2.2 it makes its answer without holding the GIL, which corrupts Python's memory as soon as
    another thread runs.
    """

    def set(self, key: str, value: bytes, /) -> None:
        """Put a value."""

    def get(self, key: str, /) -> bytes:
        """Take a look at a value, once it is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and tell where it stands."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a value, and tell whether there was one."""


def store_of(process_group: dist.ProcessGroup | None, global_ranks: Sequence[int]) -> Any:
    """Return a corner of the job's store that only this group uses."""
    c10d: Any = distributed_c10d  # its annotations differ from version to version
    store = c10d._get_default_store()
    if store is None:
        raise ConfigError(
            f"process_group: its backend {dist.get_backend(process_group)!r} keeps no store to "
            "meet through. Use gloo or nccl."
        )
    group = process_group if process_group is not None else c10d._get_default_group()
    name = c10d._get_process_group_name(group)
    ranks = "-".join(map(str, global_ranks))
    return corner(f"featsync/{name}/{ranks}", store)


def corner(prefix: str, store: Any) -> Any:
    """Return a part of a store in which all keys begin so."""
    c10d: Any = distributed_c10d
    return c10d.PrefixStore(prefix, store)


def asked(question: Any, *arguments: Any) -> Any:
    """Ask the store; its own errors come out as the fault of whoever holds it."""
    try:
        return question(*arguments)
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"the store of the process group does not answer ({error}). The process that holds "
            "it, mostly global rank 0, has ended or cannot be reached: look at that one first.",
            "the holder of the process group's store",
        ) from error
