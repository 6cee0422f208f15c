"""Losses: functions of one sequence, run on all sequences of a batch, and their metrics.

cross_entropy    negative log-likelihood of the labels
policy_gradient  PPO and GRPO
value_loss       the critic of PPO
distillation     divergence from a teacher's distribution
load_balancing   the auxiliary loss of mixture-of-experts routers

`preference` has the losses of pairs, `head` the scores that losses are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.core.text import one_of, whole_number
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, BatchShard, View
from evenstep.tensors.head import (
    Factors,
    Head,
    HeadOption,
    Scores,
    at_least_zero,
    compare,
    positive,
    scorer,
    wide,
)

Reduction: TypeAlias = Literal["sum", "mean", "min", "max"]

# How totals are merged, and the total of no values.
_MERGING: dict[Reduction, tuple[Callable[[Tensor, int], Tensor], float]] = {
    "sum": (torch.sum, 0.0),
    "mean": (torch.sum, 0.0),
    "min": (torch.amin, math.inf),
    "max": (torch.amax, -math.inf),
}


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A value and how it is merged over sequences, micro-batches and ranks.

    A mean stores the sum and the count, so merging means of unequal counts is exact. Values are
    float64 and detached.

    >>> first, second = Metric.mean(torch.tensor(6.0), 3), Metric.mean(torch.tensor(4.0), 1)
    >>> float(merge([{"loss": first}, {"loss": second}])["loss"].value)
    2.5
    """

    reduction: Reduction
    total: Tensor
    count: Tensor | None = None

    @classmethod
    def sum(cls, total: Tensor) -> Metric:
        """A sum."""
        return cls("sum", total.detach().double())

    @classmethod
    def mean(cls, total: Tensor, count: Tensor | float) -> Metric:
        """A mean: `total` over `count` (of tokens, sequences or weights)."""
        total = total.detach().double()
        return cls("mean", total, torch.as_tensor(count, device=total.device).detach().double())

    @classmethod
    def min(cls, values: Tensor) -> Metric:
        """The minimum of `values`; infinity if there are none."""
        return cls._of_all("min", values)

    @classmethod
    def max(cls, values: Tensor) -> Metric:
        """The maximum of `values`; minus infinity if there are none."""
        return cls._of_all("max", values)

    @classmethod
    def _of_all(cls, reduction: Reduction, values: Tensor) -> Metric:
        reduce, nothing = _MERGING[reduction]
        flat = values.detach().double().reshape(-1)
        return cls(reduction, reduce(torch.cat((flat, flat.new_full((1,), nothing))), 0))

    def emptied(self) -> Metric:
        """The same metric over no values: the neutral element of merging."""
        total = torch.full_like(self.total, _MERGING[self.reduction][1])
        count = None if self.count is None else torch.zeros_like(self.count)
        return Metric(self.reduction, total, count)

    @property
    def value(self) -> Tensor:
        """The reduced number; NaN for a mean over nothing."""
        return self.total if self.count is None else self.total / self.count


