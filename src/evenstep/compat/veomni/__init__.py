"""VeOmni's names for dynamic batching and packing.

lengths  how samples are counted, and the parallel state
dataset  DynamicBatchingSizeDataset: micro-batches in a worker
loader   TextBatchingStrategy and DynamicBatchSizeDataLoader: in the main process; build_dataloader
collator MainCollator: one packed row, padded, sharded for sequence parallelism

Unlike there, the padding at the end of a row is one segment whose positions count up, a sequence of
one token is kept, inputs are never changed, the physical cap always holds, and resuming is exact.
"""

from evenstep.compat.veomni.collator import DataCollateInfo, MainCollator
from evenstep.compat.veomni.dataset import DynamicBatchingSizeDataset
from evenstep.compat.veomni.lengths import (
    get_length_by_attention_mask_fn,
    get_length_by_input_ids_fn,
    get_length_by_labels_fn,
    get_length_fn_by_count_mode,
)
from evenstep.compat.veomni.loader import (
    DynamicBatchSizeDataLoader,
    TextBatchingStrategy,
    build_dataloader,
)

__all__ = [
    "DataCollateInfo",
    "DynamicBatchSizeDataLoader",
    "DynamicBatchingSizeDataset",
    "MainCollator",
    "TextBatchingStrategy",
    "build_dataloader",
    "get_length_by_attention_mask_fn",
    "get_length_by_input_ids_fn",
    "get_length_by_labels_fn",
    "get_length_fn_by_count_mode",
]
