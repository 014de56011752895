"""The README's code runs as printed, and its settings are the stages' own."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml

from featsync.pipeline import as_config
from featsync.stages import Planner, Syncer

pytestmark = pytest.mark.dgl

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run_one_after_the_other(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    names: dict[str, object] = {}

    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)

    assert names["minibatch"].node_features["feat"].shape[1] == 128


def test_yaml_blocks_are_configurations():
    found = [as_config(yaml.safe_load(block)) for block in blocks("yaml")]

    assert [stage.name for stage in found[0].stages][-2:] == ["plan_feature", "sync_feature"]


def test_every_setting_of_the_stages_is_in_the_table():
    for stage in (Planner, Syncer):
        for name in list(inspect.signature(stage).parameters)[1:]:
            assert f"`{name}`" in README or name == "features"


def test_every_shell_command_names_files_that_exist():
    root = Path(__file__).parent.parent

    for block in blocks("sh"):
        for path in re.findall(r"(?:pipelines|benchmarks)/[\w./]+", block):
            assert (root / path).exists(), path
