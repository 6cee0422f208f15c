"""policy_gradient: the clipped loss of PPO and GRPO, with what RL systems add to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from evenstep.core.text import one_of
from evenstep.errors import ConfigError
from evenstep.tensors.batch import IGNORE_INDEX
from evenstep.tensors.losses.head import Head, Wanted
from evenstep.tensors.losses.options import at_least, positive
from evenstep.tensors.losses.scores import Scores, score
from evenstep.tensors.metrics import Metric
from evenstep.tensors.per_sequence import Outcome, PerSequence
from evenstep.tensors.view import View

Ratio: TypeAlias = Literal["token", "sequence"]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]

MOST_LOG_RATIO = 20.0
MOST_LOG_RATIO_HALF = 10.0
"""For float16 outputs: exp(10) times an advantage still fits a float16 gradient."""

# Estimators of KL(policy, reference) from d = reference minus policy log-prob of a sampled token.
_KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - d - 1,
}


def policy_gradient(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    importance_cap: float | None = None,
    kl_weight: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    entropy_weight: float | None = None,
    temperature: float = 1.0,
    ratio: Ratio = "token",
    head: Head | nn.Linear | Tensor | None = None,
) -> PerSequence:
    """The weighted sum of the clipped policy-gradient loss of PPO and GRPO.

    Per token: -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), where r is the new over the
    old probability of the token or, with ratio="sequence", its geometric mean over the sequence,
    which must not be split. The log of r is clamped to [-20, 20], to [-10, 10] for float16 outputs;
    beyond, the gradient is 0.

    dual_clip       c > 1: where A < 0, the loss of a token is at most -c * A
    importance_cap  C: each token is multiplied by min(old / rollout probability, C), a constant
                    (truncated importance sampling)
    kl_weight       adds kl_weight * (exp(d) - d - 1), where d is the reference minus the new
                    log-prob, clamped as above; `kl_estimator` k1 adds -d and k2 adds d² / 2 instead
    entropy_weight  subtracts entropy_weight * entropy; 0 computes the metric only
    temperature     divides the logits, as when the tokens were sampled
    head            the model returns hidden states; see `Head`

    Extras: `old_log_probs` per token, `advantages` per token or per sequence,
    `reference_log_probs` per token if `kl_weight` is not 0, and `rollout_log_probs` per token with
    `importance_cap`. Entry i of these belongs to token i.

        result = run_step(step, model, policy_gradient(clip_high=0.28, kl_weight=0.01))
    """
    one_of("ratio", ratio, Ratio)
    one_of("kl_estimator", kl_estimator, KlEstimator)
    positive("temperature", temperature)
    for name, bound in (("clip_low", clip_low), ("clip_high", clip_high)):
        at_least(name, bound, 0)
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip must be greater than 1, got {dual_clip}.")
    if importance_cap is not None:
        positive("importance_cap", importance_cap)
    last = Head.of(head)
    wanted: Wanted = frozenset() if entropy_weight is None else frozenset({"entropy"})

    def loss(outputs: Tensor, view: View) -> Outcome:
        labels = view.labels
        found = score(outputs, labels, head=last, temperature=temperature, wanted=wanted)
        tokens = _Tokens.of(outputs, view, found)
        change = tokens.ratio(ratio)
        value, metrics = _clipped(change, tokens, clip_low, clip_high, dual_clip)
        if importance_cap is not None:
            value, more = _corrected(value, tokens, importance_cap)
            metrics |= more
        if kl_weight:
            divergence = _KL[kl_estimator](tokens.above("reference_log_probs"))
            value = value + kl_weight * divergence
            metrics["kl"] = tokens.mean(divergence)
        if entropy_weight is not None:
            value = value - entropy_weight * found.entropy
            metrics["entropy"] = tokens.mean(found.entropy)
        return torch.where(tokens.counts, value * view.loss_weights, 0.0), metrics

    return PerSequence(loss, vectorised=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The slots of a view with their log-probs; slots without a label have neutral values."""

    view: View
    counts: Tensor  # (n) bool: has a label
    log_probs: Tensor
    bound: float

    @classmethod
    def of(cls, outputs: Tensor, view: View, found: Scores) -> _Tokens:
        half = outputs.dtype == torch.float16
        bound = MOST_LOG_RATIO_HALF if half else MOST_LOG_RATIO
        return cls(view, view.labels != IGNORE_INDEX, found.log_probs, bound)

    def extra(self, name: str) -> Tensor:
        """An extra at the slots that predict its tokens, 0 where there is no label."""
        return torch.where(self.counts, self.view.ahead(name), 0.0)

    def above(self, name: str) -> Tensor:
        """The log-probs `name` minus the new ones, clamped."""
        return (self.extra(name) - self.log_probs).clamp(-self.bound, self.bound)

    def ratio(self, way: Ratio) -> Tensor:
        """New over old probability of each token, or its geometric mean over the sequence."""
        change = self.log_probs - self.extra("old_log_probs")
        if way == "sequence":
            count = self.view.sum_by_segment(self.counts.to(change)).clamp(min=1)
            self.view.check_whole_samples()
            mean = self.view.sum_by_segment(change) / count
            change = torch.where(self.counts, mean[self.view.segment_ids], 0.0)
        return change.clamp(-self.bound, self.bound).exp()

    def mean(self, values: Tensor) -> Metric:
        """The mean over loss tokens."""
        return Metric.mean((values * self.counts).sum(), self.counts.sum())


def _clipped(
    change: Tensor, tokens: _Tokens, low: float, high: float, dual: float | None
) -> tuple[Tensor, dict[str, Metric]]:
    counts, advantage = tokens.counts, tokens.extra("advantages")
    clipped = change.clamp(1 - low, 1 + high)
    value = -torch.minimum(change * advantage, clipped * advantage)
    old = tokens.extra("old_log_probs")
    metrics = {
        "ratio": tokens.mean(change),
        "ratio_min": Metric.min(torch.where(counts, change, torch.inf)),
        "ratio_max": Metric.max(torch.where(counts, change, -torch.inf)),
        "clipped": tokens.mean(change != clipped),
        "approx_kl": tokens.mean((old - tokens.log_probs).clamp(-tokens.bound, tokens.bound)),
    }
    if dual is not None:
        most = -dual * advantage
        above = (advantage < 0) & (value > most)
        value = torch.where(above, most, value)
        metrics["dual_clipped"] = tokens.mean(above)
    return value, metrics


def _corrected(value: Tensor, tokens: _Tokens, cap: float) -> tuple[Tensor, dict[str, Metric]]:
    """Tokens were sampled by the rollout's probabilities, not by the old ones."""
    change = tokens.extra("old_log_probs") - tokens.extra("rollout_log_probs")
    weight = change.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
    return value * weight.clamp(max=cap), {
        "importance": tokens.mean(weight),
        "truncated": tokens.mean(weight > cap),
    }
