"""Messages and bytes: counted as they go over the sockets, and as the formulas say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.traffic_formulas import Load, id_bytes, per_step
from featsync.device import CpuDevice
from featsync.exchange.frames import encode_frame
from featsync.exchange.id_code import encode
from featsync.exchange.traffic import Amount, Meter, Traffic
from featsync.partition import OwnerPartition
from featsync.plan import FeatureKey, Fetch, Want
from featsync.remote_rows import Delivery, RemoteRows
from featsync.routes import route_of
from featsync.testing import local_engines, local_tables
from support.processes import wait_until

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
KEY = FeatureKey("node", None, "x")


def test_what_went_in_between_is_the_difference_and_readings_stay():
    meter = Meter()
    meter.count_sent("order", 10)
    before = meter.read()
    meter.count_sent("order", 5)
    meter.count_received("rows", 800, messages=4)

    assert meter.read() - before == Traffic({"order": Amount(1, 5)}, {"rows": Amount(4, 800)})
    assert before == Traffic({"order": Amount(1, 10)}, {})


def test_every_message_is_counted_where_it_leaves_and_where_it_comes_with_all_its_bytes():
    with local_engines(2) as engines:
        words = {"kind": "a kind of its own", "value": 7}
        numbers = [np.arange(100, dtype=np.uint8)]
        engines[0].tell(1, words, numbers)
        wanted = Amount(1, len(encode_frame(words, numbers)))

        assert wait_until(lambda: engines[1].traffic.received.get(words["kind"]) == wanted)
        assert engines[0].traffic.sent == {words["kind"]: wanted}
        assert engines[1].traffic.sent == engines[0].traffic.received == {}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_counts_are_as_the_formulas_say(num_ranks):
    """Each rank wants rows of all others, once; those who order later get some as copies."""
    num_rows, batch_rows, width = 40_000, 4_000, 8
    owners = np.random.default_rng(0).permutation(num_rows) % num_ranks
    rows = torch.arange(float(num_rows * width)).reshape(num_rows, width)
    partition = OwnerPartition(owners, num_ranks)
    with local_engines(num_ranks) as engines:
        tables = local_tables(KEY, rows, partition, engines, same_host=False)
        readers = [RemoteRows({KEY: table}, {KEY: route_of(table, "p2p")}) for table in tables]
        remote = 0
        for rank, reader in enumerate(readers):
            ids = np.random.default_rng(rank).choice(num_rows, batch_rows, replace=False)
            remote += int((owners[ids] != rank).sum())
            reader.announce(0, {KEY: Want((torch.from_numpy(ids),))})
        num_announced = num_ranks - 1
        assert wait_until(lambda: all(one.served.num_announced == num_announced for one in engines))
        for reader in readers:
            target = torch.zeros(batch_rows, width)
            fetches = reader.fetch(0, {KEY: Delivery(Fetch(batch_rows), target)})
            CpuDevice().execute([*fetches.first, *fetches.last])
        load = Load(
            ranks=num_ranks,
            batch_rows=batch_rows,
            remote_share=remote / batch_rows / num_ranks,
            part_rows=num_rows / num_ranks,
            row_bytes=4 * width,
        )
        expected = per_step(load)
        for side in ("sent", "received"):
            for kind, (messages, num_bytes) in expected.items():
                amounts = [getattr(engine.traffic, side)[kind] for engine in engines]
                assert sum(one.messages for one in amounts) == messages * num_ranks
                counted = sum(one.num_bytes for one in amounts) / num_ranks
                # Answers are short, and how long depends on whose order comes first.
                assert counted == pytest.approx(num_bytes, rel=0.1 if kind == "sent" else 0.02)
        for reader in readers:
            reader.close()


@pytest.mark.parametrize("density", [0.0005, 0.004, 0.02, 0.3])
def test_bytes_an_id_are_those_of_random_rows(density):
    num_rows = 400_000
    rows = np.random.default_rng(0).choice(num_rows, round(density * num_rows), replace=False)

    _, data = encode(np.sort(rows))

    assert len(data) / len(rows) == pytest.approx(id_bytes(density), rel=0.03)


@pytest.mark.parametrize(
    ("load", "asked"),
    [
        (Load(4, 1000, 0.75, 1000, 16), 3),
        (Load(4, 1000, 0.0, 1000, 16, transport="shared_memory"), 0),
        (Load(4, 1000, 0.5, 1000, 16, hosts=2, transport="shared_memory"), 2),
    ],
)
def test_ranks_of_a_machine_send_each_other_nothing_by_shared_memory(load, asked):
    assert load.asked == asked
    assert sum(one.messages for one in per_step(load).values()) == 4 * asked


@pytest.mark.dgl
@pytest.mark.multirank
def test_counts_of_real_ranks_are_as_the_formulas_say_too():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench_traffic.py"), "--smoke"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
