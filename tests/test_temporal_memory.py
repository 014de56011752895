"""The example of a temporal memory: its events, its precision, and that reading ahead is exact."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from featsync.errors import ConfigError
from pipelines import event_streams
from pipelines.event_streams import from_git, read_edits, synthetic
from pipelines.node_memory import NodeMemory, average_precision, rows_after, start_tables
from support.programs import results_of, run_program

pytestmark = pytest.mark.dgl

EPOCH = 1_000_000_000  # git takes no short numbers for dates
ODD_NAMES = [
    "two words",
    " leading",
    "trailing ",
    "new\nline",
    'quo"te',
    "-dash",
    "tab\there",
    "\x01 1 who@where",
    "carriage\rreturn",
    "form\x0cfeed",
    "back\\slash",
    "ä/ö",
]


class Repository:
    """A git repository that nobody's settings reach, with a clock of its own."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self("init", "--quiet", "--initial-branch=main")

    def __call__(self, *command, author="ann", time=0):
        who = {"NAME": author, "EMAIL": f"{author}@example.org", "DATE": f"{EPOCH + time} +0000"}
        settings = {
            f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in who.items()
        }
        settings |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
        subprocess.run(
            ["git", *command], cwd=self.folder, env={**os.environ, **settings}, check=True
        )

    def edit(self, *names, author="ann", time=0):
        """Commit a change of some files."""
        for name in names:
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(f"{author} {time}\n")
        self("add", "--all")
        self("commit", "--quiet", "--message=edit", author=author, time=time)


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "repository")


def edits(stream):
    """``(time, author, file)`` of each event, files counted from 0."""
    files = stream.pairs[:, 1] - stream.num_authors
    return list(
        zip(stream.times.tolist(), stream.pairs[:, 0].tolist(), files.tolist(), strict=True)
    )


def test_every_commit_and_file_is_an_event_whatever_the_name(repository):
    repository.edit(*ODD_NAMES)
    repository.edit("plain", author="bob", time=5)

    stream = from_git(repository.folder)

    assert (stream.num_authors, stream.num_nodes) == (2, 2 + len(ODD_NAMES) + 1)
    events = edits(stream)
    assert sorted(events[:-1]) == [(0.0, 0, file) for file in range(len(ODD_NAMES))]
    assert events[-1] == (5.0, 1, len(ODD_NAMES))


def test_events_are_in_order_of_time_not_of_commits(repository):
    repository.edit("a", time=50)
    repository.edit("a", "b", author="bob", time=20)
    repository.edit("b", author="cid", time=70)

    stream = from_git(repository.folder)

    # Names are numbered as git lists them, the oldest commit first.
    ann, bob, cid, a, b = 0, 1, 2, 0, 1
    assert edits(stream) == [(0.0, bob, a), (0.0, bob, b), (30.0, ann, a), (50.0, cid, b)]


def test_a_merge_brings_no_events_of_its_own(repository):
    repository.edit("base")
    repository("switch", "--quiet", "--create", "side")
    repository.edit("side", author="bob", time=1)
    repository("switch", "--quiet", "main")
    repository.edit("main", time=2)
    repository("merge", "--quiet", "--no-edit", "side", author="cid", time=3)

    found = sorted(read_edits(repository.folder))

    assert found == [
        (EPOCH, b"ann@example.org", b"base"),
        (EPOCH + 1, b"bob@example.org", b"side"),
        (EPOCH + 2, b"ann@example.org", b"main"),
    ]


def test_a_renamed_file_is_two_and_a_mapped_author_one(repository):
    repository.edit("old")
    repository("mv", "old", "new")
    mailmap = "Ann <ann@example.org> <ann2@example.org>\n"
    (repository.folder / ".mailmap").write_text(mailmap)
    repository("add", "--all")
    repository("commit", "--quiet", "--message=move", author="ann2", time=1)

    found = sorted(read_edits(repository.folder))

    assert {author for _, author, _ in found} == {b"ann@example.org"}
    assert [file for _, _, file in found] == [b"old", b".mailmap", b"new", b"old"]


def test_the_settings_of_a_repository_change_nothing(repository):
    repository.edit(*ODD_NAMES)
    repository("mv", "two words", "three words here")
    repository("commit", "--quiet", "--message=move", time=1)
    before = list(read_edits(repository.folder))

    for name, value in {
        "core.quotePath": "false",
        "log.showSignature": "true",
        "log.follow": "true",
        "diff.renames": "copies",
        "color.ui": "always",
    }.items():
        repository("config", name, value)

    assert list(read_edits(repository.folder)) == before


def test_only_the_newest_events_with_nodes_numbered_anew(repository):
    for time, name in enumerate("abcd"):
        repository.edit(name, author=f"author-{name}", time=time)

    stream = from_git(repository.folder, newest=2)

    assert len(stream) == 2
    assert (stream.num_authors, stream.num_nodes) == (2, 4)
    assert stream.times.tolist() == [0.0, 1.0]


def test_what_is_no_repository_or_has_no_edits_is_an_error(tmp_path, repository):
    with pytest.raises(ConfigError, match=r"--git .*elsewhere"):
        from_git(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="does not have any commits"):
        from_git(repository.folder)
    repository("commit", "--quiet", "--allow-empty", "--message=nothing")
    with pytest.raises(ConfigError, match="no commit changes a file"):
        from_git(repository.folder)


