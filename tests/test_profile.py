"""Which transport a profile chooses for which width, and what is no profile."""

from __future__ import annotations

import json

import pytest
import torch

from featsync.errors import ConfigError
from featsync.partition import RangePartition
from featsync.partitioned_table import PartitionedTable, Parts
from featsync.plan import FeatureKey
from featsync.profile import Cost, Profile, load_profile, machine_name
from featsync.routes import route_of
from featsync.row_kind import RowKind
from featsync.transports import TRANSPORTS

KEY = FeatureKey("node", None, "feat")
CROSSOVER = {
    "schema": 1,
    "machine": "any",
    "rows": 1000,
    "local": {"message_s": 0.0, "gil_s": 0.0, "row_s": 1e-8, "byte_s": 1e-9},
    "transports": {
        "shared_memory": {"message_s": 0.0, "gil_s": 0.0, "row_s": 0.0, "byte_s": 1e-8},
        "p2p": {"message_s": 0.001, "gil_s": 0.001, "row_s": 1e-6, "byte_s": 1e-9},
    },
}


def profile_of(content):
    return Profile.model_validate_json(json.dumps(content))


def test_seconds_are_those_of_the_model():
    cost = Cost(message_s=1.0, gil_s=0.5, row_s=0.25, byte_s=0.125)
    assert cost.seconds(num_rows=4, row_bytes=8) == 1.0 + 0.5 + 4 * (0.25 + 0.125 * 8)
    assert cost.row_seconds(row_bytes=8) == 0.25 + 0.125 * 8


@pytest.mark.parametrize(
    ("row_bytes", "chosen"), [(4, "shared_memory"), (333, "shared_memory"), (334, "p2p")]
)
def test_the_cheapest_transport_depends_on_the_width(row_bytes, chosen):
    # 1e-5 w = 0.002 + 0.001 + 1e-6 w has its solution at 333.3 bytes.
    name, why = profile_of(CROSSOVER).cheapest(["p2p", "shared_memory"], row_bytes)

    assert name == chosen
    assert f"1,000 rows of {row_bytes} bytes take p2p" in why
    assert "shipped profile" in why


def test_a_transport_without_costs_is_chosen_only_if_there_is_no_other():
    profile = profile_of(CROSSOVER)
    assert profile.cheapest(["mail", "p2p"], 4)[0] == "p2p"
    assert profile.cheapest(["mail"], 4)[0] == "mail"


class FakeEngine:
    """Stands for an engine where only its profile is asked for."""

    def __init__(self, profile):
        self.profile = profile


def table_of(width, readable, engine, whole=None):
    kind = RowKind((width,), torch.float32)
    parts = Parts(RangePartition([0, 2, 4, 6]), kind, 0, readable, whole, engine=engine)
    return PartitionedTable(KEY, parts)


def test_narrow_and_wide_features_take_different_ways_by_a_made_up_profile():
    engine = FakeEngine(profile_of(CROSSOVER))
    readable = {0: torch.ones(2, 1), 1: torch.ones(2, 1)}  # rank 2 is on another machine

    narrow = route_of(table_of(2, readable, engine), "auto")
    wide = route_of(table_of(200, readable, engine), "auto")

    assert narrow.by_rank == {1: "shared_memory", 2: "p2p"}
    assert wide.by_rank == {1: "p2p", 2: "p2p"}
    assert (narrow.transport, wide.transport) == ("p2p+shared_memory", "p2p")
    assert "rank 1 by shared_memory, rank 2 by p2p: 1,000 rows of 8 bytes take" in narrow.why


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_explicit_choice_wins_where_it_reaches(transport):
    engine = FakeEngine(profile_of(CROSSOVER))
    readable = {0: torch.ones(2, 1), 1: torch.ones(2, 1)}

    route = route_of(table_of(2, readable, engine), transport)

    assert route.by_rank == {1: transport, 2: "p2p"}
    assert route.why.endswith("asked for")


def test_a_table_that_lies_in_memory_by_ids_is_read_as_a_whole():
    engine, rows = FakeEngine(profile_of(CROSSOVER)), torch.ones(6, 2)
    table = table_of(2, {rank: rows[2 * rank : 2 * rank + 2] for rank in range(3)}, engine, rows)

    assert route_of(table, "auto").table.tensor is rows
    assert route_of(table, "p2p").table is table


def test_a_single_rank_has_nobody_to_ask():
    rows = torch.ones(6, 2)
    parts = Parts(RangePartition([0, 6]), RowKind((2,), rows.dtype), 0, {0: rows}, rows)

    route = route_of(PartitionedTable(KEY, parts), "auto")

    assert (route.by_rank, route.transport) == ({}, "local")
    assert route.table.tensor is rows


def test_the_shipped_profile_serves_whoever_has_not_measured(monkeypatch):
    monkeypatch.delenv("FEATSYNC_PROFILE", raising=False)
    assert set(load_profile().transports) == set(TRANSPORTS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "is no profile of this version: schema"),
        ({"rows": 0}, "is no profile of this version: rows"),
        ({"local": None}, "is no profile of this version: local"),
        ({"transports": {"p2p": {"message_s": -1.0}}}, r"transports\.p2p"),
        ({"machine": "another"}, "was measured on 'another', and this is"),
    ],
)
def test_a_profile_of_another_machine_or_schema_is_refused(tmp_path, monkeypatch, change, words):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(CROSSOVER | change))
    monkeypatch.setenv("FEATSYNC_PROFILE", str(path))
    with pytest.raises(ConfigError, match=words):
        load_profile()


def test_a_profile_of_this_machine_is_taken(tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    monkeypatch.setenv("FEATSYNC_PROFILE", str(path))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_profile()
    path.write_text(json.dumps(CROSSOVER | {"machine": machine_name()}))
    assert "this machine's profile" in load_profile().cheapest(["p2p"], 4)[1]
