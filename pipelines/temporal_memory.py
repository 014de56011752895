"""Does this author edit this file next? A memory of every node, over a real stream of events.

python pipelines/temporal_memory.py --git ~/some/repository
python pipelines/temporal_memory.py --synthetic 20000 --staleness 1 --staleness 4
torchrun --nproc-per-node 2 pipelines/temporal_memory.py --git ~/some/repository

The same program runs several times. First without looking ahead: each minibatch reads its rows when
it needs them, from plain tensors, and changes them in place. Then with featsync, rows read ahead
while the minibatch before is still being worked on: exact, which has to give the same losses bit
for bit; and at most some steps late. The weights learn from the first part of the stream; precision
is of the rest, during which only the memory goes on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import dgl.graphbolt as gb
import event_streams
import torch
import torch.distributed as dist
import typer
from event_streams import EventStream
from loops import Ranks, join_ranks, leave_ranks, run
from node_memory import TABLES, NodeMemory, average_precision, rows_after, start_tables
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import featsync
from featsync.errors import ConfigError

Git = Annotated[Path | None, typer.Option(help="A git repository, whose edits are the events.")]
Synthetic = Annotated[int | None, typer.Option(min=1, help="So many events that are made up.")]
Newest = Annotated[int | None, typer.Option(min=1, help="Of a repository, only so many events.")]
Staleness = Annotated[
    list[int], typer.Option(min=1, help="Steps that rows may be late; repeat it.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the results.")]


@dataclass(frozen=True)
class Settings:
    """What all programs have in common."""

    batch_size: int
    width: int
    lookahead: int
    worker: str
    rate: float
    train_share: float
    seed: int


@dataclass
class Result:
    """What one program did.

    Attributes:
        name: Of the program.
        losses: Of each minibatch of this rank.
        scores: Of each minibatch after the training part, ``(events, 2)``: of the file that was
            edited, and of the other.
        seconds: From the first minibatch to the last.
        patched: Rows that were read ahead and read again, since they were written meanwhile.
        latest: The most steps that a row was late.
        precision: The average precision of all ranks.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    patched: int = 0
    latest: int = 0
    precision: float = float("nan")


def main(  # noqa: PLR0913 - the options of the command line
    git: Git = None,
    synthetic: Synthetic = None,
    newest: Newest = None,
    staleness: Staleness = (1, 2),  # type: ignore[assignment]
    batch_size: Annotated[int, typer.Option(min=1)] = 100,
    width: Annotated[int, typer.Option(min=1)] = 32,
    lookahead: Annotated[int, typer.Option(min=1)] = 2,
    worker: str = "thread",
    rate: float = 3e-3,
    train_share: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.7,
    seed: int = 0,
    threads: int = 1,
    json_file: Json = None,
) -> None:
    """Compare the programs: seconds, mean loss and average precision of each."""
    ranks = join_ranks(threads)
    settings = Settings(batch_size, width, lookahead, worker, rate, train_share, seed)
    stream = open_stream(git, synthetic, newest, seed)

    # With several ranks, no sequential program does the same: they share what they read and write.
    results = [without_lookahead(stream, settings)] if ranks.size == 1 else []
    results += [with_featsync(stream, settings, ranks, late) for late in (0, *staleness)]
    if ranks.is_first:
        Console(width=None if sys.stdout.isatty() else 100).print(table(results, stream, ranks))
        if json_file is not None:
            json_file.write_text(json.dumps([summary(result) for result in results]))
    leave_ranks(ranks)
    if ranks.size == 1:
        check_equal(*results[:2])


def open_stream(
    git: Path | None, synthetic: int | None, newest: int | None, seed: int
) -> EventStream:
    """Read or make up the events."""
    if (git is None) == (synthetic is None):
        raise ConfigError("say where the events come from: --git PATH or --synthetic EVENTS")
    if git is not None:
        return event_streams.from_git(git, newest)
    return event_streams.synthetic(synthetic or 0, seed)


def without_lookahead(stream: EventStream, settings: Settings) -> Result:
    """Run with plain tensors that are read when rows are needed and changed in place."""
    tables = start_tables(stream.num_nodes, settings.width, settings.seed)
    features = gb.BasicFeatureStore(
        {("node", None, name): gb.TorchBasedFeature(rows) for name, rows in tables.items()}
    )

    def read(minibatch: Any) -> dict[str, Tensor]:
        ids = minibatch.input_nodes
        return {name: features.read("node", None, name, ids) for name in TABLES}

    loader = gb.DataLoader(event_streams.minibatches(stream, settings.batch_size))
    return work(
        "no lookahead", loader, features, read, settings, steps_to_learn(stream, settings, 1)
    )


