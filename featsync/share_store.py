"""``featsync.share``: the tables of a feature store once per host, for all its ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from featsync._graphbolt import gb, known_keys, table_of
from featsync.errors import ConfigError
from featsync.fixed_feature import FixedFeature
from featsync.plan import FeatureKey
from featsync.sharing import share_tensors
from featsync.table import TensorTable
from featsync.world import World

_WHY_FIXED = (
    "it is shared by the ranks of a host, which read it ahead. Update the store before sharing it, "
    "or make it a featsync.DynamicFeature"
)


def share(
    feature_store: Any,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 60.0,
) -> Any:
    """Put the tables of a store into memory once per host, for all its ranks.

    Collective among the ranks of the group. Without torch.distributed the one rank's tables move
    into shared memory all the same, where a mover process can read them. Tables mapped from files
    stay mapped. The memory goes when the last process that uses it ends, however it ends.

    Args:
        feature_store: A ``gb.FeatureStore`` of tensors. Only the first rank of each host needs the
            data; the others may pass ``None``.
        process_group: The ranks that take part; ``None``: all of the default group.
        timeout: Seconds to wait for the other ranks.

    Returns:
        A ``gb.BasicFeatureStore`` with the same keys and rows; it cannot be updated.

    Raises:
        ConfigError: Keys, shapes or dtypes differ between ranks (every rank is told), a first rank
            has no data, or a feature is no tensor.
        CapacityError: The host's shared memory is too small, on the rank that would fill it.
        PeerError: Another rank could not do its part.
        PeerTimeoutError: Some ranks did not come in time; the message names them.
    """
    shared = share_tensors(_offered(feature_store), World.join(process_group, timeout), timeout)
    return gb.BasicFeatureStore(
        {
            tuple(key): FixedFeature(part.tensor, _WHY_FIXED, part.segment)
            for key, part in shared.items()
        }
    )


def _offered(store: Any) -> dict[FeatureKey, torch.Tensor] | Exception | None:
    """What this rank brings: an error too is for all ranks to hear of, before it is raised here."""
    try:
        return None if store is None else _tensors_of(store)
    except ConfigError as error:
        return error


def _tensors_of(store: Any) -> dict[FeatureKey, torch.Tensor]:
    keys = known_keys(store)
    if keys is None:
        raise ConfigError(
            f"featsync.share: {type(store).__name__} does not tell its keys; "
            f"give a gb.BasicFeatureStore"
        )
    tensors = {}
    for key in keys:
        table = table_of(store, key)
        if not isinstance(table, TensorTable):
            raise ConfigError(
                f"featsync.share: feature {key} is no tensor but has its own read(); make it a "
                f"gb.TorchBasedFeature, or leave it out"
            )
        tensors[key] = table.tensor
    return tensors
