"""Builds the file of the `debian` dataset from what ``apt-cache dumpavail`` prints.

    python -m featsync.datasets.debian_builder --out debian.xz [--source FILE]

Without ``--source`` it asks ``apt-cache`` itself, and tells it to leave out what is installed, so
that the result depends on the archive only. ``--source -`` reads from standard input.

Rules:

* One stanza a package name. Of several, one of the main archive wins over one of the security
  archive (whose files lie under ``pool/updates/``), then the first. Packages are numbered by name.
* All alternatives of a dependency count. A name that is a package means that package, whatever
  version is asked for; another name means all packages that provide it, and if a version is asked
  for, all that provide a version of it. What nothing provides is left out, and so are packages
  that would depend on themselves. A package is linked to another at most once per relation.
* Words come from the first line of the description, in lower case, and from the tags. A word that
  only one package has says nothing about others and is left out. The section is a label and never
  becomes a word.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from featsync.datasets import packed
from featsync.datasets.debian import RELATIONS
from featsync.errors import ConfigError

_FIELDS = {relation: relation.title().replace("_", "-") for relation in RELATIONS}
_COMMAND = ("apt-cache", "--option", "Dir::State::status=/dev/null", "dumpavail")
_WORD = re.compile(r"[a-z][a-z0-9]+")
_REFERENCE = re.compile(r"\s*([a-z0-9][a-z0-9+.\-]*)(?::[a-z0-9\-]+)?\s*(\(.*\))?")

Stanza = dict[str, str]
Links = dict[int, bool]


@dataclass(frozen=True)
class Index:
    """The packages of an archive and what they have to do with each other.

    Attributes:
        names: Package names, ascending; the position is the package's id.
        sections: Section of each package.
        maintainers: Maintainer of each package.
        words: Distinct words of each package's description.
        tags: Distinct tags of each package.
        links: By relation, for each package: whom it names, and whether it asks for a version.
    """

    names: list[str]
    sections: list[str]
    maintainers: list[str]
    words: list[set[str]]
    tags: list[set[str]]
    links: dict[str, list[Links]]


def read_stanzas(lines: Iterable[str]) -> Iterator[Stanza]:
    """Yield the fields of each stanza; lines of one field are joined by newlines."""
    stanza: Stanza = {}
    field = ""
    for line in lines:
        text = line.rstrip("\n")
        if not text.strip():
            if stanza:
                yield stanza
            stanza, field = {}, ""
        elif text[0] in " \t":
            if field:
                stanza[field] += "\n" + text.strip()
        else:
            field, _, value = text.partition(":")
            stanza[field] = value.strip()
    if stanza:
        yield stanza


def build_index(stanzas: Iterable[Stanza]) -> Index:
    """Keep one stanza a package, by the rules above, and resolve who depends on whom."""
    chosen = _one_per_name(stanzas)
    names = sorted(chosen)
    packages = [chosen[name] for name in names]
    ids = {name: package for package, name in enumerate(names)}
    providers = _providers(packages)
    return Index(
        names=names,
        sections=[package.get("Section", "unknown").rpartition("/")[2] for package in packages],
        maintainers=[package.get("Maintainer", "unknown") for package in packages],
        words=[_words_of(package) for package in packages],
        tags=[_tags_of(package) for package in packages],
        links={
            relation: [
                _links_of(number, package.get(field, ""), ids, providers)
                for number, package in enumerate(packages)
            ]
            for relation, field in _FIELDS.items()
        },
    )


def save_index(index: Index, path: Path) -> None:
    """Write the index in the form `featsync.datasets.debian` reads."""
    section_names = sorted(set(index.sections))
    maintainer_names = sorted(set(index.maintainers))
    arrays: dict[str, packed.Integers] = {
        "names": _text(index.names),
        "sections": _positions(index.sections, section_names),
        "section_names": _text(section_names),
        "maintainers": _positions(index.maintainers, maintainer_names),
        **_word_arrays("word", index.words, rarest=2),
        **_word_arrays("tag", index.tags, rarest=1),
    }
    for relation, links in index.links.items():
        lists = [sorted(targets) for targets in links]
        arrays.update(_list_arrays(relation, lists))
        versioned = [links[i][target] for i, targets in enumerate(lists) for target in targets]
        arrays[f"{relation}_versioned"] = np.packbits(np.array(versioned, dtype=bool)).astype(
            np.int64
        )
    packed.save(path, arrays)


def word_hash(word: str) -> int:
    """Hash a word to 32 bits, the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little")


