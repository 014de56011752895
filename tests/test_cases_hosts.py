"""DGL and torch do not match, or something that DGL needs is missing: case 11."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import dgl.graphbolt as gb
import pytest

pytestmark = pytest.mark.dgl


PROJECT = Path(__file__).parents[1]


# Case 11: DGL and torch do not match

# In one interpreter that has torch, forked for each way in which DGL can be broken.
_BROKEN_HOSTS = """
import json, os, sys, warnings
import torch

def hide(*names):
    sys.modules.update(dict.fromkeys(names))

def other_torch():
    torch.__version__ = "2.9.1"

WAYS = {
    "no DGL": lambda: hide("dgl"),
    "torch": other_torch,
    "torchdata": lambda: hide("torchdata.datapipes", "torchdata.datapipes.iter"),
    "pydantic": lambda: hide("pydantic"),
    "pandas": lambda: hide("pandas"),
    "yaml": lambda: hide("yaml"),
}

def attempt(action):
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None

def look():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import featsync
        import featsync.retention, featsync.segment, featsync.world, featsync.workers
    return {
        "warned": [str(w.message) for w in caught if "DGL" in str(w.message)],
        "errors": [attempt(lambda: getattr(featsync, n)) for n in ("Planner", "Planner", "share")],
    }

for name, break_it in WAYS.items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        break_it()
        print(json.dumps([name, look()]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def broken_hosts():
    """What a user sees, by what is broken."""
    done = subprocess.run(
        [sys.executable, "-c", _BROKEN_HOSTS],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = (line for line in done.stdout.splitlines() if line.startswith('["'))
    return dict(json.loads(line) for line in found)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("no DGL", "DGL is not installed"),
        ("torch", "torch 2.2.1"),
        ("torchdata", "torchdata 0.7.1"),
        ("pydantic", "it needs pydantic"),
        ("pandas", "it needs pandas"),
        ("yaml", "it needs yaml"),
    ],
)
def test_a_host_that_cannot_be_used_is_explained_in_one_message(broken_hosts, broken, named):
    """Case 11: what is installed, what is supported, what to do; the core imports all the same."""
    found = broken_hosts[broken]

    for kind, message in found["errors"]:
        assert kind == "HostError"
        assert named in message
        assert "Installed: dgl" in message
        assert "2.0.0, 2.0.1, 2.1.0 to 2.1.2, 2.2.0 or 2.2.1" in message
        assert "pip install 'featsync[dgl]'" in message


@pytest.mark.parametrize("broken", ["torch", "torchdata", "pydantic", "pandas", "yaml"])
def test_importing_featsync_warns_once_where_dgl_is_there_and_broken(broken_hosts, broken):
    """Case 11: the stages will be missing, and the import says so."""
    assert len(broken_hosts[broken]["warned"]) == 1


def test_importing_featsync_is_silent_where_there_is_no_dgl(broken_hosts):
    """Case 11: the core alone is normal use."""
    assert broken_hosts["no DGL"]["warned"] == []


def test_the_extra_pins_a_torch_that_dgl_was_built_for():
    """Case 11: and all that DGL 2.1 imports without declaring it."""
    text = (PROJECT / "pyproject.toml").read_text()
    extra = re.search(r"^dgl = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1]
    pins = dict(re.findall(r'"([a-z]+)==([0-9.]+)"', extra))
    libraries = Path(gb.__file__).parent.glob("libgraphbolt_pytorch_*.so")
    built_for = {path.stem.rpartition("_")[2] for path in libraries}

    assert pins["dgl"] == "2.1.0"
    assert pins["torch"] in built_for
    assert pins["torchdata"] == "0.7.1"
    assert '"numpy<2"' in extra
    for needed in ("pandas", "pydantic", "PyYAML"):
        assert f'"{needed}' in text