def test_made_up_events_repeat_with_their_seed():
    one, same, other = synthetic(500, 3), synthetic(500, 3), synthetic(500, 4)

    assert torch.equal(one.pairs, same.pairs)
    assert torch.equal(one.times, same.times)
    assert not torch.equal(one.pairs, other.pairs)
    assert bool((one.times.diff() >= 0).all())
    assert one.pairs[:, 0].unique().tolist() == list(range(one.num_authors))
    assert one.pairs[:, 1].unique().tolist() == list(range(one.num_authors, one.num_nodes))


def test_negatives_are_files_and_repeat():
    stream = synthetic(500)

    negatives = stream.negatives()

    assert torch.equal(negatives, stream.negatives())
    assert int(negatives.min()) >= stream.num_authors
    assert int(negatives.max()) < stream.num_nodes


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_batches_are_dealt_out_in_turn(num_ranks):
    stream = synthetic(95)
    ranks = [
        list(event_streams.minibatches(stream, 10, rank, num_ranks)) for rank in range(num_ranks)
    ]

    in_turn = [ranks[i % num_ranks][i // num_ranks] for i in range(10)]

    assert sum(map(len, ranks)) == 10
    assert torch.equal(torch.cat([m.seeds[:, :2] for m in in_turn]), stream.pairs)
    assert torch.equal(torch.cat([m.seeds[:, 2] for m in in_turn]), stream.negatives())
    assert torch.equal(torch.cat([m.times for m in in_turn]), stream.times)
    for minibatch in in_turn:
        assert torch.equal(minibatch.input_nodes[minibatch.compacted_seeds], minibatch.seeds)
        assert len(minibatch.input_nodes.unique()) == len(minibatch.input_nodes)


def test_average_precision_equals_a_value_by_hand():
    scores = torch.tensor([0.8, 0.9, 0.1, 0.8])
    labels = torch.tensor([0, 1, 1, 1])

    # One of one at 0.9; the two at 0.8 count together, two of three; then three of four.
    assert average_precision(scores, labels) == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)


def test_average_precision_of_extremes():
    scores = torch.tensor([3.0, 2.0, 1.0])

    assert average_precision(scores, torch.tensor([1, 1, 0])) == 1.0
    assert average_precision(scores, torch.tensor([0, 0, 1])) == pytest.approx(1 / 3)
    assert average_precision(torch.zeros(4), torch.tensor([0, 1, 0, 0])) == 0.25
    assert average_precision(scores, torch.zeros(3)) != average_precision(scores, torch.zeros(3))


def test_the_last_event_of_a_node_is_what_it_keeps():
    rows = start_tables(4, 2, seed=0)
    rows["clock"][1] = torch.tensor([3.0, 5.0])
    memory = torch.arange(8.0).reshape(4, 2)
    pairs = torch.tensor([[0, 1], [0, 3], [0, 1]])

    written, new = rows_after(rows, memory, pairs, torch.tensor([6.0, 7.0, 8.0]).double())

    assert written.tolist() == [0, 1, 3]
    assert new["memory"].tolist() == [[0.0, 1.0], [2.0, 3.0], [6.0, 7.0]]
    assert new["mail"].tolist() == [
        [0.0, 1.0, 2.0, 3.0],
        [2.0, 3.0, 0.0, 1.0],
        [6.0, 7.0, 0.0, 1.0],
    ]
    assert new["clock"].tolist() == [[0.0, 8.0], [5.0, 8.0], [0.0, 7.0]]


def test_a_memory_without_mail_stays_as_it_is():
    rows = start_tables(3, 4, seed=0)
    rows["clock"][2] = torch.tensor([0.0, 1.0])

    _, memory = NodeMemory(4)(rows, torch.tensor([[0, 2]]), torch.tensor([2.0]).double())

    assert torch.equal(memory[:2], rows["memory"][:2])
    assert not torch.equal(memory[2], rows["memory"][2])


def test_without_events_the_program_says_what_is_missing():
    done = run_program("temporal_memory.py")

    assert done.returncode == 2
    assert "--git PATH or --synthetic EVENTS" in done.stderr


@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
def test_reading_ahead_changes_no_bit(tmp_path, worker):
    options = ("--batch-size", 20, "--width", 8, "--lookahead", 4, "--worker", worker)

    results = results_of(tmp_path, "temporal_memory.py", "--synthetic", 600, *options)

    reference, exact, *late = results
    assert exact["losses"] == reference["losses"]
    assert exact["average_precision"] == reference["average_precision"]
    assert len(set(reference["losses"])) == 30
    assert [result["steps_late"] for result in (reference, exact)] == [0, 0]
    assert [result["steps_late"] <= bound for bound, result in enumerate(late, 1)] == [True, True]
    assert all(0 < result["average_precision"] <= 1 for result in late)


def test_a_repository_is_learned_from(tmp_path, repository):
    for time in range(12):
        repository.edit(f"{time % 4}", "all", author=f"author-{time % 2}", time=time)
    options = ("--batch-size", 4, "--width", 4, "--staleness", 3)

    results = results_of(tmp_path, "temporal_memory.py", "--git", repository.folder, *options)

    names = ["no lookahead", "featsync, exact", "featsync, 3 late"]
    assert [result["name"] for result in results] == names


@pytest.mark.multirank
def test_two_ranks_agree_however_far_they_look_ahead(tmp_path):
    def exact(*options):
        program = ("temporal_memory.py", "--synthetic", 610, "--batch-size", 20, "--width", 8)
        return results_of(tmp_path, *program, *options, ranks=2)[0]

    near = exact("--lookahead", 1, "--worker", "inline")
    far = exact("--lookahead", 4, "--worker", "thread")

    assert near["losses"] == far["losses"]
    assert near["average_precision"] == far["average_precision"]
