"""Head: scores of labels (log-probs, entropies) from logits, or from hidden states and a head.

The logits of a micro-batch, (tokens, vocabulary), are the largest tensor of a step. With a `Head`,
the forward computes them for `chunk` tokens, keeps a few numbers per token, and discards them. Of a
loss that is a weighted sum of log-probs, it computes the gradients at once; else the backward
computes the logits again. Slots without a label are skipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.core.text import whole_number
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, labelled_slots
from evenstep.tensors.transport import refuse_second_derivative

HeadOption: TypeAlias = "Head | nn.Linear | Tensor | Literal['model'] | None"
"""The argument `head` of a loss."""
Wanted: TypeAlias = frozenset[str]
"""Of: entropy, mean_log_probs, log_normalizer."""


class Factors(NamedTuple):
    """The loss of a label: its weight * (log_prob * its log-prob + mean * its mean log-prob)."""

    weights: Tensor  # (n)
    log_prob: float
    mean: float


_CHUNK_BYTES = 6 * 10**8
_LEAST = -1e4  # of a log-prob that is multiplied by its probability: 0 * -inf would be NaN


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The last linear layer of a model, for losses of hidden states.

    A runner finds it by itself (`head="model"` of losses says that it must); pass one for a model
    that returns hidden states instead of logits.

    linear    `nn.Linear`, whose weight and bias are read when a loss runs, or a weight of shape
              (vocabulary, hidden)
    scale     logits are multiplied by it
    soft_cap  logits become soft_cap * tanh(logits / soft_cap), after scaling
    chunk     tokens whose logits are in memory at once, at most; by default as many as take 600 MB

    Gradients of hidden states, weight and bias are those of the logits; the gradient of the weight
    is summed over chunks in float32 or wider. With `fully_shard` and a model that returns hidden
    states, the root module must hold the layer, so that its weight is whole when the loss runs.

    >>> linear = nn.Linear(8, 100)
    >>> Head(linear, soft_cap=30.0)(torch.zeros(2, 8)).shape
    torch.Size([2, 100])
    """

    linear: nn.Linear | Tensor
    scale: float = field(default=1.0, kw_only=True)
    soft_cap: float | None = field(default=None, kw_only=True)
    chunk: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        plain = isinstance(self.linear, nn.Linear) and (
            type(self.linear).forward is nn.Linear.forward  # no adapter, no quantization
        )
        if not plain and not isinstance(self.linear, Tensor):
            raise ConfigError(
                f"head must be a plain nn.Linear or a weight (vocabulary, hidden), got "
                f"{type(self.linear).__name__}. Pass 'model' for the model's own, or leave it out."
            )
        positive("scale", abs(self.scale))
        positive("soft_cap", self.soft_cap)
        if self.chunk is not None:
            whole_number("chunk", self.chunk)

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states, (..., hidden) -> (..., vocabulary), all at once."""
        weight, bias = self.weight_and_bias
        logits: Tensor = functional.linear(hidden, weight, bias)
        logits = logits if self.scale == 1.0 else logits * self.scale
        cap = self.soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @classmethod
    def of(cls, head: HeadOption) -> Head | Literal["model"] | None:
        """A head from the argument of a loss."""
        if isinstance(head, str) and head == "model":
            return "model"
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
    dtype: torch.dtype
    """Of the logits."""
    weighted: Tensor | None = None
    """With a head and factors: `times(factors)`. No other field has a gradient then."""

    def times(self, factors: Factors) -> Tensor:
        """(n): the loss of each label."""
        if self.weighted is not None:
            return self.weighted
        weights, log_prob, mean = factors
        values = log_prob * self.log_probs
        values = values + mean * self.mean_log_probs if mean else values
        return torch.where(weights != 0, weights * values, 0.0)  # not 0 * inf


def score(
    outputs: Tensor,
    labels: Tensor,
    *,
    head: Head | None = None,
    temperature: float = 1.0,
    wanted: Wanted = frozenset(),
    factors: Factors | None = None,
) -> Scores:
    """(n, vocabulary) logits, or (n, hidden) states with `head`, and (n) labels -> scores.

    Logits are divided by `temperature` first. `wanted` names the fields that are computed besides
    the log-probs. A loss that is the sum of `Scores.times(factors)` gives the factors here too:
    with a head, the logits are then computed once instead of twice.
    """
    if head is not None:
        return _head_scores(outputs, labels, head, temperature, wanted, factors)
    logits = wide(outputs) if temperature == 1.0 else wide(outputs) / temperature
    entropy = mean = normalizer = nothing = logits.new_zeros(len(labels))
    if not wanted:
        nll = functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
        return Scores(-nll, nothing, nothing, nothing, outputs.dtype)
    all_log_probs, counts = logits.log_softmax(-1), labels != IGNORE_INDEX
    log_probs = all_log_probs.gather(-1, torch.where(counts, labels, 0)[:, None])[:, 0]
    if "entropy" in wanted:
        # A token of probability 0 adds 0, not 0 * -inf.
        finite = all_log_probs.masked_fill(all_log_probs == -torch.inf, 0.0)
        entropy = -(all_log_probs.exp() * finite).sum(-1)
    if "mean_log_probs" in wanted:
        mean = all_log_probs.mean(-1)
    if "log_normalizer" in wanted:
        normalizer = logits.logsumexp(-1)
    every = (log_probs, entropy, mean, normalizer)
    log_probs, entropy, mean, normalizer = (torch.where(counts, each, nothing) for each in every)
    return Scores(log_probs, entropy, mean, normalizer, outputs.dtype)


def scorer(temperature: float, **wanted: bool) -> Callable[..., Scores]:
    """`score` with the options of a loss; `wanted` says which fields are computed."""
    positive("temperature", temperature)
    names = frozenset(name for name, computed in wanted.items() if computed)
    return functools.partial(score, temperature=temperature, wanted=names)


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
    layer = head if head is None or isinstance(head, Head) else Head(head)
    return score(logits, labels, head=layer, temperature=temperature).log_probs


# What a head's labels or distributions give, a chunk of logits at a time ----------------------


def _head_scores(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    temperature: float,
    wanted: Wanted,
    factors: Factors | None,
) -> Scores:
    """The scores of (n, hidden) states; 0 where the label is ignored."""
    computed = "entropy" in wanted, "mean_log_probs" in wanted
    formula = _Formula(head.scale, head.soft_cap, temperature, *computed)
    slots = labelled_slots(labels)
    each = None
    if factors is not None:
        weights = wide(factors.weights)
        none = torch.zeros_like(weights)
        each = torch.stack((factors.log_prob * weights, none, factors.mean * weights, none))
    values, dtype = _in_chunks(
        hidden, head, slots, _LabelScores(formula, labels.index_select(0, slots)), each
    )
    log_probs, entropy, mean, normalizer, *weighted = values
    return Scores(log_probs, entropy, mean, normalizer, dtype, *weighted)


Comparison: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(log-probs (m, vocabulary), slots (m)) -> values (m)."""


