"""Balance: packs and samples to ranks.

partition, differencing  items of known cost to parts
joint, waves, exchange   packs and their ranks together
deal                     packs to ranks
equal_sizes              equally many segments to every rank
"""
