"""Batching: which samples share a micro-batch.

dynamic            padded micro-batches of one step: sorted rows are divided where the width grows
cuts               the fewest slots, and cuts that all ranks share
least_time         the least modelled time, over several cuts and numbers of micro-batches
blocks             contiguous micro-batches and what they cost
lock_step, levels  cuts for ranks that synchronise at every micro-batch
rank_sums, shifts  cuts for ranks that synchronise once per step
in_order           the next samples while the bounds hold
"""
