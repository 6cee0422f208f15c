"""Balance: packs and samples to ranks.

partition                items of known cost to parts: lpt and other algorithms by name
lowering                 the default after lpt: swapping, multifit, differencing
joint, waves, exchange   packs and their ranks together
deal                     packs to ranks
equal_sizes              equally many segments to every rank
"""
