"""Plan -> **Batch** -> model -> results in the caller's order. Everything here needs torch.

collate              samples of one micro-batch -> Batch: tokens, labels, positions, boundaries
continuation         what follows a segment of a split sample, so that no label is lost
attention_backends   attention within segments, with one meaning on every backend
masks                the same as masks for other attention functions
context_parallel     a Batch -> one BatchShard per context-parallel rank
sequence_parallel    the same for sequence-parallel ranks
per_sequence         a function of one sequence, run on all sequences of a batch
losses, metrics      such functions
outputs              the tensor that such a function reads from a model's outputs
restore              results of micro-batches -> the caller's order
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.tensors.attention_backends import attention
    from evenstep.tensors.batch import Batch
    from evenstep.tensors.batch_shard import BatchShard
    from evenstep.tensors.collate import Collator
    from evenstep.tensors.context_parallel import join_context, shard_context
    from evenstep.tensors.extras import Extra, RaggedTensor
    from evenstep.tensors.losses import (
        Head,
        count_experts,
        cross_entropy,
        distillation,
        dpo,
        label_log_probs,
        load_balancing,
        policy_gradient,
        reward_model,
        value_loss,
    )
    from evenstep.tensors.masks import block_mask, sdpa_mask
    from evenstep.tensors.metrics import Metric
    from evenstep.tensors.per_sequence import PerSequence, Sums
    from evenstep.tensors.restore import restore_ragged, restore_sequences, restore_tokens
    from evenstep.tensors.sequence_parallel import join_sequence, shard_sequence
    from evenstep.tensors.view import View

__all__ = [
    "Batch",
    "BatchShard",
    "Collator",
    "Extra",
    "Head",
    "Metric",
    "PerSequence",
    "RaggedTensor",
    "Sums",
    "View",
    "attention",
    "block_mask",
    "count_experts",
    "cross_entropy",
    "distillation",
    "dpo",
    "join_context",
    "join_sequence",
    "label_log_probs",
    "load_balancing",
    "policy_gradient",
    "restore_ragged",
    "restore_sequences",
    "restore_tokens",
    "reward_model",
    "sdpa_mask",
    "shard_context",
    "shard_sequence",
    "value_loss",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "attention_backends": ["attention"],
            "batch": ["Batch"],
            "batch_shard": ["BatchShard"],
            "collate": ["Collator"],
            "context_parallel": ["join_context", "shard_context"],
            "extras": ["Extra", "RaggedTensor"],
            "losses": [
                "Head",
                "count_experts",
                "cross_entropy",
                "distillation",
                "dpo",
                "label_log_probs",
                "load_balancing",
                "policy_gradient",
                "reward_model",
                "value_loss",
            ],
            "masks": ["block_mask", "sdpa_mask"],
            "metrics": ["Metric"],
            "per_sequence": ["PerSequence", "Sums"],
            "restore": ["restore_ragged", "restore_sequences", "restore_tokens"],
            "sequence_parallel": ["join_sequence", "shard_sequence"],
            "view": ["View"],
        },
        extra="torch",
    )
