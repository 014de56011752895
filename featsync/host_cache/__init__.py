"""One cache for the ranks of a machine: rows of other machines, held once, read by all of them.

::

    rank 0   plan ─┐            ┌─ read slots ─ bring what is missing ─ fill slots ─▶ landed
    rank 1   plan ─┤ one order  ├─ read slots ─ bring …
    rank 2   plan ─┘            └─ …

Plans of all ranks come one after the other, since each holds a lock while it is made
(`Directory`). Moving follows that order without a lock: who reads a slot waits for the landing that
fills it, who fills a slot waits for those who still read it (`HostCache`). Waiting always goes back
in the order of plans, so nobody waits in a circle.

Where own memory is nearer than a neighbour's, a rank keeps some slots to itself (`placement`). What
it is sure to find there the shared cache never hears of, so no row is held for one purpose twice.
"""
