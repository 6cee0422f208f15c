"""Other systems' names: **their call** -> ours. Everything here needs torch.

cosmos_rl  ShardedIterableDataset and LoadBalancedDataset
nemo_rl    packers, BatchedDataDict and loss wrappers
roll       dynamic batching and sequence packing of rollouts
"""

from evenstep.lazy import need

need("torch", extra="torch", package=__name__)
