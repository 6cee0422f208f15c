"""Packing: lengths -> bins of a capacity.

packers                best_fit, first_fit and optimal by name, and `pack`
more_bins              more bins than are needed, evenly filled
spread                 units over a given number of packs, within several limits
subset_sum, knapsack   fill one bin as full as possible
"""
