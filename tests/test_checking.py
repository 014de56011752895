"""``featsync check`` of tables that are split: who holds what, and whether rows are right."""

from __future__ import annotations

import re

import pytest

from featsync.bench.check_rows import RowCheck
from featsync.checking.protocol import FeatureFound, Outcome
from featsync.checking.report import holdings_table, summary
from featsync.transports import TRANSPORTS
from support.commands import FEATSYNC, run_command, write_pipeline
from support.folders import preprocessed_folder

pytestmark = pytest.mark.dgl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return preprocessed_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def check(folder, tmp_path, monkeypatch, capsys):
    """Checks a pipeline; gives exit status, and what was printed on both channels."""

    def run(*arguments, stages=FEATSYNC, **changes):
        path = write_pipeline(tmp_path / "split.yaml", folder, stages, **changes)
        return run_command(monkeypatch, capsys, "check", path, *arguments)

    return run


@pytest.mark.multirank
@pytest.mark.parametrize("partition", ["contiguous", "metis"])
def test_on_several_ranks_it_says_who_holds_what_and_how_much_is_remote(check, partition):
    status, printed, _ = check("--ranks", "2", "--minibatches", "3", partition=partition)

    assert status == 0
    held = {
        int(rank): int(rows.replace(",", ""))
        for rank, rows in re.findall(r"^│\s+(\d) │\s+([\d,]+) │", printed, re.MULTILINE)
    }
    assert set(held) == {0, 1}
    assert sum(held.values()) == 200
    share = float(re.search(r"Of the neighbours of a node, ([\d.]+)% lie on another", printed)[1])
    assert 0 < share < 100
    assert "lay anywhere it would be 50.0%" in printed
    assert "6 minibatches on 2 ranks" in printed
    assert ": 0 wrong" in printed
    assert "What was chosen on rank 0" in printed
    assert "all parts lie in this machine's memory" in printed or "shared_memory" in printed


@pytest.mark.multirank
def test_a_transport_that_brings_other_rows_is_found(check, monkeypatch):
    for name, transport in TRANSPORTS.items():  # the command imports it too
        monkeypatch.setitem(TRANSPORTS, name, transport)
    arguments = ("--ranks", "2", "--minibatches", "2", "--import", "support.wrong_transports")

    status, printed, errors = check(*arguments, partition="hashed")

    assert status == 1
    assert re.search(r"[1-9][\d,]* wrong \(rank 0: \d+, rank 1: \d+\)", printed)
    assert "rows differ from their tables" in errors


@pytest.mark.multirank
def test_a_rank_that_fails_is_named(check):
    stages = [*FEATSYNC, {"fail_on_rank": {"rank": 1}}]

    status, _, errors = check("--ranks", "2", "--import", "support.wrong_stages", stages=stages)

    assert status == 1
    assert "rank 1 of split failed" in errors
    assert "ZeroDivisionError: on purpose" in errors


def test_on_one_rank_it_says_that_there_is_more_to_see(check):
    status, printed, _ = check("--minibatches", "2", partition="hashed")

    assert status == 0
    assert "with --ranks R" in printed
    assert ": 0 wrong" in printed


def test_tables_of_a_pipeline_that_is_not_split_are_not_laid_out(check):
    status, printed, _ = check("--minibatches", "2")

    assert status == 0
    assert "Who holds" not in printed
    assert "another rank" not in printed


def outcome(rank, wrong, share=None):
    split = FeatureFound("node/None/x", (3,), "p2p", "why", 0.5, 40, 10 + rank, (700, 1300))
    plain = FeatureFound("node/None/y", (3,), "stock", "why", None, 40, 0, ())
    return Outcome(5, RowCheck(80, wrong), [split, plain], share)


def test_the_report_tells_ranks_apart():
    outcomes = [outcome(0, 0, share=0.25), outcome(1, 7)]

    table = holdings_table(outcomes)
    first, last = summary(outcomes)

    assert [list(column.cells) for column in table.columns] == [
        ["0", "1"],
        ["700", "1,300"],
        ["25.0%", "27.5%"],
    ]
    assert "25.0% lie on another rank" in first
    assert last == "10 minibatches on 2 ranks, 160 rows compared: 7 wrong (rank 1: 7)"
