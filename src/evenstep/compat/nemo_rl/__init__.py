"""NeMo-RL's packers, batches and loss wrappers.

packers, packing_metrics          lengths -> bins, and how well they are filled
batched_data_dict, packed_tensor  a padded batch by key, and its media
sharding, rows                    which rows a shard gets, and how they are taken
loss_wrapper                      a loss of padded rows, on packed logits
"""

from evenstep.compat.nemo_rl.batched_data_dict import BatchedDataDict, SlicedDataDict
from evenstep.compat.nemo_rl.loss_wrapper import (
    SequencePackingFusionLossWrapper,
    SequencePackingLossWrapper,
)
from evenstep.compat.nemo_rl.packed_tensor import PackedTensor
from evenstep.compat.nemo_rl.packers import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    SequencePacker,
    get_packer,
)
from evenstep.compat.nemo_rl.packing_metrics import PackingMetrics
from evenstep.compat.nemo_rl.sharding import DynamicBatchingArgs, SequencePackingArgs

__all__ = [
    "BatchedDataDict",
    "ConcatenativePacker",
    "DynamicBatchingArgs",
    "FirstFitDecreasingPacker",
    "FirstFitShufflePacker",
    "ModifiedFirstFitDecreasingPacker",
    "PackedTensor",
    "PackingAlgorithm",
    "PackingMetrics",
    "SequencePacker",
    "SequencePackingArgs",
    "SequencePackingFusionLossWrapper",
    "SequencePackingLossWrapper",
    "SlicedDataDict",
    "get_packer",
]