def merge(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of several sequences, micro-batches or ranks.

    Each name is merged over the mappings that contain it.
    """
    by_name: dict[str, list[Metric]] = {}
    for each in metrics:
        for name, metric in each.items():
            by_name.setdefault(name, []).append(metric)
    merged: dict[str, Metric] = {}
    for name, parts in by_name.items():
        ways = {metric.reduction for metric in parts}
        if len(ways) > 1:
            raise InputError(
                f"the metric {name!r} has several reductions: {', '.join(sorted(ways))}. Use one "
                f"reduction per name."
            )
        reduce, _ = _MERGING[parts[0].reduction]
        counts = [metric.count for metric in parts if metric.count is not None]
        merged[name] = Metric(
            parts[0].reduction,
            reduce(torch.stack([metric.total for metric in parts]), 0),
            torch.stack(counts).sum(0) if counts else None,
        )
    return merged


def select_output(outputs: Any, name: str, rows: int, width: int) -> Tensor:
    """The tensor (rows, width, ...) called `name` in a model's outputs.

    A tensor is returned as it is. Outputs with names (a mapping, or an object such as a
    transformers ModelOutput) are read by name. One tensor per layer, (rows, width, ...) or
    (rows * width, ...) each, becomes (rows, width, layers, ...).

    >>> select_output({"router_logits": (torch.zeros(6, 4),) * 3}, "router_logits", 2, 3).shape
    torch.Size([2, 3, 3, 4])
    """
    if isinstance(outputs, Tensor):
        return outputs
    layers = outputs
    if name == "logits" or not isinstance(outputs, tuple | list):
        named = isinstance(outputs, Mapping)
        layers = outputs.get(name) if named else getattr(outputs, name, None)
    if isinstance(layers, Tensor):
        return layers
    tensors = [layer for layer in layers or () if isinstance(layer, Tensor)]
    if not tensors:
        raise InputError(
            f"the model returned {type(outputs).__name__} without {name!r}. Let `forward` return "
            f"the tensor, or an object that has it as {name!r}."
        )
    device = tensors[0].device
    shaped = [
        layer.to(device).unflatten(0, (rows, width)) if layer.ndim == 2 else layer.to(device)
        for layer in tensors
    ]
    return torch.stack(shaped, dim=2)


Outcome: TypeAlias = Tensor | tuple[Tensor, Mapping[str, Metric]]
"""A scalar sum or values per slot (n), optionally with metrics."""
SequenceFunction: TypeAlias = Callable[[Tensor, View], Outcome]
"""(outputs (n, ...) of one sequence, a view of it) -> outcome."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """The summed loss and the metrics of a batch; the loss is not normalized.

    For a `BatchShard`, only `loss` and `metrics` are available.

        sums = cross_entropy()(logits, batch)
        sums.loss.backward()
    """

    loss: Tensor
    metrics: dict[str, Metric]
    by_tile: Tensor | None  # per tile, or per segment if `real` is None
    real: Tensor | None = None  # per tile, whether it is a segment
    by_slot: Tensor | None = None  # (rows * width), if the function returns values per slot

    @property
    def by_sequence(self) -> Tensor:
        """(segments): the loss of each segment, as `restore_sequences` takes it."""
        if self.by_tile is None:
            raise InputError(
                "these sums were computed on a batch shard, which does not hold whole sequences. "
                "Join the outputs of all ranks first."
            )
        return self.by_tile if self.real is None else self.by_tile[self.real]


@dataclass(frozen=True, slots=True)
class PerSequence:
    """Runs a function of one sequence on every sequence of a batch and sums the results.

    By default the function runs once per segment and receives its real tokens only. With
    `vectorised`, it runs once on all slots. Then it must return one value per slot that depends
    only on that slot (or, through `sum_by_segment`, on its segment), 0 where the weight is 0, and
    its metrics must leave out slots of weight 0. Both ways give the same sums.

    If the model returns several outputs by name (a mapping, a transformers ModelOutput), the
    function gets the one called `output`. With unit="pair", the slots of two sequences hold the
    value of their pair; such a function cannot be looped and needs a normalization that gives
    sequences or groups equal weights.

    The loss of an empty micro-batch is 0. Its metrics are empty but have the same names as on
    other ranks, so the function must accept a sequence without loss tokens.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=8)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> loss_tokens = PerSequence(lambda outputs, sequence: sequence.loss_weights.sum())
    >>> loss_tokens(torch.zeros(1, 5, 10), batch).by_sequence.tolist()
    [2.0, 1.0]
    """

    function: SequenceFunction
    vectorised: bool = False
    output: str = "logits"
    unit: Literal["token", "pair"] = "token"
    scores_slots: bool = False
    """Of vectorised functions that read outputs by `scores_of` only: where samples share a prefix,
    they get the outputs of the batch's slots. Others get those of each sample."""
    takes_hidden: bool = False
    """Whether outputs may be hidden states, with `View.head`."""
    head: Head | Literal["model"] | None = None
    """Of models that return hidden states, or "model": a runner must use the model's own. None: a
    runner uses it if it can. Without a runner, outputs are logits in both cases."""

    def __call__(self, outputs: Any, batch: Batch | BatchShard, head: Head | None = None) -> Sums:
        """Sums over `batch` from the model's (rows, width, ...) outputs; with `head`, these are
        hidden states."""
        outputs = select_output(outputs, self.output, batch.rows, batch.width)
        head = self.head if isinstance(self.head, Head) else head
        if tuple(outputs.shape[:2]) != (batch.rows, batch.width):
            raise InputError(
                f"outputs have shape {tuple(outputs.shape)}, but the batch has {batch.rows} rows "
                f"of width {batch.width}. Pass the model's outputs for this batch, "
                f"(rows, width, ...)."
            )
        if self.vectorised:
            return self._at_once(outputs, batch, head)
        if isinstance(batch, BatchShard):
            raise InputError(
                "a function of whole sequences cannot run on a batch shard. Join the outputs of "
                "all ranks first, or set vectorised=True if each value depends on one token only."
            )
        if batch.exchange is not None:  # on all ranks of the wave, which would wait for each other
            raise InputError(
                "ranks share a sample in this wave, so a function of one whole sequence cannot "
                "run. Set vectorised=True and sum with view.sum_by_segment, or plan without "
                "sharing."
            )
        return self._one_by_one(outputs, batch, head)

    def looped(self) -> PerSequence:
        """The same function, run on one sequence at a time."""
        return replace(self, vectorised=False)

    def _at_once(self, outputs: Tensor, batch: Batch | BatchShard, head: Head | None) -> Sums:
        tree = batch.tree
        view = replace(View.of_all(batch if tree is None else tree.samples), head=head)
        if tree is not None and self.scores_slots:
            assert isinstance(batch, Batch)
            view = replace(view, shared=batch)
        elif tree is not None:
            outputs = tree.of_samples(outputs)
        values, metrics = self._outcome(outputs.flatten(0, 1), view)
        if tuple(values.shape) != tuple(view.labels.shape):
            raise InputError(
                f"a vectorised function returned shape {tuple(values.shape)} for "
                f"{len(view.labels)} slots. Return one value per slot, or set vectorised=False."
            )
        if isinstance(batch, BatchShard):
            return Sums(values.sum(), metrics, None)
        by_tile, real = view.sum_here(values), view.source.sample_ids >= 0
        return Sums(values.sum(), metrics, by_tile, real, values.detach())

    def _one_by_one(self, outputs: Tensor, batch: Batch, head: Head | None) -> Sums:
        if batch.tree is not None:
            outputs, batch = batch.tree.of_samples(outputs), batch.tree.samples
        flat = outputs.flatten(0, 1)
        views = [replace(view, head=head) for view in View.of_segments(batch)]
        outcomes = [self._outcome(flat[view.slots], view) for view in views]
        values, metrics = [value for value, _ in outcomes], [each for _, each in outcomes]
        if not views:
            # Ranks that reduce metrics need the same names: the function runs on the padding of
            # the empty micro-batch, and its values are discarded.
            padding = View(batch, slice(0, int(batch.cu_seqlens[1])), 0, head=head)
            with torch.no_grad():
                _, measured = self._outcome(flat[padding.slots], padding)
            metrics = [{name: metric.emptied() for name, metric in measured.items()}]
        # The empty slice keeps the outputs in the graph: an empty micro-batch has a backward too.
        by_sequence = torch.stack([outputs[:0].sum(), *(value.sum() for value in values)])[1:]
        by_slot = None
        sizes = [(view.slots.stop - view.slots.start,) for view in views]
        if [tuple(value.shape) for value in values] == sizes:
            by_slot = by_sequence.new_zeros(len(flat))
            for value, view in zip(values, views, strict=True):
                by_slot[view.slots] = value.detach()
        return Sums(by_sequence.sum(), merge(metrics), by_sequence, by_slot=by_slot)

    def _outcome(self, outputs: Tensor, view: View) -> tuple[Tensor, dict[str, Metric]]:
        outcome = self.function(outputs, view)
        values, metrics = (outcome, {}) if isinstance(outcome, Tensor) else outcome
        return wide(values), dict(metrics)  # so that 16-bit sums are not rounded


