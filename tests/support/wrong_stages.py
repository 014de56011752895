"""Stages that do it wrong, registered by importing this module."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.utils.data import functional_datapipe

from featsync._graphbolt import gb


@functional_datapipe("fetch_wrongly")
class WrongFetcher(gb.MiniBatchTransformer):
    """Fetches node features, and changes one bit of the first row."""

    def __init__(self, datapipe: Any, store: Any, node_feature_keys: Any = None) -> None:
        super().__init__(datapipe, self._fetch)
        self.store = store
        self.keys = node_feature_keys or []

    def _fetch(self, minibatch: Any) -> Any:
        minibatch.node_features = {
            name: self.store.read("node", None, name, minibatch.input_nodes) for name in self.keys
        }
        for rows in minibatch.node_features.values():
            rows.view(rows.numel())[0] *= -1
        return minibatch


@functional_datapipe("fail_on_rank")
class FailOnRank(gb.MiniBatchTransformer):
    """Raises, or ends the process, on one rank."""

    def __init__(self, datapipe: Any, rank: int, exit_code: int = 0) -> None:
        super().__init__(datapipe, self._fail)
        self.rank = rank
        self.exit_code = exit_code

    def _fail(self, minibatch: Any) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == self.rank and self.exit_code:
            os.write(1, b"the last words\n")
            os._exit(self.exit_code)
        if rank == self.rank:
            raise ZeroDivisionError("on purpose")
        return minibatch