def compare(
    outputs: Tensor,
    labels: Tensor,
    weights: Tensor,
    function: Comparison,
    *,
    head: Head | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(n) values of a function of distributions, and the same times `weights`, whose sum is the
    loss. Only the second has a gradient. Both are 0 where the label is ignored."""
    scale, cap = (1.0, None) if head is None else (head.scale, head.soft_cap)
    formula = _Formula(scale, cap, temperature, entropy=False, means=False)
    slots = labelled_slots(labels)
    compared = _Compared(formula, function, slots)
    (values, weighted), _ = _in_chunks(outputs, head, slots, compared, wide(weights)[None])
    return values, weighted


class _Job(Protocol):
    """Numbers of labels from products of hidden states and weights, some labels at a time."""

    rows: int  # numbers of a label
    results: int  # how many of these losses see
    shares: int  # a chunk and the gradient of its products take the memory of so many chunks

    def run(
        self, product: Tensor, part: slice, factors: Tensor | None, numbers: Tensor | None
    ) -> Tensor:
        """(rows, m): the numbers of these labels; `numbers`, if they are known. With the factors of
        all results, the gradient of their weighted sum is written over the product."""
        ...


def _in_chunks(
    hidden: Tensor, head: Head | None, slots: Tensor, job: _Job, factors: Tensor | None
) -> tuple[tuple[Tensor, ...], torch.dtype]:
    """The results of a job for these slots, (n) each, 0 at others, and the dtype of logits. With
    factors, (results, n), also their weighted sum, which alone has a gradient then."""
    weight = bias = None
    dtype, chunk = hidden.dtype, _chunk_of(hidden.shape[-1], hidden.dtype)
    if head is not None:
        weight, bias, dtype, chunk = _layer(hidden, head)
    if factors is not None:
        factors = factors.index_select(1, slots)
    how = job, factors, dtype, max(1, chunk // job.shares), torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        values: tuple[Tensor, ...] = _InChunks.apply(hidden, weight, bias, slots, *how)
    return values, dtype


def _layer(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor | None, torch.dtype, int]:
    """(weight, bias, dtype of the logits, tokens of a chunk)."""
    weight, bias = head.weight_and_bias
    if hidden.shape[-1] != weight.shape[-1]:
        raise InputError(
            f"outputs have {hidden.shape[-1]} numbers per token, but the head takes "
            f"{weight.shape[-1]}. Let `forward` return the last hidden states, or omit head."
        )
    device = hidden.device.type
    # The dtype of the product: autocast's, else the wider one.
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return weight, bias, dtype, head.chunk or _chunk_of(len(weight), dtype)


def _chunk_of(vocabulary: int, dtype: torch.dtype) -> int:
    """Tokens whose logits take `_CHUNK_BYTES`."""
    return max(1, _CHUNK_BYTES // (vocabulary * int(dtype.itemsize)))


def _narrow(
    weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Both in the dtype of logits."""
    narrow, offset = (None if each is None else each.to(dtype) for each in (weight, bias))
    return narrow, offset


def _product(states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return states if weight is None else functional.linear(states, weight, bias)


class _InChunks(torch.autograd.Function):  # type: ignore[misc]
    """Hidden states (or logits, without a weight) -> results of a job, and their weighted sum.

    Without factors, the backward computes the logits again: four products of the size of the
    logits. With factors, the gradient of a chunk is known while its logits are there: three
    products, and the backward only scales, if the gradients of all labels are the same number.
    They are what `sum()` passes on: a tensor whose entries are one (its stride is 0).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        slots: Tensor,
        job: _Job,
        factors: Tensor | None,
        dtype: torch.dtype,
        chunk: int,
        differentiable: bool,
    ) -> tuple[Tensor, ...]:
        states, layer = hidden.index_select(0, slots).to(dtype), _narrow(weight, bias, dtype)
        wide_dtype = torch.promote_types(dtype, torch.float32)
        numbers = torch.zeros((job.rows, len(slots)), dtype=wide_dtype, device=hidden.device)
        gradients = unit = None
        if factors is not None:
            factors = factors.to(wide_dtype)
            # Gradients are kept relative to the largest factor: small ones would be lost in half
            # precision.
            unit = torch.cat((factors.abs().flatten(), factors.new_full((1,), 1e-30))).amax()
            if differentiable:
                gradients = _Gradients.of(states, weight, bias, ctx.needs_input_grad[:3])
        for part in _chunks(len(slots), chunk):
            product = _product(states[part], *layer)
            if gradients is None:
                numbers[:, part] = job.run(product, part, None, None)
            else:
                assert factors is not None
                numbers[:, part] = job.run(product, part, factors[:, part] / unit, None)
                gradients.add(part, product, states, layer[0])
            del product  # before the next one is there
        ctx.set_materialize_grads(False)
        ctx.how = job, dtype, chunk
        # Saved tensors, unlike attributes, are released when the backward has used them.
        computed = (None, None, None) if gradients is None else gradients
        ctx.save_for_backward(hidden, weight, bias, slots, numbers, factors, unit, *computed)
        results = [*numbers[: job.results]]
        if factors is not None:
            shares = numbers[: job.results] * factors
            results.append(torch.where(factors != 0, shares, 0.0).sum(0))  # not 0 * inf
        spread = [each.new_zeros(len(hidden)).index_copy_(0, slots, each) for each in results]
        if factors is not None:
            ctx.mark_non_differentiable(*spread[:-1])
        return tuple(spread)

    @staticmethod
    def backward(ctx: Any, *by_slot: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, bias, slots, numbers, factors, unit, *computed = ctx.saved_tensors
        (job, dtype, chunk), none = ctx.how, (None,) * 6
        last = by_slot[-1]
        if all(each is None for each in by_slot) or (factors is not None and last is None):
            return (None, None, None, *none)
        if factors is not None and last is not None and last.stride(0) == 0:
            sums = _Gradients(*computed)
            return (*sums.results(hidden, weight, bias, slots, last[0] * unit), *none)
        if factors is not None and last is not None:
            of_results = last.index_select(0, slots) * factors
        else:
            of_results = torch.stack(
                [
                    torch.zeros_like(numbers[0]) if each is None else each.index_select(0, slots)
                    for each in by_slot
                ]
            )
        states, layer = hidden.index_select(0, slots).to(dtype), _narrow(weight, bias, dtype)
        again = _Gradients.of(states, weight, bias, ctx.needs_input_grad[:3])
        for part in _chunks(len(slots), chunk):
            product = _product(states[part], *layer)
            job.run(product, part, of_results[:, part], numbers[:, part])
            again.add(part, product, states, layer[0])
            del product  # before the next one is there
        return (*again.results(hidden, weight, bias, slots, None), *none)


@dataclass(frozen=True, slots=True, eq=False)
class _LabelScores:
    """A job: log-prob, entropy, mean log-prob and normalizer of labels."""

    formula: _Formula
    labels: Tensor
    rows, results, shares = 6, 4, 1

    def run(
        self, product: Tensor, part: slice, factors: Tensor | None, numbers: Tensor | None
    ) -> Tensor:
        per_label = [x for x in (self.labels[part], numbers, factors) if x is not None]
        if factors is None:
            function: Callable[..., Any] = _scores
        else:
            function = _scores_and_gradients if numbers is None else _logit_gradients
        found: Tensor = _run(function, self.formula, product, *per_label)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """A job: one number per distribution, by a function of them."""

    formula: _Formula
    function: Comparison
    slots: Tensor
    rows, results, shares = 1, 1, 8

    def run(
        self, product: Tensor, part: slice, factors: Tensor | None, numbers: Tensor | None
    ) -> Tensor:
        with torch.set_grad_enabled(factors is not None):
            leaf = product.detach().requires_grad_(factors is not None)
            logits, _ = _logits(leaf, self.formula)
            result = self.function(logits.log_softmax(-1), self.slots[part])
            if factors is not None:
                (change,) = torch.autograd.grad((result * factors[0]).sum(), leaf)
                none = change.new_zeros(())  # not 0 * inf
                torch.where((factors[0] != 0)[:, None], change, none, out=product)
        return result.detach()[None]


@dataclass(frozen=True, slots=True)
class _Formula:
    """How a product becomes logits, and which scores are computed besides log-probs."""

    scale: float
    soft_cap: float | None
    temperature: float
    entropy: bool
    means: bool


class _Gradients(NamedTuple):
    """The gradients of states, weight and bias, summed over chunks; None if not needed."""

    states: Tensor | None  # written over the states
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(
        cls,
        states: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        needed: tuple[bool, bool, bool],
    ) -> _Gradients:
        sums = torch.promote_types(states.dtype, torch.float32)
        return cls(
            states if needed[0] else None,
            torch.zeros_like(weight, dtype=sums) if weight is not None and needed[1] else None,
            torch.zeros_like(bias, dtype=sums) if bias is not None and needed[2] else None,
        )

    def add(self, part: slice, change: Tensor, states: Tensor, weight: Tensor | None) -> None:
        """Add a chunk: `change` is the gradient by each of its products. Without a weight, these
        are the states, over which it is written."""
        if self.bias is not None:
            self.bias.add_(change.sum(0, dtype=self.bias.dtype))
        if self.weight is not None:
            if change.dtype == self.weight.dtype:
                self.weight.addmm_(change.T, states[part])
            elif change.is_cuda:
                torch.addmm(
                    self.weight, change.T, states[part], out_dtype=self.weight.dtype,
                    out=self.weight,
                )  # fmt: skip
            else:
                self.weight.add_(change.T @ states[part])
        if self.states is not None and weight is not None:  # last: it overwrites the states
            torch.mm(change, weight, out=self.states[part])

    def results(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        slots: Tensor,
        factor: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients times `factor`, in the dtypes of what they belong to."""

        def times(gradient: Tensor, dtype: torch.dtype) -> Tensor:
            if factor is None:
                return gradient.to(dtype)
            return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))

        of_hidden = None
        if self.states is not None:
            of_hidden = torch.zeros_like(hidden)
            of_hidden.index_copy_(0, slots, times(self.states, hidden.dtype))
        pairs = ((self.weight, weight), (self.bias, bias))
        of_weight, of_bias = (
            None if gradient is None or tensor is None else times(gradient, tensor.dtype)
            for gradient, tensor in pairs
        )
        return of_hidden, of_weight, of_bias