# Losses of single tokens -----------------------------------------------------------------------

Formulated: TypeAlias = tuple[Tensor, dict[str, Any]]
"""A weighted loss, and metrics (or a `Metric`), per slot; 0 where there is no label."""


def _per_token(
    formula: Callable[[Tensor, View, Tensor, Tensor], Formulated], **options: Any
) -> PerSequence:
    """The sum of `formula(outputs, view, labels, whether slots have a label)`.

    Its metrics are means over loss tokens. `options` are those of `PerSequence`.
    """

    def loss(outputs: Tensor, view: View) -> Outcome:
        labels = view.labels
        counts = labels != IGNORE_INDEX
        value, metrics = formula(outputs, view, labels, counts)
        total = counts.sum()
        return value, {
            name: each if isinstance(each, Metric) else Metric.mean(each.detach().sum(), total)
            for name, each in metrics.items()
        }

    return PerSequence(loss, vectorised=True, **options)


def scores_of(
    score: Callable[..., Scores],
    outputs: Tensor,
    view: View,
    labels: Tensor,
    factors: Factors | None = None,
) -> Scores:
    """The scores of labels of a view. A slot that samples share is scored once, then its scores
    are those of each sample, so that its gradient is the sum of theirs."""
    if view.shared is None or view.shared.tree is None:
        return score(outputs, labels, head=view.head, factors=factors)
    scores = score(outputs, view.shared.labels.flatten(), head=view.head)
    slots, counts = view.shared.tree.slots, labels != IGNORE_INDEX
    fields = (scores.log_probs, scores.entropy, scores.mean_log_probs, scores.log_normalizer)
    log_probs, entropy, mean, normalizer = (
        torch.where(counts, each.index_select(0, slots), 0.0) for each in fields
    )
    return Scores(log_probs, entropy, mean, normalizer, scores.dtype)


