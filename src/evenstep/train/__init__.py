"""Batch -> **loss, gradient**. Everything here needs torch.

runner            one step: micro-batches one at a time, then one exact gradient
normalization     what the loss of a step is divided by; all_tokens is one of them
collectives       how ranks exchange sums
forwards          how models of a library are called with a batch
result            what a step returns
scoring           log-probs by forward passes alone
rollouts          padded rollouts of a policy, as steps and with results in their shape
experts           how often each expert is chosen in a step
watch             stops all ranks when one of them fails
context_exchange  attention between context-parallel ranks
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.train.all_tokens import AllTokens
    from evenstep.train.collectives import Alone, Collective, Distributed
    from evenstep.train.context_exchange import context_attention
    from evenstep.train.experts import expert_frequencies
    from evenstep.train.forwards import register_forward
    from evenstep.train.kept import Kept
    from evenstep.train.normalization import (
        ByLoss,
        Constant,
        Custom,
        FixedLength,
        GroupMean,
        Normalization,
        SampleWeights,
        SequenceMean,
        TokenMean,
    )
    from evenstep.train.result import StepResult
    from evenstep.train.rollouts.rollout_batch import RolloutBatch
    from evenstep.train.rollouts.rollout_plan import RolloutPlan
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
            "all_tokens": ["AllTokens"],
            "collectives": ["Alone", "Collective", "Distributed"],
            "context_exchange": ["context_attention"],
            "experts": ["expert_frequencies"],
            "forwards": ["register_forward"],
            "kept": ["Kept"],
            "normalization": [
                "ByLoss",
                "Constant",
                "Custom",
                "FixedLength",
                "GroupMean",
                "Normalization",
                "SampleWeights",
                "SequenceMean",
                "TokenMean",
            ],
            "result": ["StepResult"],
            "rollouts.rollout_batch": ["RolloutBatch"],
            "rollouts.rollout_plan": ["RolloutPlan"],
            "runner": ["Loss", "Runner", "run_step"],
            "scoring": ["compute_log_probs"],
            "watch": ["Watch"],
        },
        extra="torch",
    )
