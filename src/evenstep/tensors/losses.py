"""Losses as functions of one sequence, vectorised over all slots of a batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from evenstep.errors import ConfigError
from evenstep.tensors.batch import IGNORE_INDEX
from evenstep.tensors.metrics import Metric
from evenstep.tensors.per_sequence import Outcome, PerSequence
from evenstep.tensors.view import View


def label_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """(n, vocabulary) logits and (n) labels -> (n) log-probs of the labels, in float32 or wider.

    It is 0 where the label is ignored. Slot i holds the log-prob of token i + 1;
    `restore_tokens(..., shifted=True)` moves it to slot i + 1.

    >>> label_log_probs(torch.zeros(2, 4), torch.tensor([3, -100])).exp().tolist()
    [0.25, 1.0]
    """
    return -functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        labels,
        reduction="none",
        ignore_index=IGNORE_INDEX,
    )


def _cross_entropy(logits: Tensor, view: View) -> Outcome:
    nll = -label_log_probs(logits, view.labels)
    weighted = nll * view.loss_weights
    counts = view.labels != IGNORE_INDEX
    return weighted, {
        "nll": Metric.mean(nll.sum(), counts.sum()),
        "loss_tokens": Metric.sum(counts.sum()),
    }


def cross_entropy() -> PerSequence:
    """The weighted sum of the negative log-likelihood of the labels.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> cross_entropy()(torch.zeros(1, 3, 4), batch).by_sequence.exp().tolist()
    [4.0, 1.0]
    """
    return PerSequence(_cross_entropy, vectorised=True)


def policy_gradient(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_weight: float = 0.0,
    ratio: Literal["token", "sequence"] = "token",
) -> PerSequence:
    """The weighted sum of the clipped policy-gradient loss of PPO and GRPO.

    Per token: -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), where r is the new over the
    old probability of the token or, with ratio="sequence", its geometric mean over the sequence
    (over each segment of a split sample). With `kl_weight`, kl_weight * (exp(d) - d - 1) is added,
    where d is the reference minus the new log-prob.

    Extras: `old_log_probs` per token, `advantages` per token or per sequence, and
    `reference_log_probs` per token if `kl_weight` is not 0. Entry i of these belongs to token i.

        result = run_step(step, model, policy_gradient(clip_high=0.28, kl_weight=0.01))
    """
    if ratio not in ("token", "sequence"):
        raise ConfigError(f"unknown ratio {ratio!r}; expected one of: token, sequence.")

    def loss(logits: Tensor, view: View) -> Outcome:
        labels, weights = view.labels, view.loss_weights
        counts = labels != IGNORE_INDEX
        log_probs = label_log_probs(logits, labels)
        # Slots without a label have a log-ratio of 0 and a ratio of 1, whatever their values.
        log_ratio = torch.where(counts, log_probs - view.ahead("old_log_probs"), 0.0)
        if ratio == "sequence":
            count = view.sum_by_segment(counts.to(log_ratio)).clamp(min=1)
            mean = view.sum_by_segment(log_ratio) / count
            log_ratio = torch.where(counts, mean[view.segment_ids], 0.0)
        change, advantage = log_ratio.exp(), view.ahead("advantages")
        clipped = change.clamp(1 - clip_low, 1 + clip_high)
        value = -torch.minimum(change * advantage, clipped * advantage)
        metrics = {
            "ratio": Metric.mean((change * counts).sum(), counts.sum()),
            "ratio_min": Metric.min(torch.where(counts, change, torch.inf)),
            "ratio_max": Metric.max(torch.where(counts, change, -torch.inf)),
            "clipped": Metric.mean(((change != clipped) & counts).sum(), counts.sum()),
        }
        if kl_weight:
            above = torch.where(counts, view.ahead("reference_log_probs") - log_probs, 0.0)
            divergence = above.exp() - above - 1
            value = value + kl_weight * divergence
            metrics["kl"] = Metric.mean(divergence.sum(), counts.sum())
        return torch.where(counts, value * weights, 0.0), metrics

    return PerSequence(loss, vectorised=True)