def _extra(view: View, counts: Tensor, name: str) -> Tensor:
    """An extra at the slots that predict its tokens, 0 where there is no label; in float32 or
    wider, because differences of 16-bit log-probs would be rounded."""
    values = view.ahead(name)
    if values.ndim > 1:
        raise InputError(
            f"the extra {name!r} has entries of shape {tuple(values.shape[1:])}; expected one "
            f"number per token or per sequence. Remove the dimensions of size 1."
        )
    return torch.where(counts, wide(values), 0.0)


def cross_entropy(
    *,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    head: HeadOption = None,
) -> PerSequence:
    """The weighted sum of the negative log-likelihood of the labels.

    Per token: -(1 - e) log p(label) - e * mean of log p over the vocabulary + z * logsumexp², where
    e is `label_smoothing` and z is `z_loss`. Logits are divided by `temperature` first. The metric
    `nll` is -log p(label).

    A runner computes the loss from the hidden states before the model's last layer, a part of the
    logits at a time, if it finds that layer and logits are large. head="model" says that it must;
    with a `Head`, the model returns hidden states.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> import torch
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> cross_entropy()(torch.zeros(1, 3, 4), batch).by_sequence.exp().tolist()
    [4.0, 1.0]
    """
    at_least_zero("label_smoothing", label_smoothing, below=1)
    at_least_zero("z_loss", z_loss)
    score = scorer(temperature, mean_log_probs=label_smoothing > 0, log_normalizer=z_loss > 0)

    def formula(outputs: Tensor, view: View, labels: Tensor, counts: Tensor) -> Formulated:
        weights = view.loss_weights
        factors = Factors(weights, log_prob=label_smoothing - 1, mean=-label_smoothing)
        scores = scores_of(score, outputs, view, labels, None if z_loss else factors)
        value = scores.times(factors)
        tokens = Metric.sum(counts.sum())
        metrics: dict[str, Any] = {"nll": -scores.log_probs.detach(), "loss_tokens": tokens}
        if z_loss:
            metrics["z_loss"] = z_loss * scores.log_normalizer.square()
            value = value + metrics["z_loss"] * weights
        return value, metrics

    return _per_token(formula, scores_slots=True, takes_hidden=True, head=Head.of(head))


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
    head: HeadOption = None,
) -> PerSequence:
    """The weighted sum of the clipped policy-gradient loss of PPO and GRPO.

    Per token: -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), where r is the new over the
    old probability of the token or, with ratio="sequence", its geometric mean over the sequence,
    which must not be split. Beyond ±20 (±10 for float16), log r is clamped and has no gradient.

    dual_clip       c > 1: where A < 0, the loss of a token is at most -c * A
    importance_cap  C: each token is multiplied by min(old / rollout probability, C), a constant
                    (truncated importance sampling)
    kl_weight       adds kl_weight * (exp(d) - d - 1), where d is the reference minus the new
                    log-prob, clamped as above; `kl_estimator` k1 adds -d and k2 adds d² / 2 instead
    entropy_weight  subtracts entropy_weight * entropy; 0 computes the metric only
    temperature     divides the logits, as when the tokens were sampled
    head            as in `cross_entropy`

    Extras: `old_log_probs` per token, `advantages` per token or per sequence,
    `reference_log_probs` per token if `kl_weight` is not 0, and `rollout_log_probs` per token with
    `importance_cap`. Entry i of these belongs to token i.

        result = run_step(step, model, policy_gradient(clip_high=0.28, kl_weight=0.01))
    """
    _check_policy(ratio, kl_estimator, clip_low, clip_high, dual_clip, importance_cap)
    score = scorer(temperature, entropy=entropy_weight is not None)

    def formula(outputs: Tensor, view: View, labels: Tensor, counts: Tensor) -> Formulated:
        scores = scores_of(score, outputs, view, labels)
        new, old = scores.log_probs, _extra(view, counts, "old_log_probs")
        bound = MOST_LOG_RATIO_HALF if scores.dtype == torch.float16 else MOST_LOG_RATIO
        rise = new - old if ratio == "token" else _sequence_mean(new - old, view, counts)
        change = rise.clamp(-bound, bound).exp()
        value, metrics = _clipped(change, view, counts, clip_low, clip_high, dual_clip)
        metrics["approx_kl"] = (old - new).clamp(-bound, bound)
        if importance_cap is not None:  # tokens were sampled by the rollout's probabilities
            below = old - _extra(view, counts, "rollout_log_probs")
            weight = below.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp() * counts
            value = value * weight.clamp(max=importance_cap)
            metrics |= {"importance": weight, "truncated": weight > importance_cap}
        if kl_weight:
            above = _extra(view, counts, "reference_log_probs") - new
            metrics["kl"] = _KL[kl_estimator](above.clamp(-bound, bound))
            value = value + kl_weight * metrics["kl"]
        if entropy_weight is not None:
            metrics["entropy"] = scores.entropy
            value = value - entropy_weight * scores.entropy
        return value * view.loss_weights, metrics

    return _per_token(formula, scores_slots=True, takes_hidden=True, head=Head.of(head))


