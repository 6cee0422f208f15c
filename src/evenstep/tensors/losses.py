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
from torch import Tensor, nn

from evenstep.core.text import one_of, whole_number
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, BatchShard, View
from evenstep.tensors.head import Head, Wanted, at_least, positive, score, share

Reduction: TypeAlias = Literal["sum", "mean", "min", "max"]


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
        return cls("min", _extreme(values, "min"))

    @classmethod
    def max(cls, values: Tensor) -> Metric:
        """The maximum of `values`; minus infinity if there are none."""
        return cls("max", _extreme(values, "max"))

    def emptied(self) -> Metric:
        """The same metric over no values: the neutral element of merging."""
        nothing = {"min": float("inf"), "max": float("-inf")}.get(self.reduction, 0.0)
        count = None if self.count is None else torch.zeros_like(self.count)
        return Metric(self.reduction, torch.full_like(self.total, nothing), count)

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
        way, totals = parts[0].reduction, torch.stack([metric.total for metric in parts])
        if way in ("min", "max"):
            merged[name] = Metric(way, getattr(totals, f"a{way}")(0))
        else:
            counts = [metric.count for metric in parts if metric.count is not None]
            count = torch.stack(counts).sum(0) if counts else None
            merged[name] = Metric(way, totals.sum(0), count)
    return merged


def _extreme(values: Tensor, way: Literal["min", "max"]) -> Tensor:
    worst = float("inf") if way == "min" else float("-inf")
    flat = values.detach().double().reshape(-1)
    flat = torch.cat((flat, flat.new_full((1,), worst)))
    return flat.amin() if way == "min" else flat.amax()


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

    def __call__(self, outputs: Any, batch: Batch | BatchShard) -> Sums:
        """Sums over `batch` from the model's (rows, width, ...) outputs."""
        outputs = select_output(outputs, self.output, batch.rows, batch.width)
        if tuple(outputs.shape[:2]) != (batch.rows, batch.width):
            raise InputError(
                f"outputs have shape {tuple(outputs.shape)}, but the batch has {batch.rows} rows "
                f"of width {batch.width}. Pass the model's outputs for this batch, "
                f"(rows, width, ...)."
            )
        if self.vectorised:
            return self._at_once(outputs, batch)
        if isinstance(batch, BatchShard):
            raise InputError(
                "a function of whole sequences cannot run on a batch shard. Join the outputs of "
                "all ranks first, or set vectorised=True if each value depends on one token only."
            )
        return self._one_by_one(outputs, batch)

    def looped(self) -> PerSequence:
        """The same function, run on one sequence at a time."""
        return replace(self, vectorised=False)

    def _at_once(self, outputs: Tensor, batch: Batch | BatchShard) -> Sums:
        view = View.of_all(batch)
        values, metrics = _value_and_metrics(self.function(view.flat(outputs), view))
        if tuple(values.shape) != tuple(view.labels.shape):
            raise InputError(
                f"a vectorised function returned shape {tuple(values.shape)} for "
                f"{len(view.labels)} slots. Return one value per slot, or set vectorised=False."
            )
        if isinstance(batch, BatchShard):
            return Sums(values.sum(), metrics, None)
        by_tile = view.sum_by_segment(values)
        return Sums(values.sum(), metrics, by_tile, batch.sample_ids >= 0, values.detach())

    def _one_by_one(self, outputs: Tensor, batch: Batch) -> Sums:
        # The empty slice keeps the outputs in the graph: an empty micro-batch has a backward too.
        losses, flat = [outputs[:0].sum()], outputs.flatten(0, 1)
        metrics: list[dict[str, Metric]] = []
        by_slot: Tensor | None = outputs.new_zeros(len(flat))
        for view in View.of_segments(batch):
            value, measured = _value_and_metrics(self.function(flat[view.slots], view))
            losses.append(value.sum())
            metrics.append(measured)
            if by_slot is not None and value.shape == by_slot[view.slots].shape:
                by_slot = by_slot.to(torch.promote_types(by_slot.dtype, value.dtype))
                by_slot[view.slots] = value.detach()
            else:
                by_slot = None
        if not metrics:
            # Ranks that reduce metrics need the same names: the function runs on the padding of
            # the empty micro-batch, and its values are discarded.
            view = View(batch, slice(0, int(batch.cu_seqlens[1])), 0)
            with torch.no_grad():
                _, measured = _value_and_metrics(self.function(flat[view.slots], view))
            metrics.append({name: metric.emptied() for name, metric in measured.items()})
        by_sequence = torch.stack(losses)[1:]
        return Sums(by_sequence.sum(), merge(metrics), by_sequence, by_slot=by_slot)


