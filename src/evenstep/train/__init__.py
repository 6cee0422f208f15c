"""Batch -> **loss, gradient**. Everything here needs torch.

runner         Runner and StepRun: prepare, forward, loss, backward, finish; Prefetch
step_loss      losses of a micro-batch; from their sums to the exact loss and gradient of a step
normalization  what the loss of a step is divided by
gradients      the gradients of a step apart from earlier ones, their sum over ranks, their norm
compiling      torch.compile for the layers of a model, and what it compiled in a step
framework      how a model is called, and how DDP and fully_shard exchange gradients and recover
collectives    what ranks exchange: sums, bundles, shards of a context
checks         checks of batches and ranks that prevent wrong gradients; causes of failed steps
result         what a step returns
scoring        log-probs by forward passes alone
rollouts       padded rollouts of a policy, as steps and with results in their shape
budget         the largest micro-batch that fits into memory, by a few steps
watch          stops all ranks when one of them fails
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.train.budget import MeasuredBudget, MemoryMeter, find_budget
    from evenstep.train.collectives import Alone, Collective, Distributed, context_attention
    from evenstep.train.compiling import Compilations, compile_layers
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
    from evenstep.train.runner import Runner, run_step
    from evenstep.train.scoring import Evaluation, compute_log_probs, sum_log_probs
    from evenstep.train.step_loss import Loss
    from evenstep.train.watch import Watch

__all__ = [
    "AllTokens",
    "Alone",
    "ByLoss",
    "Collective",
    "Compilations",
    "Constant",
    "Custom",
    "Distributed",
    "Evaluation",
    "FixedLength",
    "GroupMean",
    "Kept",
    "Loss",
    "MeasuredBudget",
    "MemoryMeter",
    "Normalization",
    "RolloutBatch",
    "RolloutPlan",
    "Runner",
    "SampleWeights",
    "SequenceMean",
    "StepResult",
    "TokenMean",
    "Watch",
    "compile_layers",
    "compute_log_probs",
    "context_attention",
    "expert_frequencies",
    "find_budget",
    "register_forward",
    "run_step",
    "sum_log_probs",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "budget": ["MeasuredBudget", "MemoryMeter", "find_budget"],
            "collectives": ["Alone", "Collective", "Distributed", "context_attention"],
            "compiling": ["Compilations", "compile_layers"],
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
            "runner": ["Runner", "run_step"],
            "scoring": ["Evaluation", "compute_log_probs", "sum_log_probs"],
            "step_loss": ["Loss"],
            "watch": ["Watch"],
        },
        extra="torch",
    )
