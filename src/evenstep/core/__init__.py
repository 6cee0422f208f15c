"""The vocabulary: lengths -> **segments, rows, micro-batches, cells: a `Plan`**.

Values only, numpy only. `recipe` says what a plan has to be, `plan` holds the result, `checks`
verifies it, `stats` measures it, `bounds` and `floor` say what no plan can beat.
"""
