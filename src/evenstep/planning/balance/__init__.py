"""Balance: packs and samples to ranks.

partition, differencing  items of known cost to parts
problem, search, ways    the packs of a step: what is tried, and what is kept
construct                ways to form packs: waves, ranks_first, bins; kinds keeps kinds apart
improve, packs           exchanges that lower the modelled time
exchange                 exchanges within a wave
deal                     packs to ranks
equal_sizes              equally many segments to every rank
"""
