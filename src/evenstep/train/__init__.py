"""Batch -> **loss, gradient**. Everything here is torch.

runner       a step: micro-batches one at a time, and in the end one exact gradient
attempt      one try at it; prefetch prepares the next micro-batch, stopwatch and result measure
checks       what an attempt refuses, before a wrong gradient comes of it
framework    when DDP, fully_shard or we ourselves exchange gradients
loss         normalizations: the weight of every token, and what a batch adds to the denominator
normalizer   from sums of micro-batches to the gradient of the step's exact loss; gradients helps
bundle       all that ranks sum at the end of a step, in one tensor
collectives  how ranks meet; watch notices when one is gone
scoring      log-probs by forwards alone
model        a small decoder that takes a `Batch` and nothing else
"""
