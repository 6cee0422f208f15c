"""Plan -> **Batch** -> model -> results in the caller's order. Everything here is torch.

collate   samples of one micro-batch -> Batch: tokens, labels, positions, boundaries, extras
context   a Batch cut for context- or sequence-parallel ranks, and joined again
attention q, k, v of a Batch -> output, with one meaning on every backend
restore   per-token or per-sequence results of micro-batches -> the caller's order
"""
