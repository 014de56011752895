"""Says in one message why DGL GraphBolt cannot be used here, and what can."""

from __future__ import annotations

from importlib import metadata, util

_SUPPORTED_TORCH = "2.0.0, 2.0.1, 2.1.0 to 2.1.2, 2.2.0 or 2.2.1"
# What DGL 2.1 imports without declaring it.
_UNDECLARED = ("torchdata", "pydantic", "pandas", "yaml")


def explain_host(error: Exception) -> str:
    """Explain why importing ``dgl.graphbolt`` failed.

    Args:
        error: What the import raised.

    Returns:
        What is installed, what is supported, and what to do.
    """
    installed = ", ".join(f"{name} {_version(name)}" for name in ("dgl", "torch", "torchdata"))
    if util.find_spec("dgl") is None:
        problem = "DGL is not installed"
    else:
        missing = [name for name in _UNDECLARED if util.find_spec(name) is None]
        problem = f"DGL cannot be imported ({type(error).__name__}: {error})"
        if missing:
            problem += f"; it needs {', '.join(missing)}, which are not installed"
    return (
        f"{problem}. Installed: {installed}. DGL 2.1.0, the newest on the package index, works "
        f"with torch {_SUPPORTED_TORCH} and torchdata 0.7.1 (torchdata 0.8 and later have no "
        f"datapipes): `pip install 'featsync[dgl]'` takes a set that works together. The parts of "
        f"featsync that do not need GraphBolt can be used without it."
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
