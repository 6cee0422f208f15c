"""Other systems' names: **their call** -> ours. Everything here needs torch.

cosmos_rl  ShardedIterableDataset and LoadBalancedDataset
fast_llm   ScheduleRunner, with lazy micro-batches and losses that return divisors
nemo_rl    packers, BatchedDataDict and loss wrappers
roll       dynamic batching and sequence packing of rollouts
veomni     dynamic batching datasets and loaders, MainCollator
"""

from evenstep.lazy import need

need("torch", extra="torch", package=__name__)
