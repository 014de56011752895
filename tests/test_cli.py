"""The command line: what it prints and writes, and its exit status."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from support.commands import FEATSYNC, SAMPLE, STOCK, run_command, write_pipeline
from support.folders import preprocessed_folder

pytestmark = pytest.mark.dgl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return preprocessed_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def pipeline(folder, tmp_path):
    """Writes a configuration file; gives its path as typed."""

    def write(name, stages, **changes):
        return write_pipeline(tmp_path / f"{name}.yaml", folder, stages, **changes)

    return write


@pytest.fixture
def featsync(monkeypatch, capsys):
    """Runs the program; gives exit status, and what it printed on both channels."""
    return partial(run_command, monkeypatch, capsys)


@pytest.mark.parametrize("stages", [STOCK, FEATSYNC], ids=["stock", "featsync"])
def test_check_compares_rows_and_says_what_was_chosen(featsync, pipeline, stages):
    status, printed, _ = featsync("check", pipeline("good", stages), "--minibatches", "3")

    assert status == 0
    assert "3 minibatches" in printed
    assert ": 0 wrong" in printed
    for feature in ("node/None/feat", "node/None/mapped", "edge/None/weight"):
        assert feature in printed


def test_check_finds_wrong_rows_of_a_stage_that_the_user_brings(featsync, pipeline):
    wrong = {"fetch_wrongly": {"node_feature_keys": ["feat"]}}
    path = pipeline("wrong", [SAMPLE, wrong])

    status, printed, errors = featsync("check", path, "--import", "support.wrong_stages")

    assert status == 1
    assert "15 wrong" in printed  # of 8 minibatches, all but the last compared twice
    assert "failed: 15 rows differ" in errors


def test_record_writes_the_ids_of_an_epoch(featsync, pipeline, tmp_path):
    out = tmp_path / "trace.npz"

    status, printed, _ = featsync("record", pipeline("good", FEATSYNC), "--out", str(out))

    with np.load(out) as trace:
        ids, offsets = trace["node/None/feat/ids"], trace["node/None/feat/offsets"]
        edges, edge_offsets = trace["edge/None/weight/ids"], trace["edge/None/weight/offsets"]
        rows = (int(trace["node/None/feat/num_rows"]), int(trace["edge/None/weight/num_rows"]))
    assert status == 0
    assert f"node/None/feat: {len(ids):,} ids" in printed
    assert ids.dtype == offsets.dtype == np.int64
    assert (len(offsets), offsets[0], offsets[-1]) == (9, 0, len(ids))
    assert (len(edge_offsets), edge_offsets[-1]) == (9, len(edges))
    assert rows == (200, 2000)
    # Sampled nodes are distinct in each minibatch, and lie in the table.
    for first, last in pairwise(offsets):
        assert len(np.unique(ids[first:last])) == last - first
    assert 0 <= ids.min() <= ids.max() < 200


def test_bench_writes_report_picture_and_trace(featsync, pipeline, tmp_path):
    out, picture, trace = (tmp_path / name for name in ("o.json", "o.png", "t.json"))
    paths = [pipeline("stock", STOCK), pipeline("featsync", FEATSYNC)]
    files = ["--json", str(out), "--plot", str(picture), "--trace", str(trace)]

    status, printed, _ = featsync("bench", *paths, "--pairs", "1", "--simulate-step", "1", *files)

    report = json.loads(out.read_text())
    assert status == 0
    assert [run["config"] for run in report["runs"]] == ["stock", "featsync"]
    assert [run["wrong_rows"] for run in report["runs"]] == [0, 0]
    assert report["schema"] == 1
    assert set(report["runs"][1]["transport"]) == {
        "node/None/feat",
        "node/None/mapped",
        "edge/None/weight",
    }
    assert report["runs"][1]["why"]
    assert report["environment"]["cores"] >= 1
    assert report["workload"]["model"] == "simulated, 1 ms"
    assert "wrong rows" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["check", "absent.yaml"], ["absent.yaml cannot be read"]),
        (["check", "GOOD", "--set", "num_worker=1"], ["Did you mean 'num_workers'?"]),
        (["check", "GOOD", "--set", "batch_size=big"], ["batch_size = 'big'"]),
        (["check", "GOOD", "--import", "no_such_module"], ["no_such_module"]),
        (["bench", "GOOD"], ["at least one other"]),
        (["bench", "GOOD", "GOOD"], ["given twice"]),
        (["bench", "GOOD", "GOOD", "--model", "sag"], ["Did you mean 'sage'?"]),
        (["bench", "GOOD", "GOOD", "--simulate-step", "x"], ["--simulate-step"]),
        (["bench", "GOOD", "GOOD", "--json", "absent/o.json"], ["absent/o.json", "no folder"]),
        (["record", "GOOD", "--out", "absent/t.npz"], ["absent/t.npz", "no folder"]),
        (["bench", "GOOD", "GOOD", "--ranks", "0"], ["--ranks"]),
        (["chek", "GOOD"], ["chek"]),
    ],
)
def test_a_wrong_request_is_one_message_and_status_2(featsync, pipeline, arguments, parts):
    good = pipeline("good", STOCK)

    status, _, errors = featsync(*(good if word == "GOOD" else word for word in arguments))

    assert status == 2
    assert "Traceback" not in errors
    for part in parts:
        assert part in errors
