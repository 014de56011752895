"""The builder of the debian dataset, on a handwritten index."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from featsync.datasets import debian, debian_builder
from featsync.datasets.debian_builder import build_index, read_stanzas
from featsync.errors import ConfigError

INDEX = """\
Package: gamma
Maintainer: Second <second@example.org>
Provides: virtual (= 3), gamma-api
Depends: virtual, gamma-api
Description: Shared library of gamma
Section: libs
Filename: pool/main/g/gamma.deb

Package: alpha
Description: from the security archive
Section: admin
Filename: pool/updates/main/a/alpha.deb

Package: alpha
Maintainer: First <first@example.org>
Depends: beta (>= 1) | gamma, delta:any, missing, beta
Pre-Depends: gamma
Recommends: virtual
Suggests: virtual (>= 2),
 extra (>= 1)
Description: Shared Library for ALPHA; 3d, a b2
 A longer text that does not count.
Tag: role::program,
 use::viewing, role::shared-lib,
Section: contrib/utils
Filename: pool/main/a/alpha.deb

Package: alpha
Description: a second one of main
Section: games
Filename: pool/main/a/alpha2.deb


Package: beta
Maintainer: First <first@example.org>
Provides: virtual, extra (= 1)
Description: library
Tag: role::shared-lib
Section: libs

Package: delta
"""

ALPHA, BETA, DELTA, GAMMA = range(4)


@pytest.fixture(scope="module")
def index():
    return build_index(read_stanzas(INDEX.splitlines()))


@pytest.fixture(scope="module")
def read_back(index, tmp_path_factory):
    path = tmp_path_factory.mktemp("debian") / "index.xz"
    debian_builder.save_index(index, path)
    return debian.read_index(path)


def test_continuation_lines_belong_to_their_field():
    stanzas = list(read_stanzas(INDEX.splitlines()))

    assert len(stanzas) == 6
    assert stanzas[2]["Suggests"] == "virtual (>= 2),\nextra (>= 1)"
    assert stanzas[5] == {"Package": "delta"}


def test_packages_are_sorted_and_the_first_of_main_wins(index):
    assert index.names == ["alpha", "beta", "delta", "gamma"]
    assert index.sections == ["utils", "libs", "unknown", "libs"]


def test_missing_fields_are_unknown_or_empty(index):
    assert index.maintainers[DELTA] == "unknown"
    assert index.words[DELTA] == index.tags[DELTA] == set()


def test_words_come_from_the_first_line_and_tags_from_all(index):
    assert index.words[ALPHA] == {"shared", "library", "for", "alpha", "b2"}
    assert index.tags[ALPHA] == {"role::program", "use::viewing", "role::shared-lib"}


def test_every_alternative_counts_and_one_version_is_enough(index):
    # beta is named with and without a version; the qualifier :any does not matter.
    assert index.links["depends"][ALPHA] == {BETA: True, GAMMA: False, DELTA: False}
    assert index.links["pre_depends"][ALPHA] == {GAMMA: False}


def test_a_virtual_name_means_its_providers(index):
    assert index.links["recommends"][ALPHA] == {BETA: False, GAMMA: False}


def test_a_version_asks_for_providers_of_a_version(index):
    # virtual (>= 2): only gamma provides a version of it. extra (>= 1): beta does.
    assert index.links["suggests"][ALPHA] == {GAMMA: True, BETA: True}


def test_a_package_is_not_linked_to_itself(index):
    # gamma provides both names it depends on; beta provides the first as well.
    assert index.links["depends"][GAMMA] == {BETA: False}


def test_the_file_holds_the_same(read_back):
    assert read_back.names == ["alpha", "beta", "delta", "gamma"]
    assert read_back.section_names == ["libs", "unknown", "utils"]
    assert read_back.sections.tolist() == [2, 0, 1, 0]
    assert read_back.maintainers.tolist() == [0, 0, 2, 1]
    edges = {name: [part.tolist() for part in parts] for name, parts in read_back.links.items()}
    assert edges == {
        "depends": [
            [ALPHA, ALPHA, ALPHA, GAMMA],
            [BETA, DELTA, GAMMA, BETA],
            [1, 0, 0, 0],
        ],
        "pre_depends": [[ALPHA], [GAMMA], [0]],
        "recommends": [[ALPHA, ALPHA], [BETA, GAMMA], [0, 0]],
        "suggests": [[ALPHA, ALPHA], [BETA, GAMMA], [1, 1]],
    }


def test_words_of_one_package_alone_are_left_out(read_back):
    # "library" is in three descriptions, "shared" in two.
    library, shared = hash_by_hand("library"), hash_by_hand("shared")

    assert read_back.words.lengths.tolist() == [2, 1, 0, 2]
    assert read_back.words.hashes.tolist() == [library, shared, library, library, shared]


def test_tags_are_hashed_whole(read_back):
    tags = read_back.tag_hashes[read_back.tags].tolist()

    assert read_back.tag_lengths.tolist() == [3, 1, 0, 0]
    assert sorted(tags[:3]) == sorted(
        map(hash_by_hand, ["role::program", "use::viewing", "role::shared-lib"])
    )
    assert tags[3] == hash_by_hand("role::shared-lib")


def hash_by_hand(word):
    digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
    return sum(byte << (8 * position) for position, byte in enumerate(digest))


def test_the_command_reads_a_file_or_standard_input(tmp_path):
    (tmp_path / "index.txt").write_text(INDEX)
    app = typer.Typer()
    app.command()(debian_builder.main)

    from_file = CliRunner().invoke(
        app, ["--out", str(tmp_path / "a.xz"), "--source", str(tmp_path / "index.txt")]
    )
    from_input = CliRunner().invoke(
        app, ["--out", str(tmp_path / "b.xz"), "--source", "-"], input=INDEX
    )

    assert from_file.exit_code == from_input.exit_code == 0
    assert "4 packages, 3 sections, 9 edges" in from_file.output
    assert (tmp_path / "a.xz").read_bytes() == (tmp_path / "b.xz").read_bytes()


def test_without_apt_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(debian_builder, "_COMMAND", ("a-command-that-is-not-there",))

    with pytest.raises(ConfigError, match="--source FILE"):
        debian_builder.main(tmp_path / "out.xz")


def test_both_forms_of_the_small_graph_agree(read_back):
    flat = debian.make_graph(read_back, debian.DebianOptions(width=8), "node_classification")
    typed = debian.make_graph(
        read_back, debian.DebianOptions(width=8, heterogeneous=True), "node_classification"
    )

    assert flat.num_edges == 2 * 9
    # Nine each way, four maintained packages and four tags, each way too.
    assert typed.num_edges == 2 * 9 + 2 * 4 + 2 * 4
    feat = flat.features["node", None, "feat"]
    assert np.array_equal(feat, typed.features["node", "package", "feat"])
    means = typed.features["node", "maintainer", "feat"]
    np.testing.assert_allclose(means[0], (feat[ALPHA] + feat[BETA]) / 2, rtol=1e-6)
    np.testing.assert_allclose(means[1], feat[GAMMA], rtol=1e-6)
