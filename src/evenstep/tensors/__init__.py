"""Plan -> **Batch** -> model -> results in the caller's order. Everything here is torch.

collate    samples of one micro-batch -> Batch: tokens, labels, positions, boundaries, extras
beyond     what follows a piece where its sample was split, so that no label is lost
slots      what a Batch and a BatchShard of it have in common
attention  q, k, v of a Batch -> output, with one meaning on every backend; masks for others
context    a Batch cut for context-parallel ranks (sequence: for sequence-parallel ones) -> BatchShard
sequences  a function of one sequence on all of a batch; losses and metrics are such functions
restore    per-token or per-sequence results of micro-batches -> the caller's order
"""