def _check_policy(
    ratio: Ratio, kl_estimator: KlEstimator, low: float, high: float, dual: float | None,
    cap: float | None,
) -> None:  # fmt: skip
    one_of("ratio", ratio, Ratio)
    one_of("kl_estimator", kl_estimator, KlEstimator)
    positive("importance_cap", cap)
    at_least_zero("clip_low", low)
    at_least_zero("clip_high", high)
    if dual is not None and not dual > 1:
        raise ConfigError(f"dual_clip must be greater than 1, got {dual}.")


def _sequence_mean(values: Tensor, view: View, counts: Tensor) -> Tensor:
    """The mean of the loss tokens of its sequence, at each of them."""
    number = view.sum_by_segment(counts.to(values)).clamp(min=1)
    view.check_whole_samples()
    return torch.where(counts, (view.sum_by_segment(values) / number)[view.segment_ids], 0.0)


def _clipped(
    change: Tensor, view: View, counts: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, dict[str, Any]]:
    """The loss per token and its metrics; `change`: new over old probability."""
    advantage = _extra(view, counts, "advantages")
    clipped = change.clamp(1 - low, 1 + high)
    value = -torch.minimum(change * advantage, clipped * advantage)
    metrics: dict[str, Any] = {
        "ratio": change * counts,
        "ratio_min": Metric.min(torch.where(counts, change, torch.inf)),
        "ratio_max": Metric.max(torch.where(counts, change, -torch.inf)),
        "clipped": change != clipped,
    }
    if dual is not None:
        most = -dual * advantage
        metrics["dual_clipped"] = above = (advantage < 0) & (value > most)
        value = torch.where(above, most, value)
    return value, metrics


def value_loss(*, clip: float | None = 0.2) -> PerSequence:
    """The weighted sum of the squared error of a critic.

    Per token: max((v - R)², (clip(v, o - clip, o + clip) - R)²) / 2, where v is the new value, o
    the old one and R the return; (v - R)² / 2 if `clip` is None. The output of a slot is the value
    before its next token, so the value of token i, as a sample holds it, is predicted one slot
    earlier, as a log-prob is.

    The model returns one number per token, (rows, width) or (rows, width, 1). Extras, per token:
    `returns` and, with `clip`, `old_values`. Entry i of these belongs to token i.

        losses = {"value": Loss(function=value_loss(), weight=0.5)}
    """
    positive("clip", clip)

    def formula(outputs: Tensor, view: View, _: Tensor, counts: Tensor) -> Formulated:
        value = torch.where(counts, scalars(outputs), 0.0)
        target = _extra(view, counts, "returns")
        error = (value - target).square()
        metrics: dict[str, Any] = {"value": value, "value_error": error}
        if clip is not None:
            old = _extra(view, counts, "old_values")
            near = value.clamp(old - clip, old + clip)
            far = (near - target).square()
            metrics["clipped"] = far > error
            error = torch.maximum(error, far)
        return error / 2 * view.loss_weights, metrics

    return _per_token(formula)


