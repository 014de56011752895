"""``featsync calibrate``: a real run, ranks that go wrong, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from featsync.calibration import command
from featsync.calibration.errands import Errands
from featsync.calibration.protocol import FetchPrepared, KeepFetching, Prepare, RunPython
from featsync.calibration.rank import Rank, fetch_until
from featsync.calibration.ranks import Ranks
from featsync.calibration.samples import LOCAL, Setting
from featsync.errors import PeerError, PeerTimeoutError, PlanError
from featsync.exchange.engines import engine_of
from featsync.profile import VARIABLE, load_profile, machine_name
from featsync.transports import TRANSPORTS
from featsync.transports.shared_memory import SharedMemory
from support.commands import run_command
from support.ranks import run_ranks


@pytest.fixture
def calibrate(monkeypatch, capsys):
    """Runs the program; gives exit status, and what it printed on both channels."""
    return partial(run_command, monkeypatch, capsys, "calibrate")


@pytest.mark.multirank
def test_a_run_prints_what_it_measured_and_writes_a_profile_that_loads(
    calibrate, tmp_path, monkeypatch
):
    out = tmp_path / "profile.json"
    monkeypatch.setenv(VARIABLE, str(out))  # not there yet: measuring does not need it

    status, printed, errors = calibrate("--rounds", "1", "--out", str(out))

    assert (status, errors.strip()) == (0, "")
    profile = load_profile()
    assert set(profile.transports) == set(TRANSPORTS)
    assert profile.machine == machine_name()
    for cost in (profile.local, *profile.transports.values()):
        assert cost.row_seconds(4096) > 0
    assert json.loads(out.read_text())["schema"] == 1
    for name in (*TRANSPORTS, LOCAL, "4,096", "this is what auto goes by", f"{VARIABLE}={out}"):
        assert name in printed


# ---- the work of a rank ----


class Copied(SharedMemory):
    """A transport that a user might add."""


class Wrong(SharedMemory):
    """Delivers rows next to those that were wanted."""

    def fetch(self, batch, landings):
        fetches = super().fetch(batch, landings)
        for move in fetches.last:
            move.rows.add_(1).remainder_(len(move.source))
        return fetches


class Unreachable(SharedMemory):
    @staticmethod
    def reaches(table, rank):
        return False


def fetch_by_every_way(rank):
    TRANSPORTS.update(copied=Copied, wrong=Wrong, unreachable=Unreachable)
    tables = []
    settings = [Setting(50, 4), Setting(20, 64)]
    errands = Errands(engine_of(None, 30.0), settings, 30.0, lambda: tables.append(1))
    facts = {"ways": errands.ways, "tables": len(tables)}
    worker = Rank(errands)
    for setting in settings:
        for way in errands.ways:
            worker.answer(Prepare(way, setting, times=3))
            if way == "wrong":
                with pytest.raises(PlanError, match=r"of \d+ rows that came by wrong are wrong"):
                    worker.answer(FetchPrepared())
                continue
            fetched = worker.answer(FetchPrepared())
            facts[way] = (len(fetched.seconds), min(fetched.seconds) > 0, fetched.messages)
    for way in ("p2p", LOCAL):
        ran = worker.answer(RunPython(0.05, way, settings[0]))
        assert ran.work > 0
        assert ran.seconds > 0
    worker.answer(KeepFetching(0.05, "p2p" if rank else LOCAL, settings[1]))
    return facts


@pytest.mark.multirank
def test_every_transport_of_the_table_that_reaches_is_measured_and_its_rows_compared():
    for facts in run_ranks(fetch_by_every_way, 3):
        assert facts["ways"] == ["p2p", "shared_memory", "copied", "wrong", LOCAL]
        assert facts["tables"] == 2
        assert facts["p2p"] == facts["shared_memory"] == facts["copied"] == (3, True, 2)
        assert facts[LOCAL] == (3, True, 1)


def test_messages_that_come_after_the_end_do_not_count():
    fetched = []
    errand = SimpleNamespace(messages=2, fetch=lambda: fetched.append(1))

    assert fetch_until(lambda: len(fetched) == 4, errand) == 3 * 2
    assert len(fetched) == 4


# ---- ranks that go wrong ----


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("with_signal", "error", "words"),
    [
        (signal.SIGKILL, PeerError, "rank 1 of 2 ranks was killed by signal 9"),
        (signal.SIGSTOP, PeerTimeoutError, "rank 1 of 2 ranks gave no sign of life for 1 s"),
    ],
)
def test_a_rank_that_dies_or_falls_silent_is_named(with_signal, error, words):
    with Ranks(2, timeout=60.0) as ranks:
        ways, processes = ranks.wait_ready(), ranks._processes
        assert len(ranks.fetch(ways[0], ranks.settings[0])) == 2 * 3
        processes._timeout = 1.0
        os.kill(processes._ranks[1].process.pid, with_signal)

        with pytest.raises(error, match=words):
            ranks.fetch(ways[0], ranks.settings[0])
        processes.kill()


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--ranks", "1"], ["--ranks 1", "at least 2"]),
        (["--out", "absent/p.json"], ["absent/p.json", "no folder"]),
        (["--out", "."], [". cannot be written", "is a folder"]),
        (["--plot", "absent/p.png"], ["absent/p.png", "no folder"]),
        (["--rounds", "0"], ["--rounds"]),
    ],
)
def test_a_wrong_request_is_one_message_and_status_2(calibrate, arguments, parts):
    status, _, errors = calibrate(*arguments)

    assert status == 2
    assert "Traceback" not in errors
    for part in parts:
        assert part in errors


def test_what_cannot_be_written_or_drawn_is_refused_before_anything_is_measured(
    calibrate, tmp_path, monkeypatch
):
    def measure(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    no_matplotlib = calibrate("--plot", str(tmp_path / "p.png"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever is root may write anywhere
    no_permission = calibrate("--out", str(tmp_path / "p.json"))

    assert no_matplotlib[0] == no_permission[0] == 2
    assert "pip install 'featsync[plot]'" in no_matplotlib[2]
    assert "no permission" in no_permission[2]
