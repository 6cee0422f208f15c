"""ROLL's dynamic batching and sequence packing.

data_proto        what is used of a `DataProto`
dynamic_batching  sorted rows, dealt to ranks in turn and cut alike
sequence_packing  rows of one rank in packs of equal work
"""

from evenstep.compat.roll.dynamic_batching import (
    dynamic_batching_shard,
    make_micro_batch_iter_for_dynamic_batching,
    make_mini_batch_iter_for_dynamic_batching,
)
from evenstep.compat.roll.sequence_packing import (
    LoadBalancePacker,
    SequencePackingConfig,
    make_micro_batch_iter_for_sequence_packing,
    restore_results_order,
)

__all__ = [
    "LoadBalancePacker",
    "SequencePackingConfig",
    "dynamic_batching_shard",
    "make_micro_batch_iter_for_dynamic_batching",
    "make_micro_batch_iter_for_sequence_packing",
    "make_mini_batch_iter_for_dynamic_batching",
    "restore_results_order",
]
