"""Head: scores of labels (log-probs, entropies) from logits, or from hidden states and a head.

The logits of a micro-batch, (tokens, vocabulary), are the largest tensor of a step. With a `Head`,
the forward computes them for `chunk` tokens, keeps a few numbers per token, and discards them; the
backward computes them again. Slots without a label are skipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.core.text import whole_number
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX

Wanted: TypeAlias = frozenset[str]
"""Of: entropy, mean_log_probs, log_normalizer."""

_LEAST = -1e4  # of a log-prob that is multiplied by its probability: 0 * -inf would be NaN


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The last linear layer of a model, for losses of models that return hidden states.

    linear    `nn.Linear`, whose weight and bias are read when a loss runs, or a weight of shape
              (vocabulary, hidden)
    scale     logits are multiplied by it
    soft_cap  logits become soft_cap * tanh(logits / soft_cap), after scaling
    chunk     tokens whose logits are in memory at once

    Gradients of hidden states, weight and bias are those of the logits; the gradient of the weight
    is summed over chunks in float32 or wider. With `fully_shard`, the root module must hold the
    layer, so that its weight is whole when the loss runs.

    >>> linear = nn.Linear(8, 100)
    >>> Head(linear, soft_cap=30.0).chunk
    1024
    """

    linear: nn.Linear | Tensor
    scale: float = field(default=1.0, kw_only=True)
    soft_cap: float | None = field(default=None, kw_only=True)
    chunk: int = field(default=1024, kw_only=True)

    def __post_init__(self) -> None:
        plain = isinstance(self.linear, nn.Linear) and (
            type(self.linear).forward is nn.Linear.forward  # no adapter, no quantization
        )
        if not plain and not isinstance(self.linear, Tensor):
            raise ConfigError(
                f"head must be a plain nn.Linear or a weight (vocabulary, hidden), got "
                f"{type(self.linear).__name__}. Let the model return logits instead."
            )
        positive("scale", abs(self.scale))
        positive("soft_cap", self.soft_cap)
        whole_number("chunk", self.chunk)

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states, (..., hidden) -> (..., vocabulary), all at once."""
        weight, bias = self.weight_and_bias
        logits: Tensor = functional.linear(hidden, weight, bias)
        logits = logits if self.scale == 1.0 else logits * self.scale
        cap = self.soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @classmethod
    def of(cls, head: Head | nn.Linear | Tensor | None) -> Head | None:
        """A head from the argument of a loss."""
        return head if head is None or isinstance(head, Head) else cls(head)

    @property
    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """(vocabulary, hidden) and (vocabulary) or None."""
        linear = self.linear
        weight, bias = (
            (linear, None) if isinstance(linear, Tensor) else (linear.weight, linear.bias)
        )
        if hasattr(weight, "device_mesh"):
            raise ConfigError(
                "the weight of the head is sharded when the loss runs. Do not call fully_shard on "
                "the head itself; the root module then holds it and keeps it whole until backward."
            )
        return weight, bias


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Numbers per label, (n) each, in float32 or wider; 0 where the label is ignored."""

    log_probs: Tensor
    entropy: Tensor
    """0 if it was not requested, as the following."""
    mean_log_probs: Tensor
    """The mean of the log-probs of the whole vocabulary."""
    log_normalizer: Tensor
    """logsumexp of the logits."""


def score(
    outputs: Tensor,
    labels: Tensor,
    *,
    head: Head | None = None,
    temperature: float = 1.0,
    wanted: Wanted = frozenset(),
) -> Scores:
    """(n, vocabulary) logits, or (n, hidden) states with `head`, and (n) labels -> scores.

    Logits are divided by `temperature` first. `wanted` names the fields that are computed besides
    the log-probs.
    """
    if head is not None:
        return Scores(*_head_scores(outputs, labels, head, temperature, wanted))
    logits = wide(outputs) if temperature == 1.0 else wide(outputs) / temperature
    entropy = mean = normalizer = nothing = logits.new_zeros(len(labels))
    if not wanted:
        nll = functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
        return Scores(-nll, nothing, nothing, nothing)
    all_log_probs = logits.log_softmax(-1)
    log_probs = all_log_probs.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    if "entropy" in wanted:
        # A token of probability 0 adds 0, not 0 * -inf.
        finite = all_log_probs.masked_fill(all_log_probs == -torch.inf, 0.0)
        entropy = -(all_log_probs.exp() * finite).sum(-1)
    if "mean_log_probs" in wanted:
        mean = all_log_probs.mean(-1)
    if "log_normalizer" in wanted:
        normalizer = logits.logsumexp(-1)
    counts, every = labels != IGNORE_INDEX, (log_probs, entropy, mean, normalizer)
    return Scores(*(torch.where(counts, each, nothing) for each in every))


def scorer(
    head: Head | nn.Linear | Tensor | None, temperature: float, **wanted: bool
) -> Callable[[Tensor, Tensor], Scores]:
    """`score` with the options of a loss; `wanted` says which fields are computed."""
    positive("temperature", temperature)
    names = frozenset(name for name, computed in wanted.items() if computed)
    return functools.partial(score, head=Head.of(head), temperature=temperature, wanted=names)


