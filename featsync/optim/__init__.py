"""Optimizers of rows that learn: give one a `featsync.DynamicFeature`.

Example::

    embeddings = featsync.DynamicFeature(torch.randn(num_nodes, 64))
    optimizer = featsync.optim.SparseAdagrad(embeddings, lr=0.1)
    for minibatch in dataloader:                 # delivers rows of embeddings, which require grad
        loss(minibatch).backward()
        optimizer.step(minibatch)
"""

from featsync.optim.optimizer import (
    RowOptimizer,
    RowWiseAdagrad,
    SparseAdagrad,
    SparseAdam,
    SparseSGD,
)

__all__ = ["RowOptimizer", "RowWiseAdagrad", "SparseAdagrad", "SparseAdam", "SparseSGD"]
