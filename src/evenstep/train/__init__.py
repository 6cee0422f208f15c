"""Batch -> **loss, gradient**. Everything here is torch.

loss         normalizations: the weight of every token, and what a batch adds to the denominator
normalizer   from sums of micro-batches to the gradient of the step's exact loss; gradients helps
bundle       all that ranks sum at the end of a step, in one tensor
collectives  how ranks meet
model        a small decoder that takes a `Batch` and nothing else
"""
