"""Without DGL: importing is silent, the core works, and what needs DGL says so when it is used."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"dgl", "torchdata"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())

import importlib.util
find_spec = importlib.util.find_spec

def hidden_find_spec(name, package=None):
    return None if name.split(".")[0] in {"dgl", "torchdata"} else find_spec(name, package)

importlib.util.find_spec = hidden_find_spec
"""
BROKEN = """
import sys
from importlib.machinery import ModuleSpec

class BrokenLoader:
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise OSError("libcudart.so.99: cannot open shared object file")

class Broken:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, BrokenLoader()) if name == "dgl" else None

sys.meta_path.insert(0, Broken())
"""


def run(preparation, body):
    program = textwrap.dedent(preparation) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.fixture(scope="module")
def without_dgl():
    """Standard output of one program that tries everything, as a mapping."""
    done = run(
        HIDE,
        """
        import json
        import warnings
        warnings.simplefilter("error")
        import featsync

        found = {"__all__": featsync.__all__, "message": {}, "not HostError": []}
        for name in featsync.__all__:
            try:
                getattr(featsync, name)
            except featsync.HostError as error:
                found["message"][name] = str(error)
            except Exception as error:
                found["not HostError"].append(repr(error))
        try:
            featsync.no_such_name
        except AttributeError as error:
            found["unknown"] = str(error)

        import torch
        from featsync.plan import FeatureKey, Want
        from featsync.retention import RETENTION
        from featsync.window import PlanWindow
        key = FeatureKey("node", None, "feat")
        window = PlanWindow({key: RETENTION["window"](10, 5, 1)})
        window.push({key: Want((torch.arange(4),))})
        found["plan"] = str(window.plan())

        import featsync.config, featsync.mapped, featsync.segment, featsync.session
        import featsync.settings, featsync.workers, featsync.world
        found["loaded"] = [name for name in ("dgl", "torchdata") if name in sys.modules]
        sys.stdout.write(json.dumps(found))
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


NEED_DGL = ["Planner", "Syncer", "build", "share", "stats"]


def test_importing_is_silent_and_the_core_plans(without_dgl):
    assert without_dgl["plan"] == "plan 0: node/None/feat: 4 from home, 0 from cache"
    assert without_dgl["loaded"] == []


def test_errors_are_there_and_nothing_fails_otherwise(without_dgl):
    assert without_dgl["not HostError"] == []
    assert set(without_dgl["__all__"]) - without_dgl["message"].keys() >= {
        "ConfigError",
        "FeatsyncError",
        "HostError",
    }


@pytest.mark.parametrize("name", NEED_DGL)
def test_a_name_that_needs_dgl_says_what_is_installed_and_what_to_do(without_dgl, name):
    message = without_dgl["message"][name]

    assert message.startswith("DGL is not installed. Installed: dgl ")
    assert "DGL 2.1.0, the newest on the package index, works with torch 2.0.0" in message
    assert "pip install 'featsync[dgl]'" in message
    assert "can be used without it" in message


def test_a_name_that_is_not_there_is_an_attribute_error(without_dgl):
    assert without_dgl["unknown"] == "module 'featsync' has no attribute 'no_such_name'"


def test_a_dgl_that_cannot_be_imported_is_a_warning_with_its_reason():
    done = run(
        BROKEN,
        """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import featsync
        (warning,) = caught
        try:
            featsync.build
        except featsync.HostError as error:
            assert str(error) == str(warning.message), error
            cause = error.__cause__
            assert isinstance(cause, OSError), repr(cause)
        sys.stdout.write(str(warning.message))
        """,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "DGL cannot be imported (OSError: libcudart.so.99: cannot open shared object file)"
    )
    assert "Installed: dgl " in done.stdout
