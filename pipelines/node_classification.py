"""Train a GraphSAGE to classify nodes, with any of the pipelines beside this file.

python pipelines/node_classification.py pipelines/featsync.yaml --epochs 8
torchrun --nproc-per-node 2 pipelines/node_classification.py pipelines/featsync.yaml
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from loops import join_ranks, leave_ranks, run, train_epoch, validate

import featsync
from featsync import config as configuration
from featsync.bench.training import delivered_source, train_step
from featsync.loading import load_dataset

Threads = Annotated[int, typer.Option(help="Torch threads of each process.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Replace a setting: KEY=VALUE")]


def main(
    config: Path,
    epochs: int = 8,
    threads: Threads = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results.")] = None,
    overrides: Overrides = None,
) -> None:
    """Train, and print seconds and validation accuracy of each epoch."""
    ranks = join_ranks(threads)
    settings = configuration.load(config, overrides or ())
    dataset = load_dataset(settings)
    train_loader = featsync.build(settings, dataset=dataset, split="train")
    valid_loader = featsync.build(settings, dataset=dataset, split="valid")

    trainer = train_step(settings, dataset, ranks.size)
    feed = delivered_source(settings, dataset)
    results = []
    for epoch in range(epochs):
        seconds = train_epoch(trainer, train_loader, feed)
        accuracy = validate(trainer, valid_loader, feed)
        results.append({"seconds": seconds, "accuracy": accuracy})
        if ranks.is_first:
            print(f"epoch {epoch}: {seconds:.2f} s, validation accuracy {accuracy:.4f}", flush=True)

    if json_file is not None and ranks.is_first:
        json_file.write_text(json.dumps(results))
    leave_ranks(ranks)


if __name__ == "__main__":
    run(main)
