"""Features whose rows every step may change, exact although rows are read ahead.

Each machine holds its part of the rows in shared memory, and beside it a *board* of counters.
Ranks publish what they write; nobody writes to the rows but in a *commit*, which applies the writes
of one step::

    rank 0   deliver n │ update ─▶ own area │ close n ─┐
    rank 1   deliver n │ update ─▶ own area │ close n ─┼▶ commit n: merged into the table, by shares
                                                       │
    rank 0   (early read of n+1, while n is used) ─────┴▶ patch what n wrote ─▶ deliver n+1

Positions
    ``(epoch, steps)``, one integer that never falls. A rank that *closed* ``(e, n + 1)`` has ended
    step n of epoch e: its writes are published and complete. A rank that has ended epoch e stands
    at ``(e + 1, 0)``: it holds up nobody in e.

States of a row, as one rank sees it
    *settled*   as committed; anybody may read it, nobody writes it
    *pending*   in areas of ranks that closed step n, or not yet; readers see the settled row
    *merging*   commit n writes it; what was read meanwhile is read again (patched), since its id is
                among those that were published

Invariants
    1. Commit n begins when all ranks have closed n, and all before it are complete.
    2. Each share of a commit (rows dealt out by id) is merged by one rank, whichever comes first;
       a commit is complete when all its shares are. Who merges waits for nobody.
    3. With the closing of n a rank has told which rows it reads in n + 1. A commit merges rows that
       any rank reads next first; then it is *ready*, and n + 1 may be delivered. Its other rows are
       merged beside step n + 1, and nothing else happens to the table before they are.
    4. A rank closes n + 1 only after commit n is ready (exact). So between its delivery of n + 1
       and its closing of n + 1 no row changes that any rank reads in n + 1.
    5. An early read of n + 1 begins after commit n - 1 is complete. So it differs from the table
       after commit n in rows that n wrote, and in no other; these are patched. The first minibatch
       of an epoch is read after all commits of the epoch before, and needs no patch.
    6. An area of step n is used again when commit n + 1 is complete: then all have patched.

With ``staleness=s`` a rank is delivered n + 1 when commit n - s is complete. Its reads hold commits
off while they copy: a flag on the board, raised only while no share of the next commit is claimed.
So they show the table after a whole commit m >= n - s, and nothing is patched. The same holds for
reads of loaders that take no part, and outside of loops.

A loader takes part (*drives* the clock of its feature) from the step of its first update on; with
several ranks that has to be the first step of its epoch, and zero rows are enough. Later epochs of
the same loader take part from the start. Others, for validation, read what is committed; while they
do, the ranks that train wait for this one.

Several machines
    Rows are dealt out over machines (`homes`). A rank is on the board of every machine: on its own
    in place (`part`), on the others as a *guest* (`guest`), for which one rank there does what its
    letters say (`letters`, `away`). So each part is a table of its own with all of the above, and
    its commits need only the ranks of its machine to merge::

        rank       early n+1 ─▶ guest   reads when commit n - 1 is complete, marks   ─▶ rows
                   write n, close n+1 ─▶ its area and counter there
                   patch n+1 ─▶ commit n as far as wanted, what it wrote of the rows ─▶ rows

    7. A guest marks rows as wanted next only before it closes the step. A read that was asked for
       later is patched when the whole commit is complete.
    8. Who waits for another machine's patch has merged before what it left for later: the guest
       there may wait for a rank that waits here.
    9. A read of one whole step asks machines that are behind again, until all show the same one.

All states of a model of this, of 2 and 3 ranks, are searched by ``tests/test_dynamic_protocol.py``
(without 3, which only tells *when* rows of one commit are merged), and of one of what machines add
by ``tests/test_dynamic_machines.py`` (3, 7 and 8).
"""
