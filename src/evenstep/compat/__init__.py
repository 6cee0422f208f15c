"""Other systems' names: **their call** -> ours. Everything here needs torch.

areal       allocation to micro-batches and ranks
axolotl     MultipackBatchSampler
cosmos_rl   ShardedIterableDataset and LoadBalancedDataset
fast_llm    ScheduleRunner, with lazy micro-batches and losses that return divisors
megatron    a packing scheduler
nemo_rl     packers, BatchedDataDict and loss wrappers
roll        dynamic batching and sequence packing of rollouts
slime       the schedule of micro-batches for ranks
torchtitan  a data loader
trl         pack_dataset and TokenBudgetBatcher
veomni      dynamic batching datasets and loaders, MainCollator
verl        dynamic batching and balance
"""

from evenstep.lazy import need

need("torch", extra="torch", package=__name__)
