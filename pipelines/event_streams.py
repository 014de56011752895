"""Streams of events between two kinds of nodes, as minibatches: who edits which file, and when.

The nodes of a stream are numbered through: first those that act (authors), then those that are
acted on (files). An event is one author's edit of one file.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl.graphbolt as gb
import numpy as np
import torch
from torch import Tensor

from featsync.errors import ConfigError

NEGATIVE_SEED = 1  # all programs see the same files that were not edited

# A line that begins so is a commit. No file's line does: git quotes names with control characters.
_COMMIT = b"\x01"
_LOG = (
    # So that a line is a file and two names never read alike, whatever the user's settings are.
    *("-c", "core.quotePath=true", "log", "--no-show-signature", "--name-only", "--no-renames"),
    # A merge brings no edits of its own: those of both sides are in the commits that it merges.
    *("--no-merges", "--reverse", "--format=%x01%at %aE"),
)


@dataclass(frozen=True, eq=False)
class EventStream:
    """Events in the order in which they happened.

    Attributes:
        pairs: ``(events, 2)`` int64, the nodes of each event: author and file.
        times: ``(events,)`` float64, seconds since the first event, ascending.
        num_authors: The authors are the nodes below this number, the files those from it on.
        num_nodes: Authors and files.
    """

    pairs: Tensor
    times: Tensor
    num_authors: int
    num_nodes: int

    def __len__(self) -> int:
        return len(self.times)

    def negatives(self, seed: int = NEGATIVE_SEED) -> Tensor:
        """Draw a file for each event that stands for one that was not edited.

        Returns:
            ``(events,)`` int64, nodes; all files are equally likely. The same for the same seed.
        """
        generator = np.random.default_rng(seed)
        drawn = generator.integers(self.num_authors, self.num_nodes, len(self), dtype=np.int64)
        return torch.from_numpy(drawn)


def from_git(repository: Path, newest: int | None = None) -> EventStream:
    """Read the edits of a repository: one event for each commit and file that it changes.

    Authors are told apart by their e-mail address, after the repository's ``.mailmap``; commits are
    ordered by the time of writing. A renamed file is two, the old and the new one. Merges count as
    nothing.

    Args:
        repository: A folder of the repository, or a bare one.
        newest: How many events to keep.

    Raises:
        ConfigError: git is not there, this is no repository, or nothing was ever committed.
    """
    authors: dict[bytes, int] = {}
    files: dict[bytes, int] = {}
    found = [
        (time, authors.setdefault(author, len(authors)), files.setdefault(file, len(files)))
        for time, author, file in read_edits(repository)
    ]
    if not found:
        raise ConfigError(f"--git {repository}: no commit changes a file; name another repository")
    events = np.array(found, dtype=np.int64)
    # Stable: edits of the same second stay in git's order, parents before children.
    events = events[np.argsort(events[:, 0], kind="stable")]
    if newest is not None:
        events = events[-newest:]
    return _stream(events[:, 1], events[:, 2], events[:, 0].astype(np.float64))


def read_edits(repository: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield time (seconds since 1970), author and file of each edit, the oldest commit first.

    File names with quotes, control characters or non-ASCII letters are as git quotes them.

    Raises:
        ConfigError: git is not there, or fails.
    """
    command = ("git", "-C", str(repository), *_LOG)
    try:
        log = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError as error:
        raise ConfigError("--git needs the program git, which is not on this machine") from error
    with log:
        time, author = 0, b""
        for line in log.stdout or ():
            text = line.rstrip(b"\n")
            if text.startswith(_COMMIT):
                stamp, _, author = text[len(_COMMIT) :].partition(b" ")
                time = int(stamp)
            elif text:
                yield time, author, text
        complaint = log.stderr.read() if log.stderr else b""
    if log.returncode:
        raise ConfigError(f"--git {repository}: {complaint.decode(errors='replace').strip()}")


def synthetic(num_events: int, seed: int = 0) -> EventStream:
    """Make up edits: few authors do most of them, each mostly near one place among the files.

    Args:
        num_events: At least 1. There is an author for 100 events, and a file for 10.
        seed: The same seed gives the same events.
    """
    generator = np.random.default_rng(seed)
    num_authors, num_files = 2 + num_events // 100, 4 + num_events // 10
    activity = 1.0 / np.arange(1, num_authors + 1)
    authors = generator.choice(num_authors, num_events, p=activity / activity.sum())
    places = generator.integers(0, num_files, num_authors)
    files = (places[authors] + generator.geometric(0.05, num_events)) % num_files
    return _stream(authors, files, np.cumsum(generator.exponential(600.0, num_events)))


def _stream(authors: np.ndarray, files: np.ndarray, times: np.ndarray) -> EventStream:
    """Number the nodes that there are from 0, and let time begin with the first event."""
    author_names, authors = np.unique(authors, return_inverse=True)
    file_names, files = np.unique(files, return_inverse=True)
    pairs = np.stack([authors, len(author_names) + files], axis=1).astype(np.int64)
    return EventStream(
        pairs=torch.from_numpy(pairs),
        times=torch.from_numpy(times - times[0]),
        num_authors=len(author_names),
        num_nodes=len(author_names) + len(file_names),
    )


class DealtItemSampler(gb.ItemSampler):
    """Samples items that were dealt out to ranks already.

    As with `gb.DistributedItemSampler`, being a class of its own is what matters: the minibatches
    of a plain ``ItemSampler`` gb.DataLoader deals out to the ranks, here once more.
    """


def minibatches(stream: EventStream, batch_size: int, rank: int = 0, num_ranks: int = 1) -> Any:
    """Make the datapipe of a rank's minibatches, in order of time; they are dealt out in turn."""
    batches = torch.arange(len(stream)) // batch_size
    mine = batches % num_ranks == rank
    triples = torch.cat([stream.pairs, stream.negatives()[:, None]], dim=1)
    items = gb.ItemSet((triples[mine], stream.times[mine]), names=("seeds", "times"))
    return DealtItemSampler(items, batch_size, minibatcher=_minibatch)


def _minibatch(batch: tuple[Tensor, Tensor], names: tuple[str, ...]) -> gb.MiniBatch:
    """Make a minibatch of events: author, file, and a file that was not edited.

    Its nodes are listed once each; ``compacted_seeds``, ``(events, 3)``, are positions in the list.
    """
    triples, times = batch
    nodes, positions = torch.unique(triples, return_inverse=True)
    minibatch = gb.MiniBatch(seeds=triples, input_nodes=nodes, compacted_seeds=positions)
    minibatch.times = times
    return minibatch