def with_featsync(stream: EventStream, settings: Settings, ranks: Ranks, staleness: int) -> Result:
    """Run with rows that are read ahead, and at most ``staleness`` steps late."""
    tables = start_tables(stream.num_nodes, settings.width, settings.seed)
    features = gb.BasicFeatureStore(
        {
            # Of two ranks that see a node in the same step, the later one has its later event.
            ("node", None, name): featsync.DynamicFeature(rows, merge="last")
            for name, rows in tables.items()
        }
    )
    datapipe = event_streams.minibatches(stream, settings.batch_size, ranks.rank, ranks.size)
    datapipe = datapipe.plan_feature(
        features, node_feature_keys=list(TABLES), lookahead=settings.lookahead
    )
    datapipe = datapipe.sync_feature(worker=settings.worker, staleness=staleness)
    loader = gb.DataLoader(datapipe)
    name = "featsync, exact" if staleness == 0 else f"featsync, {staleness} late"
    learn = steps_to_learn(stream, settings, ranks.size)
    result = work(
        name, loader, features, lambda minibatch: minibatch.node_features, settings, learn
    )
    counts = featsync.stats(loader).features.values()
    result.patched = sum(feature.rows_patched for feature in counts)
    result.latest = max(feature.staleness for feature in counts)
    return result


def steps_to_learn(stream: EventStream, settings: Settings, num_ranks: int) -> int:
    """How many steps train the weights: as many on each rank, since gradients are averaged."""
    num_batches = -(-len(stream) // settings.batch_size)
    return int(num_batches * settings.train_share) // num_ranks


def work(
    name: str,
    loader: Any,
    features: Any,
    read: Callable[[Any], dict[str, Tensor]],
    settings: Settings,
    learn: int,
) -> Result:
    """Go through the stream once; the rows of each minibatch are what ``read`` gives."""
    torch.manual_seed(settings.seed)
    model = NodeMemory(settings.width)
    trained = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.Adam(model.parameters(), settings.rate)
    result = Result(name)
    started = time.perf_counter()
    for step, minibatch in enumerate(loader):
        rows, positions, times = read(minibatch), minibatch.compacted_seeds, minibatch.times
        pairs = torch.cat([positions[:, :2], positions[:, ::2]])
        labels = torch.cat([torch.ones_like(times), torch.zeros_like(times)]).float()
        with torch.set_grad_enabled(step < learn):
            judge = trained if step < learn else model
            logits, memory = judge(rows, pairs, times.repeat(2))
            loss = functional.binary_cross_entropy_with_logits(logits, labels)
        if step < learn:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            result.scores.append(logits.view(2, -1).T)
        written, new = rows_after(rows, memory.detach(), positions[:, :2], times)
        for table_name, values in new.items():
            ids = minibatch.input_nodes[written]
            features.update("node", None, table_name, values, ids)
        result.losses.append(loss.item())
    result.seconds = time.perf_counter() - started
    result.precision = precision_of_all_ranks(result.scores)
    return result


def precision_of_all_ranks(scores: list[Tensor]) -> float:
    """Put the scores of all ranks together; collective."""
    mine = torch.cat([*scores, torch.empty(0, 2)])
    parts = [mine]
    if dist.is_initialized():
        parts = [mine] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
    everybody = torch.cat(parts)
    labels = torch.tensor([1, 0]).expand(len(everybody), 2)
    return average_precision(everybody.flatten(), labels.flatten())


def check_equal(reference: Result, exact: Result) -> None:
    """End with status 1 unless reading ahead changed nothing at all."""
    if exact.losses != reference.losses or exact.precision != reference.precision:
        differing = [a == b for a, b in zip(reference.losses, exact.losses, strict=True)]
        step = differing.index(False) if False in differing else len(differing)
        print(f"featsync, exact, differs from the program without lookahead, in step {step}")
        sys.exit(1)
    print(
        f"featsync, exact: all {len(exact.losses)} losses and the average precision are equal, bit "
        "for bit, to those without lookahead"
    )


def table(results: list[Result], stream: EventStream, ranks: Ranks) -> Table:
    """Lay out the results."""
    found = Table(
        title=f"{len(stream):,} events; authors: {stream.num_authors:,}, "
        f"files: {stream.num_nodes - stream.num_authors:,}, ranks: {ranks.size}"
    )
    found.add_column("program")
    for column in ("seconds", "mean loss", "average precision", "rows patched", "steps late"):
        found.add_column(column, justify="right")
    for result in results:
        found.add_row(
            result.name,
            f"{result.seconds:.2f}",
            f"{summary(result)['loss']:.4f}",
            f"{result.precision:.4f}",
            f"{result.patched:,}",
            str(result.latest),
        )
    return found


def summary(result: Result) -> dict[str, Any]:
    """Give what is written to the file of results."""
    return {
        "name": result.name,
        "seconds": result.seconds,
        "loss": sum(result.losses) / max(1, len(result.losses)),
        "losses": result.losses,
        "average_precision": result.precision,
        "rows_patched": result.patched,
        "steps_late": result.latest,
    }


if __name__ == "__main__":
    run(main)