def _value_and_metrics(outcome: Outcome) -> tuple[Tensor, dict[str, Metric]]:
    if isinstance(outcome, Tensor):
        return outcome, {}
    return outcome[0], dict(outcome[1])


@dataclass(frozen=True, slots=True, eq=False)
class _LossTokens:
    """The slots of a view that have a label; all others get neutral values."""

    view: View
    counts: Tensor  # (n) bool: has a label
    total: Tensor  # how many

    @classmethod
    def of(cls, view: View) -> _LossTokens:
        counts = view.labels != IGNORE_INDEX
        return cls(view, counts, counts.sum())

    def extra(self, name: str) -> Tensor:
        """An extra at the slots that predict its tokens, 0 where there is no label."""
        return torch.where(self.counts, self.view.ahead(name), 0.0)

    def mean(self, values: Tensor) -> Metric:
        """The mean over loss tokens."""
        return Metric.mean((values * self.counts).sum(), self.total)


# Losses ----------------------------------------------------------------------------------------


def cross_entropy(
    *,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    head: Head | nn.Linear | Tensor | None = None,
) -> PerSequence:
    """The weighted sum of the negative log-likelihood of the labels.

    Per token: -(1 - e) log p(label) - e * mean of log p over the vocabulary + z * logsumexp², where
    e is `label_smoothing` and z is `z_loss`. Logits are divided by `temperature` first. With
    `head`, the model returns hidden states; see `Head`. The metric `nll` is -log p(label).

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> import torch
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> cross_entropy()(torch.zeros(1, 3, 4), batch).by_sequence.exp().tolist()
    [4.0, 1.0]
    """
    positive("temperature", temperature)
    share("label_smoothing", label_smoothing)
    at_least("z_loss", z_loss, 0)
    last = Head.of(head)
    wanted: Wanted = frozenset({"mean_log_probs"} if label_smoothing else ())
    wanted |= frozenset({"log_normalizer"} if z_loss else ())

    def loss(outputs: Tensor, view: View) -> Outcome:
        labels = view.labels
        scores = score(outputs, labels, head=last, temperature=temperature, wanted=wanted)
        nll = value = -scores.log_probs
        counts = (labels != IGNORE_INDEX).sum()
        metrics = {"nll": Metric.mean(nll.sum(), counts), "loss_tokens": Metric.sum(counts)}
        if label_smoothing:
            value = (1 - label_smoothing) * nll - label_smoothing * scores.mean_log_probs
        if z_loss:
            squares = scores.log_normalizer.square()
            value = value + z_loss * squares
            metrics["z_loss"] = Metric.mean(z_loss * squares.sum(), counts)
        return value * view.loss_weights, metrics

    return PerSequence(loss, vectorised=True)


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
    _check_policy(ratio, kl_estimator, temperature, clip_low, clip_high, dual_clip, importance_cap)
    last = Head.of(head)
    wanted: Wanted = frozenset() if entropy_weight is None else frozenset({"entropy"})

    def loss(outputs: Tensor, view: View) -> Outcome:
        scores = score(outputs, view.labels, head=last, temperature=temperature, wanted=wanted)
        tokens, new = _LossTokens.of(view), scores.log_probs
        old = tokens.extra("old_log_probs")
        bound = MOST_LOG_RATIO_HALF if outputs.dtype == torch.float16 else MOST_LOG_RATIO
        change = _log_ratio(new - old, tokens, ratio).clamp(-bound, bound).exp()
        drop = (old - new).clamp(-bound, bound)
        value, metrics = _clipped(change, drop, tokens, clip_low, clip_high, dual_clip)
        if importance_cap is not None:
            value = _corrected(value, old, tokens, importance_cap, metrics)
        if kl_weight:
            above = tokens.extra("reference_log_probs") - new
            divergence = _KL[kl_estimator](above.clamp(-bound, bound))
            value = value + kl_weight * divergence
            metrics["kl"] = tokens.mean(divergence)
        if entropy_weight is not None:
            value = value - entropy_weight * scores.entropy
            metrics["entropy"] = tokens.mean(scores.entropy)
        return torch.where(tokens.counts, value * view.loss_weights, 0.0), metrics

    return PerSequence(loss, vectorised=True)