def scalars(outputs: Tensor) -> Tensor:
    """(n) or (n, 1) outputs -> (n), in float32 or wider."""
    if outputs.ndim > 2 or (outputs.ndim == 2 and outputs.shape[1] != 1):
        raise InputError(
            f"the model returned {tuple(outputs.shape[1:])} numbers per token; expected one. Use a "
            f"model with a scalar head, such as one for token classification with one label."
        )
    return wide(outputs.reshape(len(outputs)))


Divergence: TypeAlias = Literal["forward_kl", "reverse_kl", "jsd"]
Rest: TypeAlias = Literal["bucket", "renormalize"]


def distillation(
    *,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    rest: Rest = "bucket",
    teacher: Callable[[Any], Any] | None = None,
    head: HeadOption = None,
) -> PerSequence:
    """The weighted sum of the divergence between a teacher's and the model's distribution.

    Per loss token, with t for the teacher's and s for the model's distribution:

    forward_kl  KL(t, s) = sum of t log(t / s)
    reverse_kl  KL(s, t)
    jsd         beta KL(t, m) + (1 - beta) KL(s, m), where m = beta t + (1 - beta) s

    `temperature` divides the logits of both; the loss is not multiplied by its square. `head` is
    that of `cross_entropy`: distributions are compared a few tokens at a time.

    The teacher's distribution is one of:

    teacher            a function of the batch that returns logits, called without gradients
    teacher_logits     a token-aligned extra, Extra(aligned="token", shape=(vocabulary,)): what a
                       model returns for the sample. As in its output, entry i predicts token i + 1
    teacher_log_probs  a token-aligned extra of the k most likely tokens, computed at `temperature`,
                       with their ids in the extra `teacher_ids` (dtype=torch.int64). As in all
                       extras of log-probs, entry i is of token i given the tokens before it. All
                       other tokens are one bucket, or rest="renormalize" leaves them out of both

        loss = distillation(divergence="jsd", teacher=lambda batch: teacher_model(batch))
    """
    one_of("divergence", divergence, Divergence)
    one_of("rest", rest, Rest)
    positive("temperature", temperature)
    if not 0 < beta < 1:
        raise ConfigError(
            f"beta must be between 0 and 1, got {beta}. For the limits use forward_kl (0) or "
            f"reverse_kl (1)."
        )

    def formula(outputs: Tensor, view: View, labels: Tensor, counts: Tensor) -> Formulated:
        top, logits = None, _teacher_logits(teacher, view)
        if logits is None:
            top = _top(view, counts)

        def divergence_of(student: Tensor, slots: Tensor) -> Tensor:
            if top is not None:
                known, student = _at_top(top[0][slots], top[1][slots], student, rest)
            else:
                assert logits is not None
                known = _teacher_log_probs(logits[slots], student, temperature)
            return _divergence(known, student, divergence, beta)

        options = {"head": view.head, "temperature": temperature}
        value, weighted = compare(outputs, labels, view.loss_weights, divergence_of, **options)
        return weighted, {divergence: value}

    return _per_token(formula, takes_hidden=True, head=Head.of(head))


