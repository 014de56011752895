"""Feature lookahead for DGL GraphBolt: rows of the next minibatch move while this one computes.

Importing this registers two datapipe functions, ``plan_feature`` and ``sync_feature``, and nothing
else. Without DGL the parts that do not need it still work; the names that do explain what is
missing when they are used.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

from featsync.errors import (
    CapacityError,
    ConfigError,
    FeatsyncError,
    FeatureChangedError,
    FeatureError,
    HostError,
    PeerError,
    PeerTimeoutError,
    PlanError,
)

# Names that need DGL, and where they are.
_HOSTED = {
    "DynamicFeature": "featsync.dynamic_feature",
    "PartitionedFeature": "featsync.partitioned_feature",
    "Planner": "featsync.stages",
    "Syncer": "featsync.stages",
    "build": "featsync.pipeline",
    "share": "featsync.share_store",
    "stats": "featsync.stages",
}

__all__ = [
    "CapacityError",
    "ConfigError",
    "DynamicFeature",
    "FeatsyncError",
    "FeatureChangedError",
    "FeatureError",
    "HostError",
    "PartitionedFeature",
    "PeerError",
    "PeerTimeoutError",
    "PlanError",
    "Planner",
    "Syncer",
    "build",
    "share",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("featsync.optim")
    if name not in _HOSTED:
        raise AttributeError(f"module 'featsync' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOSTED[name]), name)


if importlib.util.find_spec("dgl") is not None:
    try:
        importlib.import_module("featsync.stages")
    except HostError as error:
        warnings.warn(str(error), stacklevel=2)