def _check_policy(
    ratio: Ratio, kl_estimator: KlEstimator, temperature: float, low: float, high: float,
    dual: float | None, cap: float | None,
) -> None:  # fmt: skip
    one_of("ratio", ratio, Ratio)
    one_of("kl_estimator", kl_estimator, KlEstimator)
    positive("temperature", temperature)
    at_least("clip_low", low, 0)
    at_least("clip_high", high, 0)
    if dual is not None and not dual > 1:
        raise ConfigError(f"dual_clip must be greater than 1, got {dual}.")
    if cap is not None:
        positive("importance_cap", cap)


def _log_ratio(change: Tensor, tokens: _LossTokens, way: Ratio) -> Tensor:
    """Differences of log-probs: of each token, or their mean over its sequence."""
    if way == "token":
        return change
    view, counts = tokens.view, tokens.counts
    number = view.sum_by_segment(counts.to(change)).clamp(min=1)
    view.check_whole_samples()
    mean = view.sum_by_segment(change) / number
    return torch.where(counts, mean[view.segment_ids], 0.0)


def _clipped(
    change: Tensor, drop: Tensor, tokens: _LossTokens, low: float, high: float, dual: float | None
) -> tuple[Tensor, dict[str, Metric]]:
    """The loss per token; `change`: new over old probability; `drop`: old minus new log-prob."""
    counts, advantage = tokens.counts, tokens.extra("advantages")
    clipped = change.clamp(1 - low, 1 + high)
    value = -torch.minimum(change * advantage, clipped * advantage)
    metrics = {
        "ratio": tokens.mean(change),
        "ratio_min": Metric.min(torch.where(counts, change, torch.inf)),
        "ratio_max": Metric.max(torch.where(counts, change, -torch.inf)),
        "clipped": tokens.mean(change != clipped),
        "approx_kl": tokens.mean(drop),
    }
    if dual is not None:
        most = -dual * advantage
        above = (advantage < 0) & (value > most)
        value = torch.where(above, most, value)
        metrics["dual_clipped"] = tokens.mean(above)
    return value, metrics


def _corrected(
    value: Tensor, old: Tensor, tokens: _LossTokens, cap: float, metrics: dict[str, Metric]
) -> Tensor:
    """Tokens were sampled by the rollout's probabilities, not by the old ones. Adds metrics."""
    change = old - tokens.extra("rollout_log_probs")
    weight = change.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
    metrics["importance"] = tokens.mean(weight)
    metrics["truncated"] = tokens.mean(weight > cap)
    return value * weight.clamp(max=cap)


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
    if clip is not None:
        positive("clip", clip)

    def loss(outputs: Tensor, view: View) -> Outcome:
        tokens = _LossTokens.of(view)
        value = torch.where(tokens.counts, scalars(outputs), 0.0)
        target = tokens.extra("returns")
        error = (value - target).square()
        metrics = {
            "value": Metric.mean(value.sum(), tokens.total),
            "value_error": Metric.mean(error.sum(), tokens.total),
        }
        if clip is not None:
            old = tokens.extra("old_values")
            near = torch.maximum(torch.minimum(value, old + clip), old - clip)
            far = (near - target).square()
            metrics["clipped"] = Metric.mean((far > error).sum(), tokens.total)
            error = torch.maximum(error, far)
        return error / 2 * view.loss_weights, metrics

    return PerSequence(loss, vectorised=True)


def scalars(outputs: Tensor) -> Tensor:
    """(n) or (n, 1) outputs -> (n), in float32 or wider."""
    if outputs.ndim > 2 or (outputs.ndim == 2 and outputs.shape[1] != 1):
        raise InputError(
            f"the model returned {tuple(outputs.shape[1:])} numbers per token; expected one. Use a "
            f"model with a scalar head, such as one for token classification with one label."
        )
    return _wide(outputs.reshape(len(outputs)))


Divergence: TypeAlias = Literal["forward_kl", "reverse_kl", "jsd"]
Rest: TypeAlias = Literal["bucket", "renormalize"]