def _divergence(t: Tensor, s: Tensor, which: Divergence, beta: float) -> Tensor:
    if which == "forward_kl":
        return _kl(t, s)
    if which == "reverse_kl":
        return _kl(s, t)
    absent = (t == -torch.inf) & (s == -torch.inf)
    parts = t.masked_fill(absent, 0.0) + math.log(beta), s.masked_fill(absent, 0.0)
    mixed = torch.logaddexp(parts[0], parts[1] + math.log(1 - beta))
    return beta * _kl(t, mixed) + (1 - beta) * _kl(s, mixed)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Log-probs (n, k) each -> (n); a probability of 0 in the first adds 0."""
    ratio = torch.where(first == -torch.inf, 0.0, first - second)
    return (first.exp() * ratio).sum(-1)


def _teacher_logits(teacher: Callable[[Any], Any] | None, view: View) -> Tensor | None:
    """(n, vocabulary): of the teacher itself, else of the extra 'teacher_logits', else None."""
    batch = view.source
    if teacher is not None:
        with torch.no_grad():
            outputs = select_output(teacher(batch), "logits", batch.rows, batch.width)
        return view.flat(outputs)
    if "teacher_logits" not in batch.aligned:
        return None
    if batch.aligned["teacher_logits"] == "token":
        return view.extra("teacher_logits")
    raise InputError(
        "'teacher_logits' must be a token-aligned extra: like the model's logits, they are "
        "those of the slot that predicts a token. Do not shift them with at_labels()."
    )


def _teacher_log_probs(logits: Tensor, student: Tensor, temperature: float) -> Tensor:
    if logits.shape[-1] != student.shape[-1]:
        raise InputError(
            f"the teacher has {logits.shape[-1]} logits per token and the model "
            f"{student.shape[-1]}. Use a teacher with the same vocabulary."
        )
    return (wide(logits) / temperature).log_softmax(-1)


def _top(view: View, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(n, k) each: log-probs of the teacher's k tokens, and their ids."""
    missing = {"teacher_log_probs", "teacher_ids"} - view.source.aligned.keys()
    if missing:
        raise InputError(
            f"distillation needs teacher=, the extra 'teacher_logits', or 'teacher_log_probs' and "
            f"'teacher_ids'; the batch has no {min(missing)!r}. Declare it in Collator(extras=...)."
        )
    known, ids = view.ahead("teacher_log_probs"), view.ahead("teacher_ids")
    if ids.is_floating_point() or ids.shape != known.shape or ids.ndim != 2:
        raise InputError(
            f"'teacher_ids' is {ids.dtype} of shape {tuple(ids.shape)} and 'teacher_log_probs' has "
            f"shape {tuple(known.shape)}; expected k integers and k log-probs per token. Declare "
            f"both with shape=(k,), and the ids with dtype=torch.int64."
        )
    return wide(known), torch.where(counts[:, None], ids, 0).long()


def _at_top(known: Tensor, ids: Tensor, student: Tensor, rest: Rest) -> tuple[Tensor, Tensor]:
    """Log-probs of the teacher's k tokens and of the rest, of the teacher and of the model."""
    chosen = student.gather(-1, ids)
    if rest == "renormalize":
        return known.log_softmax(-1), chosen.log_softmax(-1)
    if ids.shape[-1] == student.shape[-1]:
        return known, chosen
    least = torch.finfo(known.dtype).eps  # rounding of a sum that should be at most 1
    left = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=least).log()
    others = student.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((known, left), -1), torch.cat((chosen, others), -1)


Over: TypeAlias = Literal["step", "sequence"]
Layers: TypeAlias = Literal["each", "joint"]
Frequencies: TypeAlias = Tensor | Callable[[], Tensor]

OUTPUT = "router_logits"


# For one layer with E experts, on a set of tokens with weights w that sum to W:
#
#     loss = E * sum over experts e of f_e * P_e
#     f_e = share of the choices that fell on e      (no gradient)
#     P_e = sum of w * p_e / W                       (p: the router's probabilities)
#
# A product of two means is not a sum over micro-batches: computed per micro-batch, it would depend
# on the plan. But the gradient flows through P_e alone, which is a sum over tokens. So the loss is
# exact if f_e is known before the step, or if the set of tokens is one sequence, which is never
# divided.