def wide(values: Tensor) -> Tensor:
    """In float32 or wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def label_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    head: Head | nn.Linear | Tensor | None = None,
) -> Tensor:
    """(n, vocabulary) logits and (n) labels -> (n) log-probs of the labels, in float32 or wider.

    It is 0 where the label is ignored. Slot i holds the log-prob of token i + 1;
    `restore_tokens(..., shifted=True)` moves it to slot i + 1. With `head`, `logits` are hidden
    states, (n, hidden).

    >>> label_log_probs(torch.zeros(2, 4), torch.tensor([3, -100])).exp().tolist()
    [0.25, 1.0]
    """
    return score(logits, labels, head=Head.of(head), temperature=temperature).log_probs


# Scores from hidden states, a chunk of logits at a time --------------------------------------


def _head_scores(
    hidden: Tensor, labels: Tensor, head: Head, temperature: float, wanted: Wanted
) -> tuple[Tensor, ...]:
    """The fields of `Scores` for (n, hidden) states; 0 where the label is ignored."""
    weight, bias = head.weight_and_bias
    if hidden.shape[-1] != weight.shape[-1]:
        raise InputError(
            f"outputs have {hidden.shape[-1]} numbers per token, but the head takes "
            f"{weight.shape[-1]}. Let `forward` return the last hidden states, or omit head."
        )
    kept = (labels != IGNORE_INDEX).nonzero()[:, 0]
    device = hidden.device.type
    # The dtype of the product: autocast's, else the wider one.
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        scores = _HeadScores.apply(
            hidden.index_select(0, kept).to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            labels.index_select(0, kept),
            head,
            temperature,
            wanted,
        )
    return tuple(each.new_zeros(len(labels)).index_copy(0, kept, each) for each in scores)


class _HeadScores(torch.autograd.Function):  # type: ignore[misc]
    """Hidden states with labels -> log-probs, entropy, mean log-probs and normalizer of each."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: Head,
        temperature: float,
        wanted: Wanted,
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # rows: log-prob, entropy, mean log-prob, greatest logit, log of the sum relative to it
        scores = torch.zeros((5, len(hidden)), dtype=dtype, device=hidden.device)
        for first in range(0, len(hidden), head.chunk):
            chunk = slice(first, first + head.chunk)
            logits, _ = _chunk_logits(hidden[chunk], weight, bias, head, temperature)
            greatest = logits.amax(-1)
            logits = logits.sub_(greatest[:, None])
            exponentials = logits.exp()
            log_sum = exponentials.sum(-1).log()
            scores[0, chunk] = logits.gather(-1, labels[chunk, None])[:, 0] - log_sum
            if "entropy" in wanted:
                products = exponentials.mul_(logits.clamp(min=_LEAST)).sum(-1)
                scores[1, chunk] = log_sum - products / log_sum.exp()
            if "mean_log_probs" in wanted:
                scores[2, chunk] = logits.mean(-1) - log_sum
            scores[3, chunk], scores[4, chunk] = greatest, log_sum
        ctx.head, ctx.temperature, ctx.wanted = head, temperature, wanted
        ctx.save_for_backward(hidden, weight, bias, labels, scores)
        return scores[0].clone(), scores[1].clone(), scores[2].clone(), scores[3] + scores[4]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, scores = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if need_hidden else None
        of_weight = torch.zeros_like(weight, dtype=scores.dtype) if need_weight else None
        of_bias = torch.zeros_like(bias, dtype=scores.dtype) if need_bias else None
        for first in range(0, len(hidden), ctx.head.chunk):
            chunk = slice(first, first + ctx.head.chunk)
            per_label = [gradient[chunk, None] for gradient in gradients]
            logits, slope = _chunk_logits(hidden[chunk], weight, bias, ctx.head, ctx.temperature)
            change = _logit_gradients(
                logits, labels[chunk], scores[:, chunk], per_label, ctx.wanted
            )
            if isinstance(slope, Tensor) or slope != 1.0:
                change = change * slope
            narrow = change.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[chunk] = narrow @ weight
            if of_weight is not None:
                of_weight += narrow.T @ hidden[chunk]
            if of_bias is not None:
                of_bias += change.sum(0)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _chunk_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, temperature: float
) -> tuple[Tensor, Tensor | float]:
    """(final logits, their derivative by the product) of a chunk, in float32 or wider."""
    logits = wide(functional.linear(hidden, weight, bias))
    if head.scale != 1.0:
        logits = logits * head.scale
    slope: Tensor | float = head.scale / temperature
    if head.soft_cap is not None:
        bent = torch.tanh(logits / head.soft_cap)
        logits, slope = bent * head.soft_cap, slope * (1 - bent * bent)
    return logits if temperature == 1.0 else logits / temperature, slope


def _logit_gradients(
    logits: Tensor, labels: Tensor, scores: Tensor, gradients: list[Tensor], wanted: Wanted
) -> Tensor:
    """(chunk, vocabulary): the gradient by each logit z, with p its probability.

    log-prob of y: [z is y] - p      mean log-prob: 1 / vocabulary - p
    entropy H: -p (log p + H)        normalizer: p
    """
    _, entropy, _, greatest, log_sum = scores[:, :, None]
    of_log_prob, of_entropy, of_mean, of_normalizer = gradients
    log_probs = logits.sub_(greatest).sub_(log_sum)  # in place: a chunk of logits is large
    factor = of_normalizer - of_log_prob - of_mean
    if "entropy" in wanted:
        factor = factor - of_entropy * (log_probs.clamp(min=_LEAST) + entropy)
    change = log_probs.exp_().mul_(factor)
    if "mean_log_probs" in wanted:
        change.add_(of_mean / logits.shape[-1])
    return change.scatter_add_(1, labels[:, None], of_log_prob)


# Options of losses -----------------------------------------------------------------------------


def positive(name: str, value: float | None) -> None:
    """Raise unless `value` is positive and finite, or None."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name} must be positive and finite, got {value}.")


def at_least_zero(name: str, value: float, below: float = math.inf) -> None:
    """Raise unless `value` is in [0, below)."""
    if not 0 <= value < below:
        interval = "finite and at least 0" if below == math.inf else f"in [0, {below:g})"
        raise ConfigError(f"{name} must be {interval}, got {value}.")
