"""Losses of one sequence that also run on all of a batch's slots at once."""

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
    """(n, vocabulary) logits and (n) labels -> (n) log-probs, 0 where none is counts; in float32
    at least.

    Slot i holds the log-prob of token i + 1; `restore_tokens(..., shifted=True)` moves it there.
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
    """Weighted negative log-likelihood of the labels, summed."""
    return PerSequence(_cross_entropy, vectorised=True)


def policy_gradient(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_weight: float = 0.0,
    ratio: Literal["token", "sequence"] = "token",
) -> PerSequence:
    """The clipped policy-gradient loss of PPO and GRPO, weighted and summed.

    -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) per token, with r the new probability
    over the old one: of the token, or the geometric mean over its sequence (over each tile of a
    split one, as the others may run elsewhere). Extras:
    `old_log_probs` per token; `advantages` per token or per sequence; and, where `kl_weight` is
    not 0, `reference_log_probs` per token, towards which the estimate exp(d) - d - 1 pulls.
    Values per token are the caller's: position i holds token i's.
    """
    if ratio not in ("token", "sequence"):
        raise ConfigError(
            f"ratio is {ratio!r}, so nobody knows what to clip. Choose token or sequence."
        )

    def loss(logits: Tensor, view: View) -> Outcome:
        labels, weights = view.labels, view.loss_weights
        counts = labels != IGNORE_INDEX
        log_probs = label_log_probs(logits, labels)
        # Whatever stands in padding or at a segment's end, its log-ratio is 0 and its ratio 1.
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