def load_balancing(
    *,
    top_k: int,
    over: Over,
    frequencies: Frequencies | None = None,
    layers: Layers = "each",
) -> PerSequence:
    """The weighted sum of the load-balancing loss; 1 if all experts are used evenly.

    over="step"      f_e and P_e are means over all tokens of the step, on all ranks. Pass f_e as
                     `frequencies`, (layers, experts) or (experts), rows of which sum to 1, or a
                     function that returns it: of this step (`expert_frequencies`, which needs
                     another forward pass), or of an earlier step, which is a different loss
    over="sequence"  the loss of each sequence on its own tokens; no frequencies. A split sample is
                     an error

    Per layer, it is E * sum over experts of f_e * P_e. The set of tokens is that of the
    normalization: `AllTokens` for every real token, `TokenMean` for loss tokens; `SequenceMean`
    gives each sequence the same weight. Padding never counts. layers="each" is the mean of the
    layers' losses; "joint" takes f_e and P_e over all layers (Hugging Face's definition, which is
    `top_k` times this one).

    The model returns `router_logits`: (rows, width, layers, experts), or one tensor per layer. The
    chosen experts are the `top_k` greatest logits.

        balance = Loss(function=load_balancing(top_k=2, over="sequence"), weight=0.01)
        runner = Runner(model=model, loss={"nll": Loss(function=cross_entropy()), "aux": balance})
    """
    whole_number("top_k", top_k)
    one_of("over", over, Over)
    one_of("layers", layers, Layers)
    if (over == "step") is (frequencies is None):
        raise ConfigError(
            "over='step' needs frequencies=, since a micro-batch does not hold the step. Compute "
            "them with expert_frequencies, or use over='sequence'."
            if over == "step"
            else "over='sequence' takes no frequencies. Remove them, or use over='step'."
        )

    def loss(router_logits: Tensor, view: View) -> Outcome:
        logits, weights = _checked(router_logits, top_k), view.loss_weights
        probabilities = logits.softmax(-1)
        known = _frequencies(logits, view, top_k, frequencies)
        if layers == "joint":
            known, probabilities = known.mean(-2), probabilities.mean(-2)
        value = (known * probabilities).sum(-1) * logits.shape[-1]
        value = value if layers == "joint" else value.mean(-1)
        value = torch.where(weights != 0, value * weights, 0.0)
        return value, {"load_balancing": Metric.mean(value.sum(), weights.sum())}

    return PerSequence(loss, vectorised=True, output=OUTPUT)


def count_experts(
    router_logits: object, batch: Batch | BatchShard, top_k: int
) -> tuple[Tensor, Tensor]:
    """How often each expert is chosen in a batch, (layers, experts), and the number of choices.

    Tokens count by `batch.loss_weights`. Sum both over micro-batches and ranks and divide: these
    are the `frequencies` of `load_balancing`.

        counts, choices = count_experts(outputs.router_logits, weighted(batch, AllTokens()), 2)
    """
    outputs = select_output(router_logits, OUTPUT, batch.rows, batch.width)
    if batch.tree is not None:  # a slot counts for each of its samples
        outputs, batch = batch.tree.of_samples(outputs), batch.tree.samples
    logits = _checked(outputs.flatten(0, 1), top_k)
    weights = batch.loss_weights.flatten().double()
    chosen = torch.where(weights[:, None, None] != 0, _chosen(logits, top_k), 0.0)
    counts = (chosen * weights[:, None, None]).sum(0)
    return counts, weights.sum() * top_k


def _chosen(logits: Tensor, top_k: int) -> Tensor:
    """(n, layers, experts): 1 for each chosen expert."""
    best = logits.detach().topk(top_k, dim=-1).indices
    return torch.zeros_like(logits).scatter_(-1, best, 1.0).detach()


def _checked(outputs: Tensor, top_k: int) -> Tensor:
    """(n, layers, experts) logits in float32 or wider."""
    if outputs.ndim != 3 or outputs.shape[-1] < top_k:
        raise InputError(
            f"the router logits have shape {tuple(outputs.shape[1:])} per token; expected (layers, "
            f"experts) with at least top_k={top_k} experts. Let `forward` return a mapping with "
            f"`router_logits`, for Hugging Face dict(model(..., output_router_logits=True))."
        )
    return wide(outputs)


def _frequencies(logits: Tensor, view: View, top_k: int, known: Frequencies | None) -> Tensor:
    """f_e of the step, (layers, experts), or of the sequence of each slot, (n, layers, experts)."""
    if known is None:
        view.check_whole_samples()
        weights = view.loss_weights[:, None, None]
        counts = view.sum_by_segment(_chosen(logits, top_k) * weights)
        total = view.sum_by_segment(weights) * top_k
        return (counts / torch.where(total > 0, total, 1.0))[view.segment_ids]
    frequencies = known() if callable(known) else known
    layers, experts = logits.shape[1:]
    if tuple(frequencies.shape) not in ((experts,), (layers, experts)):
        raise InputError(
            f"frequencies have shape {tuple(frequencies.shape)}, but the model has {layers} layers "
            f"of {experts} experts. Pass ({layers}, {experts}) or ({experts},)."
        )
    return frequencies.detach().to(logits).expand(layers, experts)
