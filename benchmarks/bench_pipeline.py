"""Whole pipelines against stock: the runs behind the README's table, each one `featsync bench`.

    python benchmarks/bench_pipeline.py                  all of them, an hour on two quiet cores
    python benchmarks/bench_pipeline.py synthetic debian

Each writes ``benchmarks/results/<name>.json``, whose ``command`` is what a user types to run it
alone. Measure with nothing else running: the ratios come from interleaved pairs, but what runs
beside on one side of a pair only still shows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PIPELINES = Path("pipelines")
SYNTHETIC = ("synthetic_stock", "synthetic_stock_tuned", "synthetic_featsync")
DEBIAN = ("stock", "stock_tuned_allocator", "featsync")
FIVE = ("--pairs", "5")
# Ten minibatches an epoch instead of twenty, for runs whose minibatches are all alike.
SHORT = (*FIVE, "--set", "dataset.synthetic.train_share=0.01")
WORKERS2 = ("--set", "num_workers=2")

RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "synthetic": (SYNTHETIC, ("--pairs", "7")),
    "debian": ((*DEBIAN, "worker_inline", "worker_process"), FIVE),
    **{
        f"width{width}": (SYNTHETIC, (*SHORT, "--set", f"dataset.synthetic.width={width}"))
        for width in (8, 32)
    },
    # A third of the graph: four processes of a million rows of 2 KiB do not fit into 24 GiB.
    "width512": (
        SYNTHETIC,
        (
            *(*FIVE, "--set", "dataset.synthetic.train_share=0.03"),
            *(
                "--set",
                "dataset.synthetic.nodes=300000",
                "--set",
                "dataset.synthetic.edges=6000000",
            ),
            *("--set", "dataset.synthetic.width=512"),
        ),
    ),
    "debian_ranks2": (DEBIAN, (*FIVE, "--ranks", "2")),
    "debian_retention": (
        ("stock", "featsync", "retention_window", "retention_lru", "retention_static"),
        FIVE,
    ),
    "debian_hetero": (("stock_hetero", "featsync_hetero"), FIVE),
    "debian_link": (("stock_link", "featsync_link"), FIVE),
    "synthetic_workers2": (SYNTHETIC, (*SHORT, *WORKERS2)),
}
SMOKE = (
    ("synthetic_stock", "synthetic_featsync", "synthetic_process"),
    (
        "--pairs", "1",
        "--set", "dataset.synthetic.nodes=2000",
        "--set", "dataset.synthetic.edges=10000",
        "--set", "batch_size=20",
        "--set", "num_workers=0",
    ),
)  # fmt: skip


def run(configs: tuple[str, ...], options: tuple[str, ...], out: Path) -> int:
    """Run ``featsync bench`` and return its exit status: 1 if rows were wrong."""
    paths = [str(PIPELINES / f"{config}.yaml") for config in configs]
    command = ["bench", *paths, *options, "--json", str(out)]
    print("featsync", *command, flush=True)
    return subprocess.run(
        [sys.executable, "-m", "featsync.cli", *command], cwd=HERE.parent, check=False
    ).returncode


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(run(*SMOKE, Path(folder) / "smoke.json"))
    unknown = set(args.names) - set(RUNS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    (HERE / "results").mkdir(exist_ok=True)
    failed = [
        name
        for name in args.names or RUNS
        if run(*RUNS[name], Path("benchmarks/results") / f"{name}.json")
    ]
    if failed:
        sys.exit(f"failed, or wrong rows: {', '.join(failed)}")


if __name__ == "__main__":
    main()
