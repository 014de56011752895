"""Whole comparisons, each configuration in processes of its own: nothing is overlooked."""

from __future__ import annotations

import os
import signal

import pytest

from featsync.errors import ConfigError, PeerError, PeerTimeoutError
from support.folders import preprocessed_folder

pytestmark = pytest.mark.dgl


STAGES = [
    {"sample_neighbor": {"fanouts": [3, 3]}},
    {"fetch_feature": {"node_feature_keys": ["feat"]}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return preprocessed_folder(tmp_path_factory.mktemp("tiny"))


def configuration(folder, name, *stages, **changes):
    from featsync import config

    settings = {"dataset": {"path": str(folder)}, "batch_size": 16, "stages": list(stages)}
    return config.parse({**settings, **changes}, f"{name}.yaml")


def test_configurations_of_different_workloads_are_not_compared(folder):
    from featsync.bench.driver import Driver, Options

    base = configuration(folder, "base", *STAGES)
    other = configuration(folder, "other", *STAGES, batch_size=32)

    with pytest.raises(ConfigError, match=r"batch_size is 16 in base\.yaml and 32 in"):
        Driver([base, other], Options())
    with pytest.raises(ConfigError, match="at least one other"):
        Driver([base], Options())
    with pytest.raises(ConfigError, match="given twice"):
        Driver([base, base], Options())


def lane(config, **changes):
    from featsync.bench.lane import Lane
    from featsync.bench.protocol import RankSpec

    settings = {"model": "none", "modules": ("support.wrong_stages",), "timeout": 60.0}
    return Lane(
        RankSpec(config.name, config, 0, store_file="", **{"world_size": 1, **settings, **changes})
    )


def test_a_comparison_reports_every_key_and_finds_every_changed_row(folder):
    from featsync.bench.driver import Driver, Options
    from featsync.bench.report import tables, to_json, wrong_rows
    from featsync.bench.trace import to_trace

    wrong = {"fetch_wrongly": {"node_feature_keys": ["feat"]}}
    configs = [
        configuration(folder, "stock", *STAGES),
        configuration(folder, "wrong", STAGES[0], wrong, allocator="keep"),
    ]
    options = Options(pairs=1, modules=("support.wrong_stages",), with_marks=True)
    seen = []

    results = Driver(configs, options, lambda *progress: seen.append(progress)).run()
    report = to_json(results, options, {}, "featsync bench")
    stock, other = report["runs"]

    assert (stock["wrong_rows"], stock["config"], stock["ranks"]) == (0, "stock", 1)
    assert stock["minibatches"] == other["minibatches"] == [8]
    # One row of each minibatch in the warm-up, before and after the step; and of the timed epoch
    # one of the two minibatches that are kept.
    assert other["wrong_rows"] == wrong_rows(report) == 8 * 2 + 2
    assert stock["rows"] > 0
    assert stock["bytes"] == {"host": stock["rows"] * 32, "cache": 0, "peer": 0}
    assert (len(stock["epoch_s"]), len(other["epoch_s"])) == (2, 1)
    assert set(report["noise"]) == {"epoch", "cpu"}
    assert set(report["ratio"]["wrong"]) == {"epoch", "cpu", "exposed", "wait", "exposed_usual"}
    assert report["ratio"]["wrong"]["epoch"]["median"] > 0
    assert len(tables(report)) == 2
    assert len(to_trace(results)["traceEvents"]) == 2 * (1 + 1 + 8 * 2)
    assert seen[-1][1] == seen[-1][2]


@pytest.mark.multirank
def test_two_ranks_train_together_and_each_is_compared(folder):
    from featsync.bench.protocol import RunEpoch

    stages = [STAGES[0], {"fetch_wrongly": {"node_feature_keys": ["feat"]}}]
    pair = lane(configuration(folder, "pair", *stages), world_size=2, model="sage")
    try:
        workload = pair.wait_ready()
        reports = [pair.run(RunEpoch(kind)) for kind in ("warm_up", "floor", "timed")]
        pair.finish()
    finally:
        pair.kill()

    assert workload["nodes"] == 200
    for reports_of_epoch, wrong in zip(reports, (8, 0, 2), strict=True):
        assert [report.minibatches for report in reports_of_epoch] == [4, 4]
        assert [report.check.wrong for report in reports_of_epoch] == [wrong, wrong]
        assert all(0 < report.next_s < report.wall_s for report in reports_of_epoch)


@pytest.mark.multirank
@pytest.mark.parametrize("partition", ["hashed", "contiguous"])
@pytest.mark.parametrize("module", ["support.wrong_stages", "support.wrong_transports"])
def test_rows_of_split_tables_are_compared_with_the_whole_ones(folder, module, partition):
    """Not with what the feature itself reads: that goes the same wrong way."""
    from featsync.bench.protocol import RunEpoch

    keys = {"node_feature_keys": ["feat", "mapped"], "edge_feature_keys": ["weight"]}
    stages = [STAGES[0], {"plan_feature": keys}, {"sync_feature": {"transport": "p2p"}}]
    split = lane(
        configuration(folder, "split", *stages, partition=partition),
        world_size=2, modules=(module,),
    )  # fmt: skip
    try:
        split.wait_ready()
        checks = [report.check for k in ("warm_up", "timed") for report in split.run(RunEpoch(k))]
        split.finish()
    finally:
        split.kill()

    is_broken = module == "support.wrong_transports"
    assert all(check.checked > 0 for check in checks)
    assert [check.wrong > 0 for check in checks] == [is_broken] * 4


@pytest.mark.multirank
def test_a_rank_that_raises_ends_the_lane_with_its_own_error(folder):
    from featsync.bench.protocol import RunEpoch

    failing = lane(
        configuration(folder, "failing", *STAGES, {"fail_on_rank": {"rank": 1}}),
        world_size=2,
        model="sage",
    )
    try:
        failing.wait_ready()

        with pytest.raises(PeerError, match="rank 1 of failing failed") as caught:
            failing.run(RunEpoch("timed"))
    finally:
        failing.kill()

    assert "ZeroDivisionError: on purpose" in str(caught.value)


def test_a_rank_that_dies_is_named_with_its_last_words(folder):
    from featsync.bench.protocol import RunEpoch

    dying = lane(
        configuration(folder, "dying", *STAGES, {"fail_on_rank": {"rank": 0, "exit_code": 9}})
    )
    try:
        dying.wait_ready()

        with pytest.raises(PeerError, match="rank 0 of dying ended with exit code 9") as caught:
            dying.run(RunEpoch("timed"))
    finally:
        dying.kill()

    assert "the last words" in str(caught.value)


def test_a_rank_that_falls_silent_is_given_up(folder):
    from featsync.bench.protocol import RunEpoch

    silent = lane(configuration(folder, "silent", *STAGES))
    try:
        silent.wait_ready()
        silent._processes._timeout = 0.2
        os.kill(silent._processes._ranks[0].process.pid, signal.SIGSTOP)

        with pytest.raises(PeerTimeoutError, match="rank 0 of silent gave no sign of life"):
            silent.run(RunEpoch("timed"))
    finally:
        silent.kill()


def test_an_error_in_a_configuration_crosses_the_process_as_what_it_is(folder, tmp_path):
    dataset = {"path": str(tmp_path / "absent")}
    broken = lane(configuration(folder, "broken", *STAGES, dataset=dataset))
    try:
        with pytest.raises(ConfigError, match=r"broken\.yaml: dataset\.path"):
            broken.wait_ready()
    finally:
        broken.kill()
