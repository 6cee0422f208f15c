"""Plan -> **Batch** -> model -> results in the caller's order. Everything here needs torch.

batch              Batch, the tensors of one micro-batch; View, its slots as losses read them
collate            samples of one micro-batch -> Batch: tokens, labels, positions, boundaries
segment_attention  attention within segments, with one meaning on every backend, and its masks
parallel           a Batch -> one BatchShard per context- or sequence-parallel rank
losses             a function of one sequence, run on all sequences of a batch; losses and metrics
preference         losses of a chosen and a rejected sequence
head               scores of labels that losses are made of
restore            results of micro-batches -> the caller's order
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.tensors.batch import Batch, BatchShard, Extra, RaggedTensor, View
    from evenstep.tensors.collate import Collator
    from evenstep.tensors.head import Head, label_log_probs
    from evenstep.tensors.losses import (
        Metric,
        PerSequence,
        Sums,
        count_experts,
        cross_entropy,
        distillation,
        load_balancing,
        policy_gradient,
        value_loss,
    )
    from evenstep.tensors.parallel import (
        join_context,
        join_sequence,
        shard_context,
        shard_sequence,
    )
    from evenstep.tensors.preference import dpo, reward_model
    from evenstep.tensors.restore import restore_ragged, restore_sequences, restore_tokens
    from evenstep.tensors.segment_attention import attention, block_mask, sdpa_mask

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
            "batch": ["Batch", "BatchShard", "Extra", "RaggedTensor", "View"],
            "collate": ["Collator"],
            "head": ["Head", "label_log_probs"],
            "losses": [
                "Metric",
                "PerSequence",
                "Sums",
                "count_experts",
                "cross_entropy",
                "distillation",
                "load_balancing",
                "policy_gradient",
                "value_loss",
            ],
            "parallel": ["join_context", "join_sequence", "shard_context", "shard_sequence"],
            "preference": ["dpo", "reward_model"],
            "restore": ["restore_ragged", "restore_sequences", "restore_tokens"],
            "segment_attention": ["attention", "block_mask", "sdpa_mask"],
        },
        extra="torch",
    )
