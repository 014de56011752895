"""How rows get from the rank that holds them to the ranks that want them.

Read in this order::

    split         whose are the wanted rows?                        a pure decision
    id_code       row numbers as bytes                              pure
    packing       rows of several features in one buffer            pure
    portions      that buffer in a few messages                     pure
    addresses     where this rank is reached
    frames        messages between two ranks
    traffic       counts of messages and bytes
    links         connections to all ranks, which tell of every death
    served        the owner's side: what was announced, rows out of the table
    sender        what was ordered, posted
    arrival       the other side: what was asked for
    faults        errors of other ranks
    engine        the thread that serves, and the waiting for what was asked
    engines       one engine a process and group

Who owns what when: ids that are announced belong to the owner of the rows from then on. The buffer
of an order is the engine's from `Engine.ask` until `Engine.wait` returns. A sent buffer is the
engine's until the backend is through with it; it returns to a pool, and is never written before.

Connections between two ranks: one for messages (`links`), and two of gloo's for rows, one for each
direction of them (`engines`).

Messages of one rank in one step, with R ranks of which all hold rows it wants and P tables: R - 1
announcements and R - 1 short orders, R - 1 answers, R - 1 messages of rows. Bytes: 1
to 4 an id (`id_code`), an eighth for each id where a cache is used, and the rows.
"""
