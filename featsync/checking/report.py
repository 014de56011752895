"""What a check found, as tables and sentences for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from featsync.bench.check_rows import RowCheck
from featsync.checking.protocol import FeatureFound, Outcome

__all__ = ["choices_table", "holdings_table", "summary"]


def choices_table(outcomes: Sequence[Outcome]) -> Table:
    """Lay out what was chosen, on the first rank if there are several."""
    table = Table(title="What was chosen" + (" on rank 0" if len(outcomes) > 1 else ""))
    for column in ("feature", "row", "transport", "hit rate", "why"):
        table.add_column(column)
    for one in outcomes[0].features:
        rate = "" if one.hit_rate is None else f"{one.hit_rate:.3f}"
        table.add_row(one.name, str(one.row_shape), one.transport, rate, one.why)
    return table


def holdings_table(outcomes: Sequence[Outcome]) -> Table | None:
    """Lay out which rank holds how many rows, and wanted how many of others; if any are split."""
    split = [number for number, one in enumerate(outcomes[0].features) if one.sizes]
    if not split:
        return None
    table = Table(title="Who holds the rows, and how many of those wanted other ranks hold")
    table.add_column("rank", justify="right")
    for number in split:
        table.add_column(outcomes[0].features[number].name, justify="right")
        table.add_column("wanted of others", justify="right")
    for rank, outcome in enumerate(outcomes):
        cells = [str(rank)]
        for number in split:
            cells += _cells(rank, outcome.features[number])
        table.add_row(*cells)
    return table


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Say how many rows were wrong, and what to expect of the way in which nodes are split."""
    num_ranks, share = len(outcomes), outcomes[0].remote_share
    if share is not None and num_ranks == 1:
        yield "One rank holds all rows: with --ranks R the tables are split over so many."
    elif share is not None:
        yield (
            f"Of the neighbours of a node, {share:.1%} lie on another rank than the node does: so "
            "much of one hop is remote whose seeds are the rank's own nodes. If nodes lay anywhere "
            f"it would be {1 - 1 / num_ranks:.1%}."
        )
    minibatches = sum(outcome.minibatches for outcome in outcomes)
    rows = sum((outcome.rows for outcome in outcomes), RowCheck())
    where = "" if num_ranks == 1 else f" on {num_ranks} ranks"
    wrong = [
        f"rank {rank}: {outcome.rows.wrong:,}"
        for rank, outcome in enumerate(outcomes)
        if outcome.rows.wrong
    ]
    by_rank = f" ({', '.join(wrong)})" if wrong and num_ranks > 1 else ""
    yield (
        f"{minibatches} minibatches{where}, {rows.checked:,} rows compared:"
        f" {rows.wrong:,} wrong{by_rank}"
    )


def _cells(rank: int, found: FeatureFound) -> list[str]:
    share = found.num_of_others / found.num_wanted if found.num_wanted else 0.0
    return [f"{found.sizes[rank]:,}", f"{share:.1%}"]
