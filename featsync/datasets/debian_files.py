"""The `debian-files` dataset: every file of Debian 12, its folder and the packages that ship it.

A large real graph: 7.3 million files, 0.6 million folders, 60,000 packages, 31 million edges. It is
too large to be bundled, so it is built on first use, on a Debian machine, from the index that
``apt-file`` keeps (the Contents files of the main archive), into a folder that GraphBolt opens as
an ``OnDiskDataset``; `featsync.datasets.debian_files_builder` does that. The features lie in files
and are mapped, not read.

Node types ``file``, ``folder``, ``package``; edge types ``folder:contains:file``,
``folder:parent_of:folder``, ``package:ships:file`` and their reverses ``file:in:folder``,
``folder:child_of:folder``, ``file:shipped_by:package``. Node feature ``feat``: the hashed parts of
the name (`featsync.datasets.hashed_words`). Two tasks: ``node_classification``, the section of a
package, and ``file_classification``, the section of a file's package (of the first, if several
ship it).
"""

from __future__ import annotations

import fcntl
import heapq
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from pydantic import Field

from featsync.datasets import debian_files_builder
from featsync.datasets.debian_files_builder import Entry
from featsync.datasets.graph_data import Topology
from featsync.datasets.options import Options
from featsync.errors import ConfigError, PeerTimeoutError

SaveGraph = Callable[[Topology, Path], None]

_FIND_LISTS = ("apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(FILENAME)")
_ONLY_CONTENTS = "Created-By: Contents-deb"
_LONGEST_BUILD_S = 3600.0  # a build takes minutes
_LOCK_PAUSE_S = 0.5
_READ_LIST = ("/usr/lib/apt/apt-helper", "cat-file")
_ADVICE = "install it with: apt-get install apt-file && apt-file update"


class DebianFilesOptions(Options):
    """Options of the `debian-files` dataset.

    Attributes:
        folder: Where it is, or is to be built; by default a folder in the user's cache. It is
            built anew only where there is none yet.
        width: Columns of the node features.
        limit: Stop after so many files, for a quick try.
    """

    folder: str = Field(default="~/.cache/featsync/debian-files", min_length=1)
    width: int = Field(default=32, ge=1, le=65536)
    limit: int | None = Field(default=None, ge=1)


def ensure(options: DebianFilesOptions, save_graph: SaveGraph) -> Path:
    """Return the folder of the dataset, building it first if it is not there.

    Several ranks may ask at once: one builds, the others wait for it.

    Raises:
        ConfigError: The folder was built with other options, is something else, or apt-file's
            index is not on this machine.
    """
    folder = Path(options.folder).expanduser().absolute()
    with _alone_in(folder.parent):
        if not folder.exists():
            build(folder, save_graph, limit=options.limit, width=options.width)
            return folder
    found = debian_files_builder.settings_of(folder)
    wanted = {"width": options.width, "limit": options.limit}
    if found != wanted:
        raise ConfigError(
            f"dataset.debian-files.folder = {str(folder)!r} holds "
            f"{'something else' if found is None else f'a dataset built with {found}'}, "
            f"but {wanted} is asked for; name another folder, or remove this one."
        )
    return folder


def build(
    folder: Path,
    save_graph: SaveGraph,
    limit: int | None = None,
    width: int = 32,
    lists: Sequence[Path] | None = None,
) -> None:
    """Build the dataset: about two minutes, 2 GB of memory and 1.5 GB on disk for all files.

    Args:
        folder: What to create. It appears complete or not at all.
        save_graph: Writes the graph to a file in the form GraphBolt reads.
        limit: Stop after so many files.
        width: Columns of the node features.
        lists: Contents files, compressed or not; by default those that apt-file fetched.

    Raises:
        ConfigError: apt-file's index is not on this machine.
    """
    if lists is None:
        lists = _find_lists()
    entries = islice(_read_entries(lists), limit)
    debian_files_builder.build(entries, folder, width, limit, save_graph)


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Hold a lock on a folder; the system lets go of it when its holder dies.

    Raises:
        PeerTimeoutError: Another process held it for longer than a build takes.
    """
    parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(parent, os.O_RDONLY)
    deadline = time.monotonic() + _LONGEST_BUILD_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise PeerTimeoutError(
                        f"another process has been building in {parent} for {_LONGEST_BUILD_S:.0f} "
                        f"s. Look at it (fuser {parent}), or choose another folder.",
                        peer=f"the builder in {parent}",
                    ) from error
                time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(descriptor)


def _find_lists() -> list[Path]:
    try:
        found = subprocess.run(
            (*_FIND_LISTS, _ONLY_CONTENTS), check=True, capture_output=True, encoding="utf-8"
        )
    except FileNotFoundError as error:
        raise ConfigError(
            "dataset debian-files is built from apt's lists, and there is no apt on this machine; "
            "build it on a Debian machine, or use the dataset debian, which is bundled."
        ) from error
    lists = []
    for line in found.stdout.splitlines():
        codename, component, name = line.split(" ", 2)
        # The updates of a release (bookworm-updates) repeat files of the release itself.
        if component == "main" and "-" not in codename:
            lists.append(Path(name))
    if not lists:
        raise ConfigError(f"dataset debian-files needs the index of apt-file; {_ADVICE}")
    return lists


def _read_entries(lists: Sequence[Path]) -> Iterator[Entry]:
    """Yield each file once, by path: the lists are sorted, and a path may be in several."""
    path, packages = "", []
    for next_path, next_packages in heapq.merge(*map(_read_list, lists)):
        if next_path == path:
            packages.extend(next_packages)
            continue
        if packages:
            yield path, packages
        path, packages = next_path, next_packages
    if packages:
        yield path, packages


def _read_list(path: Path) -> Iterator[Entry]:
    """Yield path and ``section/package`` names of each line of a Contents file."""
    if path.suffix in {"", ".txt"}:
        with path.open(encoding="utf-8", errors="surrogateescape") as lines:
            yield from _parse(lines)
        return
    command = (*_READ_LIST, str(path))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, encoding="utf-8", errors="surrogateescape"
    ) as reader:
        if reader.stdout is not None:
            yield from _parse(reader.stdout)
    if reader.returncode:
        raise ConfigError(f"{path} cannot be read by {' '.join(command)}; {_ADVICE}")


def _parse(lines: Iterable[str]) -> Iterator[Entry]:
    for line in lines:
        # A path may have spaces in it, the names of packages have none.
        path, _, packages = line.rstrip("\n").rpartition(" ")
        if path:
            yield path.rstrip(), packages.split(",")
