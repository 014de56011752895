"""The package as its source has it: modules, what they import, and what importing them runs."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "featsync"


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(module):
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def is_inside(module, names):
    """Whether a module is one of ``names``, or lies in a package among them."""
    return any(module == name or module.startswith(name + ".") for name in names)


def named_by(statement):
    """Modules, and names that may be modules, of one statement."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield statement.module
        yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


@cache
def imports_of(module):
    """Everything that a module imports anywhere, also inside functions."""
    return frozenset(name for node in ast.walk(tree_of(module)) for name in named_by(node))


def statements_run_on_import(body):
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody"):
                yield from statements_run_on_import(getattr(statement, block, []))


@cache
def modules_run_by(module):
    """Modules of the package that importing ``module`` imports at once."""
    found = set()
    for statement in statements_run_on_import(tree_of(module).body):
        names = set(named_by(statement)) & FILES.keys()
        if isinstance(statement, ast.ImportFrom) and len(names) > 1:
            names.discard(statement.module)  # `from package import module` means the module
        found |= names
    return frozenset(found - {"featsync"})


def reached_from(module):
    reached, left = set(), [module]
    while left:
        new = modules_run_by(left.pop()) - reached
        reached |= new
        left += new
    return reached
