"""Other systems' names: **their call** -> ours. Everything here needs torch.

areal       allocation to micro-batches and ranks
axolotl     MultipackBatchSampler
cosmos_rl   ShardedIterableDataset and LoadBalancedDataset
megatron    a packing scheduler
nemo_rl     packers, BatchedDataDict and loss wrappers
roll        dynamic batching and sequence packing of rollouts
slime       the schedule of micro-batches for ranks
torchtitan  a data loader
trl         pack_dataset and TokenBudgetBatcher
verl        dynamic batching and balance
"""

from evenstep.lazy import need

need("torch", extra="torch", package=__name__)
