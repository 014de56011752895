"""Who may import what, and how long files and functions may be: read from the source itself."""

from __future__ import annotations

import ast

import pytest

from support.package_source import (
    FILES,
    PACKAGE,
    imports_of,
    is_inside,
    modules_run_by,
    reached_from,
    tree_of,
)

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60

# The only module that imports these, so that everything else works without DGL.
HOST_MODULE = "featsync._graphbolt"
HOST_PACKAGES = ("dgl", "torchdata")

# These may import the host module. What is not among them works without DGL.
HOSTED = (
    "featsync.caches",
    "featsync.checking.comparison",
    "featsync.dynamic_feature",
    "featsync.fixed_feature",
    "featsync.loading",
    "featsync.ondisk",
    "featsync.opening",
    "featsync.partitioned_feature",
    "featsync.partitioned_store",
    "featsync.partitioners",
    "featsync.pipeline",
    "featsync.share_store",
    "featsync.sources",
    "featsync.stages",
    "featsync.bench",
)

# Each may import what stands above it, and what stands in its own line. A package stands for all of
# its modules. What is not named here is the top: nothing named here may import it.
LAYERS = (
    ("featsync.errors", "featsync.mover"),
    (
        "featsync.retention",
        "featsync.move",
        "featsync.pool",
        "featsync.row_items",
        "featsync.segment",
        "featsync.clock",
    ),
    (
        "featsync.row_kind",
        "featsync.partition",
        "featsync.profile",
        "featsync.plotting",
        "featsync.futex",
    ),
    (
        "featsync.rank_program",
        "featsync.rank_processes",
        "featsync.group_store",
        "featsync.hosts",
    ),
    ("featsync.plan", "featsync.mapped", "featsync.device"),
    ("featsync.signals", "featsync.host_lock", "featsync.scores"),
    ("featsync.host_cache.directory", "featsync.host_cache.uses", "featsync.host_cache.placement"),
    ("featsync.host_cache.layout",),
    ("featsync.host_cache.cache",),
    ("featsync.counts", "featsync.window", "featsync.world", "featsync.fetching"),
    ("featsync.offers",),
    ("featsync.exchange",),
    ("featsync.dynamic",),
    ("featsync.optim",),
    ("featsync.partitioned_table",),
    ("featsync.table", "featsync.parts", "featsync.transports"),
    ("featsync.workers", "featsync.residency", "featsync.cache_size", "featsync.routes"),
    ("featsync.remote_rows", "featsync.calibration", "featsync.host_cache.opening"),
    ("featsync.flights",),
    ("featsync.unchanged", "featsync.dynamic_reads"),
    ("featsync.session", "featsync.settings", "featsync.sharing"),
    ("featsync.host_check", HOST_MODULE),
    (
        "featsync.sources",
        "featsync.caches",
        "featsync.fixed_feature",
        "featsync.partitioned_feature",
        "featsync.dynamic_feature",
        "featsync.partitioners",
    ),
    ("featsync.opening",),
    ("featsync.stages", "featsync.share_store", "featsync.partitioned_store"),
)

# Decisions: they start nothing, wait for nobody and talk to nobody.
PURE = (
    "featsync.cache_size",
    "featsync.calibration.crossover",
    "featsync.calibration.fit",
    "featsync.calibration.samples",
    "featsync.clock",
    "featsync.counts",
    "featsync.dynamic.checks",
    "featsync.dynamic.merge",
    "featsync.dynamic.positions",
    "featsync.errors",
    "featsync.exchange.id_code",
    "featsync.exchange.packing",
    "featsync.exchange.split",
    "featsync.fetching",
    "featsync.host_cache.directory",
    "featsync.host_cache.placement",
    "featsync.host_cache.uses",
    "featsync.move",
    "featsync.optim.rules",
    "featsync.partition",
    "featsync.plan",
    "featsync.residency",
    "featsync.retention",
    "featsync.routes",
    "featsync.row_kind",
    "featsync.scores",
    "featsync.window",
)
EFFECTS = (
    "asyncio",
    "atexit",
    "concurrent",
    "ctypes",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "select",
    "socket",
    "subprocess",
    "threading",
    "torch.cuda",
    "torch.distributed",
    "torch.multiprocessing",
    "torch.utils",
)


def test_every_module_is_found():
    assert {"featsync", "featsync.window", "featsync.retention.lru", HOST_MODULE} <= FILES.keys()


@pytest.mark.parametrize("names", [HOSTED, PURE, sum(LAYERS, ())], ids=["hosted", "pure", "layers"])
def test_the_tables_name_modules_that_are_there(names):
    assert [name for name in names if name not in FILES] == []
    assert len(set(names)) == len(names)


def offenders(found):
    """What was found, by module, without the modules where nothing was."""
    return {module: sorted(names) for module, names in found.items() if names}


def test_dgl_is_imported_in_the_host_module_only():
    others = FILES.keys() - {HOST_MODULE}
    imported = {m: [n for n in imports_of(m) if is_inside(n, HOST_PACKAGES)] for m in others}

    assert offenders(imported) == {}
    assert "dgl.graphbolt" in imports_of(HOST_MODULE)


def test_the_host_module_is_imported_by_hosted_modules_only():
    importers = {module for module in FILES if HOST_MODULE in imports_of(module)}

    assert {module for module in importers if not is_inside(module, HOSTED)} == set()


def test_what_is_not_hosted_does_not_reach_the_host_module():
    core = [name for layer in LAYERS for name in layer if not is_inside(name, HOSTED)]
    modules = [m for m in FILES if is_inside(m, core) and m != HOST_MODULE]

    assert [module for module in modules if HOST_MODULE in reached_from(module)] == []


def layer_of(module):
    found = [i for i, layer in enumerate(LAYERS) if is_inside(module, layer)]
    return found[0] if found else len(LAYERS)


def test_imports_point_from_later_layers_to_earlier_ones():
    upwards = {
        module: [
            name
            for name in imports_of(module) & FILES.keys() - {"featsync"}
            if layer_of(name) > layer_of(module)
        ]
        for module in FILES
    }

    assert offenders(upwards) == {}


def test_the_package_itself_imports_errors_and_nothing_else_of_its_own():
    assert modules_run_by("featsync") == {"featsync.errors"}


def test_no_module_reaches_itself():
    assert [module for module in FILES if module in reached_from(module)] == []


def test_decisions_have_no_effects():
    pure = [module for module in FILES if is_inside(module, PURE)]
    imported = {m: [n for n in imports_of(m) if is_inside(n, EFFECTS)] for m in pure}
    used = {
        module: [
            ast.unparse(node)
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.Attribute) and is_inside(ast.unparse(node), EFFECTS)
        ]
        for module in pure
    }

    assert offenders(imported) == {}
    assert offenders(used) == {}


def test_modules_are_named_in_full():
    relative = {
        module: [
            node.lineno
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.ImportFrom) and node.level
        ]
        for module in FILES
    }

    assert offenders(relative) == {}


@pytest.mark.parametrize("folder", ["featsync", "tests", "benchmarks"])
def test_no_file_is_too_long_to_be_read(folder):
    paths = sorted((PACKAGE.parent / folder).rglob("*.py"))
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}

    assert lines
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_too_long_to_be_read():
    too_long = {
        module: [
            node.name
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
        ]
        for module in FILES
    }

    assert offenders(too_long) == {}


def test_nothing_is_global():
    """What an instance needs it gets as arguments."""
    rebound = {
        module: [node.names for node in ast.walk(tree_of(module)) if isinstance(node, ast.Global)]
        for module in FILES
    }

    assert offenders(rebound) == {}
