"""Batch -> **loss, gradient**. Everything here needs torch.

runner          one step: micro-batches one at a time, then one exact gradient
step_run        one try at a step: prepare, forward, loss, backward, finish
step_loss       loss sums of micro-batches -> the exact loss of a step
normalization   what the loss of a step is divided by; expert frequencies
collectives     what ranks exchange: sums, numbers in one reduction, shards of a context
framework       what wraps a model, and how models of a library are called with a batch
gradients       gradients apart from `.grad`, their norm, and where they are not finite
checks          what would make a gradient wrong, refused
result          what a step returns
prefetch        micro-batches prepared ahead
scoring         log-probs by forward passes alone
rollouts        padded rollouts of a policy, as steps and with results in their shape
watch           stops all ranks when one of them fails
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.train.collectives import Alone, Collective, Distributed, context_attention
    from evenstep.train.framework import register_forward
    from evenstep.train.normalization import (
        AllTokens,
        ByLoss,
        Constant,
        Custom,
        FixedLength,
        GroupMean,
        Normalization,
        SampleWeights,
        SequenceMean,
        TokenMean,
        expert_frequencies,
    )
    from evenstep.train.result import Kept, StepResult
    from evenstep.train.rollouts import RolloutBatch, RolloutPlan
    from evenstep.train.runner import Loss, Runner, run_step
    from evenstep.train.scoring import compute_log_probs
    from evenstep.train.watch import Watch

__all__ = [
    "AllTokens",
    "Alone",
    "ByLoss",
    "Collective",
    "Constant",
    "Custom",
    "Distributed",
    "FixedLength",
    "GroupMean",
    "Kept",
    "Loss",
    "Normalization",
    "RolloutBatch",
    "RolloutPlan",
    "Runner",
    "SampleWeights",
    "SequenceMean",
    "StepResult",
    "TokenMean",
    "Watch",
    "compute_log_probs",
    "context_attention",
    "expert_frequencies",
    "register_forward",
    "run_step",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "collectives": ["Alone", "Collective", "Distributed", "context_attention"],
            "framework": ["register_forward"],
            "normalization": [
                "AllTokens",
                "ByLoss",
                "Constant",
                "Custom",
                "FixedLength",
                "GroupMean",
                "Normalization",
                "SampleWeights",
                "SequenceMean",
                "TokenMean",
                "expert_frequencies",
            ],
            "result": ["Kept", "StepResult"],
            "rollouts": ["RolloutBatch", "RolloutPlan"],
            "runner": ["Loss", "Runner", "run_step"],
            "scoring": ["compute_log_probs"],
            "watch": ["Watch"],
        },
        extra="torch",
    )
