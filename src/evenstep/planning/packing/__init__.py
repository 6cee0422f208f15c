"""Packing: lengths -> bins of a capacity.

packers                best_fit (best_fit_few), first_fit and optimal by name, and `pack`
more_bins              more bins than are needed, evenly filled
bin_metrics            how well bins are filled
vector_pack            few bins under several limits, by best fit (vector_fit, room_tree) and
                       emptying
spread                 units over a given number of packs, within several limits
subset_sum, knapsack   fill one bin as full as possible
"""
