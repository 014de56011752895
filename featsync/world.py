"""Who takes part: the ranks of one process group, and which of them share a machine.

Ranks talk through the store that their process group was set up with, never through its
collectives: a store can be asked without waiting, so every wait here ends in time and can name
the ranks that did not come, and no message of ours can mix with the user's.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from featsync.errors import ConfigError, PeerTimeoutError
from featsync.group_store import Store, asked, corner, store_of
from featsync.hosts import hosts_of, is_reached, shown_nonce

__all__ = ["World"]

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02
_IS_SET = "/is_set"


class World:
    """The ranks that take part, numbered within their process group.

    Get one with `join`. All ranks of the group make the same calls in the same order. A world
    belongs to one thread at a time; two worlds of one group do not meet.
    """

    def __init__(
        self, rank: int, global_ranks: Sequence[int], store: Store | None, timeout: float
    ) -> None:
        """Use `join` instead; this is for tests that bring a store of their own.

        Args:
            rank: Own number within the group.
            global_ranks: For each rank of the group its number in the whole job.
            store: Shared by exactly this world; ``None`` for a single rank.
            timeout: Seconds that an `exchange` waits for the others where it does not say.
        """
        self._rank = rank
        self._global_ranks = tuple(global_ranks)
        self._store = store
        self._timeout = timeout
        self._num_exchanges = 0
        self._host_of_rank: tuple[int, ...] = (0,)
        if store is not None:
            self._host_of_rank = self._find_hosts()

    @classmethod
    def join(cls, process_group: dist.ProcessGroup | None = None, timeout: float = 60.0) -> World:
        """Meet the other ranks of a group; a single rank where nothing is initialised.

        Collective among the members of the group, and only them.

        Args:
            process_group: The ranks that take part; ``None`` means all of the default group.
            timeout: Seconds to wait for the others, here and in later exchanges.

        Raises:
            ConfigError: This process is no member of the group, or the group has no store.
            PeerTimeoutError: Some ranks did not join in time; the message names them.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, (0,), None, timeout)
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ConfigError(
                f"process_group: global rank {dist.get_rank()} is no member of the group it was "
                "given. Call this on the group's own ranks only."
            )
        global_ranks = _global_ranks(process_group)
        if len(global_ranks) == 1:
            return cls(rank, global_ranks, None, timeout)
        store = store_of(process_group, global_ranks)
        # The n-th world of this group on every rank, since all join in the same order.
        number = asked(store.add, f"joined/{rank}", 1)
        return cls(rank, global_ranks, corner(f"{number}", store), timeout)

    @property
    def rank(self) -> int:
        """Number of this process within the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self._global_ranks)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """For each rank of the group its number in the whole job."""
        return self._global_ranks

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """For each rank the number of its machine; machines are numbered by their first rank.

        Two ranks share a machine if each can reach what the other holds in memory. Names of
        machines tell nothing: containers have their own, and clones have the same.
        """
        return self._host_of_rank

    @property
    def ranks_of_host(self) -> tuple[int, ...]:
        """The ranks on this machine, ascending, this one among them."""
        own = self._host_of_rank[self._rank]
        return tuple(rank for rank, host in enumerate(self._host_of_rank) if host == own)

    @property
    def is_first_of_host(self) -> bool:
        """Whether this rank brings what its machine holds only once."""
        return self.ranks_of_host[0] == self._rank

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each machine, ascending."""
        return tuple(self._host_of_rank.index(host) for host in range(1 + max(self._host_of_rank)))

    def name(self, rank: int) -> str:
        """Name a rank for people; says the number in the whole job where that is another."""
        number = self._global_ranks[rank]
        return f"rank {rank}" if number == rank else f"rank {rank} (global rank {number})"

    def names(self, ranks: Sequence[int]) -> str:
        """Name several ranks for people."""
        return ", ".join(self.name(rank) for rank in ranks)

    def store_for(self, purpose: str) -> Any:
        """Give a corner of the job's store that only this world uses; a single rank has none."""
        return corner(purpose, self._store)

    def exchange(self, purpose: str, value: Any, timeout: float | None = None) -> list[Any]:
        """Give all ranks one small value of each; collective.

        Args:
            purpose: What it is for, in words, the same on all ranks; errors say it.
            value: Anything that pickles, a few kilobytes at most.
            timeout: Seconds to wait for the others; ``None`` means what `join` was given.

        Returns:
            The values in the order of ranks.

        Raises:
            PeerTimeoutError: Some ranks did not come in time; the message names them. The world
                cannot be used any more.
            PeerError: The process that holds the store is gone.
            ConfigError: The ranks came for different purposes; raised on all of them.
        """
        if self._store is None:
            return [value]
        seconds = self._timeout if timeout is None else timeout
        prefix = f"exchange/{self._num_exchanges}"
        self._num_exchanges += 1
        asked(self._store.set, f"{prefix}/{self._rank}", pickle.dumps((purpose, value)))
        asked(self._store.add, f"{prefix}/{self._rank}{_IS_SET}", 1)
        keys = [f"{prefix}/{rank}" for rank in range(self.size)]
        answers = [pickle.loads(answer) for answer in self._collect(keys, purpose, seconds)]
        # Whoever read last wipes the slate, so that long runs do not fill the store.
        if asked(self._store.add, f"{prefix}/read", 1) == self.size:
            for key in (*keys, *(f"{key}{_IS_SET}" for key in keys), f"{prefix}/read"):
                asked(self._store.delete_key, key)
        self._check_purposes([purpose for purpose, _ in answers])
        return [value for _, value in answers]

    def _collect(self, keys: list[str], purpose: str, seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        answers: list[bytes] = []
        pause = _FIRST_PAUSE_S
        while len(answers) < len(keys):
            answer = self._peek(keys[len(answers)])
            if answer is not None:
                answers.append(answer)
            elif time.monotonic() < deadline:
                # Asking and sleeping, not the store's own wait: that would lock everybody else in
                # this process out of the store until it is over.
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                late = [rank for rank, key in enumerate(keys) if self._peek(key) is None]
                if late:
                    raise self._late(late, purpose, seconds)
        return answers

    def _peek(self, key: str) -> bytes | None:
        """Return the value of a key, or ``None`` if there is none; does not wait."""
        if self._store is None:
            return None
        # Adding nothing to a counter is a question that all stores of all versions answer at once.
        if asked(self._store.add, f"{key}{_IS_SET}", 0) == 0:
            return None
        answer: bytes = asked(self._store.get, key)
        return answer

    def _late(self, late: list[int], purpose: str, seconds: float) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"{self.name(self._rank)} waited {seconds:.1f} s for {self.names(late)} to {purpose}: "
            f"{len(late)} of {self.size} ranks did not come. Check that they are alive and make "
            "the same calls in the same order, or raise timeout.",
            self.names(late),
        )

    def _check_purposes(self, purposes: list[str]) -> None:
        if len(set(purposes)) > 1:
            found = "; ".join(f"{self.name(r)}: {text}" for r, text in enumerate(purposes))
            raise ConfigError(
                f"the ranks of one group came together for different purposes ({found}). All of "
                "them have to make the same calls in the same order."
            )

    def _find_hosts(self) -> tuple[int, ...]:
        with shown_nonce() as own:
            nonces = self.exchange("join", own)
            views = self.exchange("tell who shares a machine", tuple(map(is_reached, nonces)))
        return hosts_of(views)


def _global_ranks(process_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    if process_group is None:
        return tuple(range(dist.get_world_size()))
    return tuple(dist.get_process_group_ranks(process_group))