def _one_per_name(stanzas: Iterable[Stanza]) -> dict[str, Stanza]:
    chosen: dict[str, Stanza] = {}
    for stanza in stanzas:
        name = stanza.get("Package", "")
        if name and (name not in chosen or _is_security(chosen[name]) > _is_security(stanza)):
            chosen[name] = stanza
    return chosen


def _is_security(stanza: Stanza) -> bool:
    return stanza.get("Filename", "").startswith("pool/updates/")


def _providers(packages: list[Stanza]) -> dict[str, Links]:
    """For each provided name: who provides it, and whether with a version."""
    providers: dict[str, Links] = {}
    for number, package in enumerate(packages):
        for name, versioned in _references(package.get("Provides", "")):
            of_name = providers.setdefault(name, {})
            of_name[number] = of_name.get(number, False) or versioned
    return providers


def _references(field: str) -> Iterator[tuple[str, bool]]:
    """Yield every package name in a dependency field, and whether a version stands with it."""
    for reference in re.split(r"[,|]", field.replace("\n", " ")):
        match = _REFERENCE.match(reference)
        if match:
            yield match[1], match[2] is not None


def _links_of(package: int, field: str, ids: dict[str, int], providers: dict[str, Links]) -> Links:
    links: Links = {}
    for name, versioned in _references(field):
        if name in ids:
            targets = [ids[name]]
        else:
            offers = providers.get(name, {})
            targets = [target for target, offered in offers.items() if offered or not versioned]
        for target in targets:
            if target != package:
                links[target] = links.get(target, False) or versioned
    return links


def _words_of(package: Stanza) -> set[str]:
    synopsis = package.get("Description", "").partition("\n")[0]
    return set(_WORD.findall(synopsis.lower()))


def _tags_of(package: Stanza) -> set[str]:
    tags = package.get("Tag", "").replace("\n", " ").split(",")
    return {tag.strip() for tag in tags} - {""}


def _text(lines: list[str]) -> packed.Integers:
    return np.frombuffer("\n".join(lines).encode(), dtype=np.uint8).astype(np.int64)


def _positions(values: list[str], table: list[str]) -> packed.Integers:
    position = {value: number for number, value in enumerate(table)}
    return np.array([position[value] for value in values], dtype=np.int64)


def _word_arrays(name: str, words: list[set[str]], rarest: int) -> dict[str, packed.Integers]:
    """Number the words by how many packages have them, so that small numbers are common."""
    counts = Counter(word for of_package in words for word in of_package)
    kept = [word for word, count in counts.items() if count >= rarest]
    kept.sort(key=lambda word: (-counts[word], word))
    position = {word: number for number, word in enumerate(kept)}
    lists = [sorted(position[word] for word in of if word in position) for of in words]
    arrays = _list_arrays(name, lists)
    arrays[f"{name}_hashes"] = np.array([word_hash(word) for word in kept], dtype=np.int64)
    return arrays


def _list_arrays(name: str, lists: list[list[int]]) -> dict[str, packed.Integers]:
    lengths = np.array([len(values) for values in lists], dtype=np.int64)
    flat = np.array([value for values in lists for value in values], dtype=np.int64)
    return {f"{name}_lengths": lengths, f"{name}_deltas": packed.to_deltas(lengths, flat)}


def _read_text(source: str | None) -> str:
    if source == "-":
        return sys.stdin.read()
    if source is not None:
        return Path(source).read_text(encoding="utf-8")
    try:
        found = subprocess.run(_COMMAND, check=True, capture_output=True, encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            "apt-cache is not on this machine; give its output with --source FILE instead."
        ) from error
    return found.stdout


def main(
    out: Annotated[Path, typer.Option(help="The file to write.")],
    source: Annotated[str | None, typer.Option(help="Index text; - is standard input.")] = None,
) -> None:
    """Build the file of the debian dataset."""
    index = build_index(read_stanzas(_read_text(source).splitlines()))
    save_index(index, out)
    edges = sum(len(links) for of_relation in index.links.values() for links in of_relation)
    typer.echo(
        f"{out}: {len(index.names):,} packages, {len(set(index.sections))} sections, "
        f"{edges:,} edges, {out.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    typer.run(main)
