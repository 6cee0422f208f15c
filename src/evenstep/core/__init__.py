"""The vocabulary: lengths -> **segments, rows, micro-batches, cells: a `Plan`**.

Values only, numpy only. `recipe` says what is wanted, `plan` holds what was decided, `checks`
proves that the second keeps the promises of the first, `stats` measures it, `bounds` says what
could be reached at all.
"""
