"""Hypothesis profile; what is left out without DGL or a GPU; no worker outlives its test."""

import importlib.util
import re
import signal

import pytest
import torch
from hypothesis import settings

from support.loader_workers import end_loader_workers

# The same examples in every run, on every machine.
settings.register_profile(
    "featsync", derandomize=True, database=None, deadline=None, max_examples=50
)
settings.load_profile("featsync")

# A shell has what it runs in the background ignore it, and children inherit that; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where doctests are looked for, all modules are imported; this one breaks what it is imported into.
collect_ignore = ["support/wrong_transports.py"]

HAS_DGL = importlib.util.find_spec("dgl") is not None
NO_DGL = "needs DGL, which is not installed: pip install 'featsync[dgl]'"
NO_GPU = f"needs a CUDA device; torch {torch.__version__} sees none"

# A module that is marked as a whole may import DGL at its top.
_NEEDS_DGL = re.compile(r"^pytestmark\s*=\s*(\[[^\]]*)?pytest\.mark\.dgl\b", re.MULTILINE)


class LeftOutModule(pytest.Module):
    """A test module that is not imported, and is reported as skipped."""

    def collect(self):
        pytest.skip(f"{self.path.name} {NO_DGL}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if HAS_DGL or not _NEEDS_DGL.search(module_path.read_text(encoding="utf-8")):
        return None
    return LeftOutModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    has_gpu = torch.cuda.is_available()
    for item in items:
        if not HAS_DGL and item.get_closest_marker("dgl"):
            item.add_marker(pytest.mark.skip(reason=NO_DGL))
        if not has_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(autouse=True)
def no_loader_worker_is_left():
    yield
    end_loader_workers()
