"""Train a GraphSAGE to tell edges from random pairs, with any pipeline of that task.

python pipelines/link_prediction.py pipelines/featsync_link.yaml --epochs 3
torchrun --nproc-per-node 2 pipelines/link_prediction.py pipelines/featsync_link.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from loops import join_ranks, leave_ranks, run, train_epoch, validate

import featsync
from featsync import config as configuration
from featsync.bench.training import delivered_source, train_step
from featsync.errors import ConfigError
from featsync.loading import load_dataset

Threads = Annotated[int, typer.Option(help="Torch threads of each process.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Replace a setting: KEY=VALUE")]


def main(config: Path, epochs: int = 3, threads: Threads = 1, overrides: Overrides = None) -> None:
    """Train, and print seconds and the area under the ROC curve of each epoch."""
    ranks = join_ranks(threads)
    settings = configuration.load(config, overrides or ())
    if settings.task != "link_prediction":
        raise ConfigError(f"{config}: task = {settings.task!r}; this script needs link_prediction")
    dataset = load_dataset(settings)
    train_loader = featsync.build(settings, dataset=dataset, split="train")
    valid_loader = featsync.build(settings, dataset=dataset, split="valid")

    trainer = train_step(settings, dataset, ranks.size)
    feed = delivered_source(settings, dataset)
    for epoch in range(epochs):
        seconds = train_epoch(trainer, train_loader, feed)
        area = validate(trainer, valid_loader, feed)
        if ranks.is_first:
            print(f"epoch {epoch}: {seconds:.2f} s, validation AUC {area:.4f}", flush=True)
    leave_ranks(ranks)


if __name__ == "__main__":
    run(main)
