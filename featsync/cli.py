"""The command line: ``featsync bench``, ``calibrate``, ``check`` and ``record``.

Exit status: 0, or 1 (something failed, or rows were wrong), or 2 (the request itself is wrong).
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from featsync import config as configuration
from featsync.config import Config
from featsync.errors import ConfigError, FeatsyncError, HostError

app = typer.Typer(
    help="Feature lookahead for DGL GraphBolt: compare, check and record pipelines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Where nobody sees a window, tables get the room they need.
_OUT = Console(width=None if sys.stdout.isatty() else 140)
_ERR = Console(stderr=True)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A pipeline's YAML file.")]
Modules = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import first; it may register stages."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting: --set num_workers=2"),
]


@app.callback()
def _root() -> None:
    """Keep the commands' names even if there were only one."""


@app.command()
def bench(  # noqa: PLR0913 - each is an option of the command line
    configs: Annotated[
        list[Path], typer.Argument(metavar="BASE OTHER…", help="YAML files; the base comes first.")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Processes of each configuration.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each side of a pair.")] = 1,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of base and other.")] = 5,
    model: Annotated[str, typer.Option(help="sage (GraphSAGE, hidden 64) or none.")] = "sage",
    simulate_step: Annotated[
        str | None,
        typer.Option(metavar="MS[:SHARE]", help="A busy device instead; Python busy for SHARE."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of each process.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without a sign of life.")] = 300,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the report.")] = None,
    trace_file: Annotated[Path | None, typer.Option("--trace", help="Write a trace.")] = None,
    overrides: Overrides = None,
    modules: Modules = None,
) -> None:
    """Compare pipelines: interleaved epochs, ratios pair by pair, wrong rows beside them."""
    from featsync.bench import command

    loaded = [_load(path, overrides, modules) for path in configs]
    options = command.options(
        ranks=ranks,
        epochs=epochs,
        pairs=pairs,
        model=model,
        simulate_step=simulate_step,
        threads=threads,
        timeout=timeout,
        modules=tuple(modules or ()),
        with_marks=trace_file is not None,
    )
    _check_folders(json_file, plot_file, trace_file)
    if plot_file is not None:
        command.check_plot()
    with _progress() as on_progress:
        results = command.Driver(loaded, options, on_progress).run()
    report = command.report(results, options, shlex.join(["featsync", *sys.argv[1:]]))
    for table in command.tables(report):
        _OUT.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if trace_file is not None:
        trace_file.write_text(json.dumps(command.to_trace(results)) + "\n")
    if plot_file is not None:
        command.plot(report, plot_file)
    _exit_if_wrong(command.wrong_rows(report))


@app.command()
def calibrate(
    ranks: Annotated[
        int, typer.Option(metavar="R", help="Processes; if more than 2, 2 are measured as well.")
    ] = 2,
    out: Annotated[Path | None, typer.Option(help="Write the profile.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw what was measured.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 10,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without a sign of life.")] = 60,
) -> None:
    """Measure what rows cost by each transport on this machine, for transport: auto."""
    from featsync.calibration import command

    _check_folders(out, plot_file)
    if plot_file is not None:
        command.check_plot()
    with _progress() as on_progress:
        measured = command.measure(command.Options(ranks, rounds, timeout), on_progress)
    for one in measured:
        profile = command.profile_of(one)
        _OUT.print(command.seconds_table(one))
        _OUT.print(command.costs_table(one, profile))
        for line in command.crossovers(profile):
            _OUT.print(line, highlight=False)
        if one.unreached:
            _OUT.print(f"Cannot bring rows between these ranks: {', '.join(one.unreached)}.")
    # Of the number of ranks that was asked for, which is the largest.
    if plot_file is not None:
        command.plot(measured[-1], profile, plot_file)
    if out is not None:
        command.write(profile, out)
    _OUT.print(command.what_next(out), soft_wrap=True, highlight=False, markup=False)


@app.command()
def check(
    config: ConfigPath,
    minibatches: Annotated[int, typer.Option(min=1, help="How many each rank compares.")] = 20,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to check it on.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without a sign of life.")] = 300,
    overrides: Overrides = None,
    modules: Modules = None,
) -> None:
    """Build a pipeline, compare its rows with the tables, and say what was chosen and why."""
    from featsync.checking import command

    loaded = _load(config, overrides, modules)
    options = command.Options(minibatches, ranks, tuple(modules or ()), timeout)
    with _progress() as on_progress:
        outcomes = command.check(loaded, options, on_progress)
    _OUT.print(command.choices_table(outcomes))
    if (holdings := command.holdings_table(outcomes)) is not None:
        _OUT.print(holdings)
    for line in command.summary(outcomes):
        _OUT.print(line, soft_wrap=True, highlight=False)
    _exit_if_wrong(sum(outcome.rows.wrong for outcome in outcomes))


@app.command()
def record(
    config: ConfigPath,
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    overrides: Overrides = None,
    modules: Modules = None,
) -> None:
    """Write the ids that one epoch asks of each feature, to replay them later."""
    from featsync.recording import record_ids

    _check_folders(out)
    loaded = _load(config, overrides, modules)
    with _progress() as on_progress:
        counts = record_ids(loaded, out, on_progress)
    for key, count in counts.items():
        _OUT.print(f"{key}: {count:,} ids")


def main() -> None:
    """Run the command line; errors on purpose come as one message, without a traceback."""
    try:
        app()
    except (ConfigError, HostError) as error:
        _ERR.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except FeatsyncError as error:
        _ERR.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _load(path: Path, overrides: list[str] | None, modules: list[str] | None) -> Config:
    """Read a configuration and find its stages, before anything slow is started."""
    loaded = configuration.load(path, overrides or ())
    for name in modules or ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"--import {name}: {error}") from error
    # Needs DGL, which a wrong file should not have to wait for.
    from featsync.feature_keys import feature_keys
    from featsync.pipeline import bind_stages

    bind_stages(loaded)
    feature_keys(loaded)
    return loaded


def _check_folders(*files: Path | None) -> None:
    """Refuse files that cannot be written, before the work whose results they are to hold."""
    for file in files:
        if file is None:
            continue
        if not file.parent.is_dir():
            raise ConfigError(f"{file} cannot be written: there is no folder {file.parent}")
        if file.is_dir():
            raise ConfigError(f"{file} cannot be written: it is a folder; name a file in it")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"{file} cannot be written: no permission; name another place")


@contextmanager
def _progress() -> Iterator[Any]:
    """Show a bar; yields a function of what is done, how many are, and of how many."""
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=_ERR,
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=None)

        def on_progress(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield on_progress


def _exit_if_wrong(wrong: int) -> None:
    if wrong:
        _ERR.print(f"failed: {wrong:,} rows differ from their tables", style="red")
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