def _chunks(count: int, most: int) -> Iterator[slice]:
    """Slices of about equal length: 10 tokens in chunks of at most 4 -> 4, 3, 3."""
    number = -(-count // most)
    for index in range(number):
        yield slice(index * count // number, (index + 1) * count // number)


def _logits(product: Tensor, formula: _Formula) -> tuple[Tensor, Tensor | float]:
    """(logits, their derivative by the product) in float32 or wider."""
    logits = wide(product)
    if formula.scale != 1.0:
        logits = logits * formula.scale
    slope: Tensor | float = formula.scale / formula.temperature
    if formula.soft_cap is not None:
        bent = torch.tanh(logits / formula.soft_cap)
        logits, slope = bent * formula.soft_cap, slope * (1 - bent * bent)
    return logits if formula.temperature == 1.0 else logits / formula.temperature, slope


def _scores(product: Tensor, labels: Tensor, formula: _Formula) -> Tensor:
    """(6, chunk): log-prob, entropy, mean log-prob, normalizer, greatest logit, log of the sum
    relative to it, from (chunk, vocabulary) products of hidden states and weights."""
    logits, _ = _logits(product, formula)
    greatest = logits.amax(-1)
    logits = logits - greatest[:, None]
    exponentials = logits.exp()
    log_sum = exponentials.sum(-1).log()
    entropy = means = torch.zeros_like(log_sum)
    if formula.entropy:
        products = (exponentials * logits.clamp(min=_LEAST)).sum(-1)
        entropy = log_sum - products / log_sum.exp()
    if formula.means:
        means = logits.mean(-1) - log_sum
    log_probs = logits.gather(-1, labels[:, None])[:, 0] - log_sum
    return torch.stack((log_probs, entropy, means, greatest + log_sum, greatest, log_sum))


def _logit_gradients(
    product: Tensor, labels: Tensor, scores: Tensor, of_scores: Tensor, formula: _Formula
) -> Tensor:
    """The scores; the gradient by each product, (chunk, vocabulary), is written over the products.

    By each logit z, with p its probability:

    log-prob of y: [z is y] - p      mean log-prob: 1 / vocabulary - p
    entropy H: -p (log p + H)        normalizer: p
    """
    _, entropy, _, _, greatest, log_sum = scores[:, :, None]
    of_log_prob, of_entropy, of_mean, of_normalizer = of_scores[:, :, None]
    logits, slope = _logits(product, formula)
    log_probs = logits - greatest - log_sum
    factor = of_normalizer - of_log_prob - of_mean
    if formula.entropy:
        factor = factor - of_entropy * (log_probs.clamp(min=_LEAST) + entropy)
    change = log_probs.exp() * factor
    if formula.means:
        change = change + of_mean / logits.shape[-1]
    columns = torch.arange(logits.shape[-1], device=labels.device)
    change = change + torch.where(columns == labels[:, None], of_log_prob, 0.0)
    product.copy_(change * slope)
    return scores


def _scores_and_gradients(
    product: Tensor, labels: Tensor, factors: Tensor, formula: _Formula
) -> Tensor:
    """`_scores`; the gradient of their sum times factors is written over the products."""
    return _logit_gradients(product, labels, _scores(product, labels, formula), factors, formula)


_COMPILED = {"cuda"}  # devices
_LEAST_COMPILED = 128  # tokens of a chunk: compiling pays for large tensors only


def _run(
    function: Callable[..., Any], formula: _Formula, product: Tensor, *per_token: Tensor
) -> Any:
    """The function of these; compiled on CUDA: two passes over the logits instead of ten.

    It is compiled once for any number of tokens: the last dimension of `per_token`. The size of the
    vocabulary stays fixed, also if another one was compiled before, which makes reductions over it
    2.5 times as fast.
    """
    small = len(product) < _LEAST_COMPILED
    if product.device.type not in _COMPILED or small or torch.compiler.is_compiling():
        return function(product, *per_token, formula)
    torch._dynamo.maybe_mark_dynamic(product, 0)
    torch._dynamo.mark_static(product, 1)
    for each in per_token:
        torch._dynamo.maybe_mark_dynamic(each, each.ndim - 1)
    return _compile(function)(product, *per_token, formula)


_compile = functools.cache(torch.compile)


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