def distillation(
    *,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    rest: Rest = "bucket",
    teacher: Callable[[Any], Any] | None = None,
) -> PerSequence:
    """The weighted sum of the divergence between a teacher's and the model's distribution.

    Per loss token, with t for the teacher's and s for the model's distribution:

    forward_kl  KL(t, s) = sum of t log(t / s)
    reverse_kl  KL(s, t)
    jsd         beta KL(t, m) + (1 - beta) KL(s, m), where m = beta t + (1 - beta) s

    `temperature` divides the logits of both; the loss is not multiplied by its square.

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

    def loss(outputs: Tensor, view: View) -> Outcome:
        tokens = _LossTokens.of(view)
        counts = tokens.counts
        student = (_wide(outputs) / temperature).log_softmax(-1)
        if teacher is not None or "teacher_logits" in view.source.aligned:
            known = _teacher_log_probs(teacher, view, temperature, student)
        else:
            known, student = _top(view, student, counts, rest)
        # Slots without a label may hold anything, also NaN.
        known = torch.where(counts[:, None], known, student.detach())
        value = torch.where(counts, _divergence(known, student, divergence, beta), 0.0)
        return value * view.loss_weights, {divergence: Metric.mean(value.sum(), tokens.total)}

    return PerSequence(loss, vectorised=True)


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


def _teacher_log_probs(
    teacher: Callable[[Any], Any] | None, view: View, temperature: float, student: Tensor
) -> Tensor:
    """(n, vocabulary): of the teacher itself, else of the extra 'teacher_logits'."""
    batch = view.source
    if teacher is not None:
        with torch.no_grad():
            outputs = select_output(teacher(batch), "logits", batch.rows, batch.width)
        logits = view.flat(outputs)
    elif batch.aligned["teacher_logits"] == "token":
        logits = view.extra("teacher_logits")
    else:
        raise InputError(
            "'teacher_logits' must be a token-aligned extra: like the model's logits, they are "
            "those of the slot that predicts a token. Do not shift them with at_labels()."
        )
    if logits.shape[-1] != student.shape[-1]:
        raise InputError(
            f"the teacher has {logits.shape[-1]} logits per token and the model "
            f"{student.shape[-1]}. Use a teacher with the same vocabulary."
        )
    return (_wide(logits) / temperature).log_softmax(-1)


def _top(view: View, student: Tensor, counts: Tensor, rest: Rest) -> tuple[Tensor, Tensor]:
    """Log-probs of the teacher's k tokens and of the rest, of the teacher and of the model."""
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
    known, ids = _wide(known), torch.where(counts[:, None], ids, 0)
    chosen = student.gather(-1, ids)
    if rest == "renormalize":
        return known.log_softmax(-1), chosen.log_softmax(-1)
    if ids.shape[-1] == student.shape[-1]:
        return known, chosen
    least = torch.finfo(known.dtype).eps  # rounding of a sum that should be at most 1
    left = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=least).log()
    others = student.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((known, left), -1), torch.cat((chosen, others), -1)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


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
        if over == "sequence":
            known = _by_sequence(logits, view, top_k)[view.segment_ids]  # (n, layers, experts)
        else:
            known = _matching(frequencies() if callable(frequencies) else frequencies, logits)
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
    logits = _checked(outputs.flatten(0, 1), top_k)
    weights = batch.loss_weights.flatten().double()
    chosen = torch.where(weights[:, None, None] != 0, _chosen(logits, top_k), 0.0)
    counts = (chosen * weights[:, None, None]).sum(0)
    return counts, weights.sum() * top_k


def _chosen(logits: Tensor, top_k: int) -> Tensor:
    """(n, layers, experts): 1 for each chosen expert."""
    best = logits.detach().topk(top_k, dim=-1).indices
    return torch.zeros_like(logits).scatter_(-1, best, 1.0).detach()


def _by_sequence(logits: Tensor, view: View, top_k: int) -> Tensor:
    """(segments, layers, experts): the frequencies of each sequence."""
    view.check_whole_samples()
    weights = view.loss_weights
    chosen = _chosen(logits, top_k) * weights[:, None, None]
    total = view.sum_by_segment(weights) * top_k
    return view.sum_by_segment(chosen) / torch.where(total > 0, total, 1.0)[:, None, None]


def _checked(outputs: Tensor, top_k: int) -> Tensor:
    """(n, layers, experts) logits in float32 or wider."""
    if outputs.ndim != 3 or outputs.shape[-1] < top_k:
        raise InputError(
            f"the router logits have shape {tuple(outputs.shape[1:])} per token; expected (layers, "
            f"experts) with at least top_k={top_k} experts. Let `forward` return a mapping with "
            f"`router_logits`, for Hugging Face dict(model(..., output_router_logits=True))."
        )
    return _wide(outputs)


def _matching(frequencies: Tensor | None, logits: Tensor) -> Tensor:
    assert frequencies is not None
    layers, experts = logits.shape[1:]
    if tuple(frequencies.shape) not in ((experts,), (layers, experts)):
        raise InputError(
            f"frequencies have shape {tuple(frequencies.shape)}, but the model has {layers} layers "
            f"of {experts} experts. Pass ({layers}, {experts}) or ({experts},)."
        )
    return frequencies.detach().to(logits).expand(layers, experts)
