"""Pretended machines: what each has of its own, what crosses the link, and that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import Cluster, ClusterError, why_impossible
from cluster.launch import Run
from support.processes import wait_until

pytestmark = pytest.mark.multirank

ROOT = Path(__file__).parent.parent
LIMIT_S = 30.0
ONE_MB = """
import socket, sys
with socket.create_server(("", 5000)) as server:
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
"""
SEND_ONE_MB = """
import socket, time
for attempt in range(500):
    try:
        connection = socket.create_connection(("10.77.0.1", 5000))
    except OSError:
        time.sleep(0.02)
    else:
        connection.sendall(bytes(1_000_000))
        break
"""


@pytest.fixture(autouse=True, scope="module")
def _possible():
    if (reason := why_impossible(3)) is not None:
        pytest.skip(reason)


def output_of(cluster, script, ranks=1):
    """What each rank prints."""
    run = cluster.plain(["sh", "-c", script], ranks, {})
    assert set(run.wait(LIMIT_S).values()) == {0}
    size = len(cluster.machines) * ranks
    return [run.last_lines(f"rank {rank}").split() for rank in range(size)]


def test_each_host_has_network_processes_memory_and_name_of_its_own():
    with Cluster(hosts=3, shm=["1m", "2m", "3m"], own_names=True) as cluster:
        size = "df -k /dev/shm | tail -1 | tr -s ' ' | cut -d' ' -f2"
        numbers = "ls -d /proc/[0-9]* | wc -l"
        told = output_of(cluster, f"hostname; {size}; {numbers}; touch /dev/shm/$RANK; ls /dev/shm")

    assert [(name, kib, files) for name, kib, _, files in told] == [
        ("host0", "1024", "0"), ("host1", "2048", "1"), ("host2", "3072", "2"),
    ]  # fmt: skip
    assert all(int(processes) < 12 for _, _, processes, _ in told)
    assert not Path("/dev/shm/0").exists()


def test_ranks_are_told_their_place_as_by_torchrun():
    with Cluster(hosts=2) as cluster:
        told = output_of(
            cluster, "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK "
            "$MASTER_ADDR $MASTER_PORT $GLOO_SOCKET_IFNAME; pwd", ranks=2,
        )  # fmt: skip

    master = ["10.77.0.1", "29500", "eth0", str(Path.cwd())]
    assert told == [
        ["0", "4", "0", "2", "0", *master], ["1", "4", "1", "2", "0", *master],
        ["2", "4", "0", "2", "1", *master], ["3", "4", "1", "2", "1", *master],
    ]  # fmt: skip


@pytest.mark.parametrize("hosts", [2, 3])
def test_what_crosses_the_link_is_counted(hosts):
    with Cluster(hosts, rate="1gbit") as cluster:
        run = Run(cluster)
        run.start("receiver", 0, [sys.executable, "-c", ONE_MB], {})
        run.start("sender", 1, [sys.executable, "-c", SEND_ONE_MB], {})
        assert run.wait(LIMIT_S) == {"receiver": 0, "sender": 0}
        traffic = run.traffic()

    assert 1_000_000 < traffic[1].sent < 1_020_000
    assert 1_000_000 < traffic[0].received < 1_020_000
    assert 1_000_000 * 1514 / 1448 < traffic[1].wire < 1_070_000


def test_a_plug_can_be_pulled_and_put_back():
    with Cluster(hosts=2, rate=None) as cluster:
        state = "cat /proc/net/route | grep -c eth0"
        assert output_of(cluster, state)[1] == ["1"]
        cluster.link.set_up(1, False)
        run = cluster.plain(["sh", "-c", state], 1, {})
        assert run.wait(LIMIT_S)["rank 1"] == 1  # grep found none
        cluster.link.set_up(1, True)
        assert output_of(cluster, state)[1] == ["1"]


def test_whoever_is_still_running_at_the_end_of_the_time_is_named():
    with Cluster(hosts=2) as cluster:
        run = cluster.plain(["sh", "-c", '[ "$RANK" = 1 ] || exec sleep 60'], 2, {})
        with pytest.raises(ClusterError) as caught:
            run.wait(0.5)
        found = [p.rank for machine in cluster.machines for p in machine.processes()]

    assert str(caught.value).startswith("still running after 0.5 s:\n  host 0: rank 0 (pid ")
    assert "sleep 60" in str(caught.value)
    assert "host 1: rank 2 (pid " in str(caught.value)
    assert found == [0, 2, 3]


def test_one_that_fails_leaves_the_others_some_time():
    with Cluster(hosts=2) as cluster:
        run = cluster.plain(["sh", "-c", '[ "$RANK" = 0 ] || exec sleep 60; exit 3'], 1, {})
        with pytest.raises(ClusterError, match=r"running 0\.2 s after rank 0 failed:\n  host 1: r"):
            run.wait(LIMIT_S, grace=0.2)


def cli(*arguments, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster", *arguments],
        cwd=ROOT, env={**os.environ, **env},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_command_line_runs_a_program_and_reports(tmp_path):
    path = tmp_path / "link.json"
    run = cli(
        "--plain", "--ranks", "2", "--json", str(path), "--", "sh", "-c", "echo $RANK; exit 0"
    )
    output, errors = run.communicate(timeout=LIMIT_S)

    assert (run.returncode, errors) == (0, "")
    assert {"rank 0 | 0", "rank 3 | 3"} <= set(output.splitlines())
    assert "link | host 1 sent " in output
    assert [set(row) for row in json.loads(path.read_text())["hosts"]] == [
        {"sent", "received", "wire"}
    ] * 2


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--plain", "--", "sh", "-c", "exit $RANK"], 1, "failed, exit status: {'rank 1': 1}"),
        (["--plain", "--time-limit", "0.5", "--", "sleep", "60"], 1, "still running after 0.5 s"),
        (["--hosts", "1", "--", "true"], 2, "--hosts: two or more"),
        (["--rate", "fast", "--", "true"], 1, "rate 'fast': write a number and one of kbit"),
    ],
)
def test_the_command_line_says_what_went_wrong(arguments, status, words):
    run = cli(*arguments)
    _, errors = run.communicate(timeout=LIMIT_S)

    assert run.returncode == status
    assert words in errors


def named_things():
    """Network interfaces and mounts of the real machine."""
    interfaces = Path("/proc/net/dev").read_text().splitlines()
    return {line.split(":")[0] for line in interfaces}, Path("/proc/mounts").read_text()


def processes_with(word):
    """Names of the processes that have a word in their environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and word.encode() in (folder / "environ").read_bytes():
                found[folder.name] = (folder / "comm").read_text().strip()
    return list(found.values())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_launcher_that_is_killed(number):
    before = named_things()
    mark = f"one run of {os.getpid()}"
    program = ["sh", "-c", "sleep 60 & echo up; sleep 60"]
    run = cli("--hosts", "3", "--plain", "--", *program, MARK=mark)
    with run.stdout, run.stderr:
        assert {run.stdout.readline() for _ in range(3)} == {f"rank {r} | up\n" for r in range(3)}
        assert {"unshare", "nsenter", "sh"} <= set(processes_with(mark))
        run.send_signal(number)
        run.wait(LIMIT_S)

    assert wait_until(lambda: not processes_with(mark))
    assert named_things() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "needs root"),
        (lambda patch: patch.setenv("PATH", ""), "the program 'unshare' is not installed"),
    ],
)
def test_what_a_system_lacks_is_said(monkeypatch, change, words):
    change(monkeypatch)

    assert words in why_impossible()
