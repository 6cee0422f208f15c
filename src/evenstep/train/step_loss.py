"""Losses: their sums of a micro-batch, and from these the exact loss and gradient of a step.

A step minimises L = sum over losses k of w_k S_k / D_k. S_k is the sum of weight times value over
all micro-batches and ranks; D_k is the denominator of the loss. D_k may be unknown when a backward
runs. Frameworks average gradients over F ranks; the factor F undoes this.

known            Every D_k is known before the step. The backward of a micro-batch is of
                 F * sum of w_k s_k / D_k. Gradients are exact; D_k is verified at the end.
counted          As known: all micro-batches are collated before the first one runs, and what they
                 add to D_k is summed over ranks by one small all-reduce. Costs the memory of a
                 step's batches on the host, and collating does not overlap with the model.
deferred         A backward is of sum of w_k s_k / c, with one constant c for all micro-batches and
                 ranks. At the end every gradient is multiplied by F * c / D. This is exact for ONE
                 denominator D: a second loss would need w_j S_j / D_j * D / c in its backward, and
                 D is unknown then, even if D_j is known. So each of several denominators has its
                 own backward and accumulator: every further one costs one more backward per
                 micro-batch (about 2/3 of a forward and backward) and one more gradient in memory.
per_micro_batch  A backward is of F * sum of w_k s_k / (A_k M). A_k is the sum over ranks of what
                 their micro-batches at this position add to D_k; M is the number of positions. This
                 is the exact loss only if all A_k are equal; the deviation is reported.

If c and w_k are powers of two, scaling before backward changes exponents only, and deferring adds
no more than the rounding of F * c / D and of one multiplication. A c near the number of tokens
keeps 16-bit gradients in their usual range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import Batch, BatchShard
from evenstep.tensors.losses import Metric, PerSequence, Sums
from evenstep.tensors.transport import CALLS
from evenstep.train.checks import check_exchanged
from evenstep.train.collectives import Bundle
from evenstep.train.gradients import Root
from evenstep.train.model_head import Heads
from evenstep.train.normalization import LABELLED, ByLoss, Normalization, TokenMean, weighted

if TYPE_CHECKING:
    from evenstep.train.runner import Runner

Mode: TypeAlias = Literal["known", "counted", "deferred", "per_micro_batch"]
LossFunction: TypeAlias = Callable[[Any, Any], Sums | Tensor | tuple[Sums | Tensor, Tensor]]
"""(the model's outputs, batch) -> unnormalized sums, or a scalar; with `ByLoss` also a divisor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss of a step: a function that returns a sum, its normalization and its weight.

    >>> from evenstep.tensors import cross_entropy
    >>> losses = {"nll": Loss(function=cross_entropy(), weight=0.5)}
    """

    function: LossFunction
    normalization: Normalization = field(default_factory=TokenMean)
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class LossValues:
    """Loss values, denominators and metrics of a finished step."""

    loss: float
    """The exact loss: the weighted sum of `losses`."""
    losses: dict[str, float]
    """Each loss: its sum over the step divided by its denominator, not weighted."""
    denominators: dict[str, float]
    reported: float
    """The loss whose gradient was taken; differs from `loss` only in per_micro_batch mode."""
    empty: bool
    """Whether all denominators are 0, so loss and gradients are 0."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    """What the gradient of each denominator is multiplied by at the end (`Gradients.combine`);
    empty if denominators were known before."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Scales loss sums before each backward, and gradients at the end of a step.

    `losses` maps each name to a normalization and a weight. Losses of the same normalization share
    a denominator. For each micro-batch, call `amounts`, `scales`, the backward of `objectives` and
    `bundle`. At the end of the step, call `finish` with the bundles merged and reduced over ranks,
    and multiply gradients by its `factors`.

    >>> from evenstep.train.gradients import Gradients
    >>> from evenstep.train.normalization import TokenMean
    >>> import torch
    >>> step_loss = StepLoss(losses={"nll": (TokenMean(), 1.0)}, constant=4.0)
    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> gradients, parts = Gradients([x]), []
    >>> for value, labels in ((3 * x, 3.0), (2 * x, 1.0)):
    ...     sums, amounts = {"nll": value}, {"loss_tokens": torch.tensor(labels)}
    ...     scales = step_loss.scales()
    ...     gradients.backward(step_loss.objectives(sums, scales))
    ...     parts.append(step_loss.bundle(sums, amounts, scales))
    >>> values = step_loss.finish(Bundle.merge(parts))
    >>> gradients.combine(values.factors)
    >>> values.loss, float(x.grad)
    (2.5, 1.25)
    """

    losses: Mapping[str, tuple[Normalization, float]]
    mode: Mode = "deferred"
    averaged_over: int = 1
    """F: number of ranks over which the framework averages gradients; 1 if it sums them."""
    constant: float = 1.0
    """c in deferred mode, a power of two; see `power_of_two`."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """Totals of the plan; in known mode they give every denominator."""
    expected: Mapping[str, float] | None = None
    """Each denominator, if it is known before the first backward: in known mode from `totals`, in
    counted mode by `counted`."""
    denominators: dict[str, Normalization] = field(init=False, repr=False, compare=False)
    """Distinct normalizations by name."""
    constants: dict[str, float] = field(init=False, repr=False, compare=False)
    """The denominators that do not depend on the step, by name."""
    varying: tuple[tuple[str, Normalization], ...] = field(init=False, repr=False, compare=False)
    """The others, by name."""
    separate: bool = field(init=False, repr=False, compare=False)
    """Whether each denominator has a backward and an accumulator of its own."""

    def __post_init__(self) -> None:
        distinct = {n.name: n for n, _ in reversed(list(self.losses.values()))}
        constants = _known(distinct, {})
        derived: dict[str, object] = {
            "denominators": distinct,
            "constants": constants,
            "varying": tuple(each for each in distinct.items() if each[0] not in constants),
            "separate": self.mode == "deferred" and len(distinct) > 1,
        }
        if self.mode == "known":
            derived["expected"] = _known(distinct, self.totals)
        for field_name, value in derived.items():
            object.__setattr__(self, field_name, value)
        if not self.losses:
            raise ConfigError("losses is empty; expected at least one loss.")
        for name, (normalization, weight) in self.losses.items():
            if not math.isfinite(weight):
                raise ConfigError(f"the weight of the loss {name!r} must be finite, got {weight}.")
            if distinct[normalization.name] != normalization:
                raise ConfigError(
                    f"two different normalizations are named {normalization.name!r}. Give each its "
                    f"own name."
                )
            if self.mode in ("known", "counted") and isinstance(normalization, ByLoss):
                raise ConfigError(
                    f"mode={self.mode!r} needs the denominator {normalization.name!r} before the "
                    f"step, but the loss function returns it. Use mode='deferred'."
                )
        expected = distinct if self.expected is None else self.expected
        missing = [name for name in distinct if name not in expected]
        if missing:
            raise ConfigError(
                f"mode='known' needs the denominators {missing}, but the totals of the step have "
                f"only {sorted(self.totals)}. Use mode='deferred', or pass totals that contain "
                f"them."
            )

    def without_loss(
        self, labels: float, predicted: float, over: Mapping[str, float] | None = None
    ) -> bool:
        """Whether a loss needs loss tokens and all `predicted` tokens are ignored.

        A loss needs them if only these have weights, or if the denominators `over` (default: the
        expected ones) of a step without loss tokens are 0. A step without samples, or with samples
        of one token only, is just empty.
        """
        if labels or not predicted > 0:
            return False
        if any(isinstance(n, LABELLED) for n in self.denominators.values()):
            return True
        over = over or self.expected or {}
        return not any(over[name] for name in self.denominators if name not in self.constants)

    def counted(self, amounts: Bundle) -> StepLoss:
        """With the denominators of counted mode: `amounts` of all micro-batches, over all ranks."""
        return replace(self, expected=self._denominators(amounts))

    # Each micro-batch --------------------------------------------------------------------------

    def amounts(self, batch: Batch, counted: bool = True) -> dict[str, Tensor]:
        """What the whole batch adds to each denominator, constants excluded.

        Context-parallel ranks share one batch, which must count once: `counted` is False on all
        of them but one.
        """
        samples = batch.unshared
        amounts = {name: each.amount(samples) for name, each in self.varying}
        return amounts if counted else {name: a.new_zeros(()) for name, a in amounts.items()}

    def scales(
        self, reduced: Mapping[str, Tensor] | None = None, micro_batches: int | None = None
    ) -> dict[str, float]:
        """The factor of each loss sum in the backward of one micro-batch.

        per_micro_batch mode needs `reduced`, the amounts at this position summed over ranks
        (`Bundle(amounts).reduce(...)`), and `micro_batches`, the number of positions of the step.
        Scales of the other modes are those of all micro-batches.
        """
        if self.mode == "deferred":
            return {name: weight / self.constant for name, (_, weight) in self.losses.items()}
        over = self.expected
        if over is None:
            if reduced is None or not micro_batches:
                raise InputError(
                    "mode='per_micro_batch' requires `reduced`, the amounts summed over ranks, and "
                    "`micro_batches`, the number of micro-batches per rank."
                )
            over = {name: float(amount) * micro_batches for name, amount in reduced.items()}
            over |= self.constants
        return {
            name: weight * _over(self.averaged_over, over[normalization.name])
            for name, (normalization, weight) in self.losses.items()
        }

    def objectives(
        self, sums: Mapping[str, Tensor], scales: Mapping[str, float]
    ) -> dict[str, list[Root]]:
        """What to call backward on: all loss sums that have a gradient, or those of a denominator,
        each with its scale."""
        objectives: dict[str, list[Root]] = {}
        for name, (normalization, _) in self.losses.items():
            roots = objectives.setdefault(normalization.name if self.separate else "all", [])
            if sums[name].requires_grad:
                roots.append((sums[name], torch.full_like(sums[name], scales[name])))
        return objectives

    def bundle(
        self,
        sums: Mapping[str, Tensor],
        amounts: Mapping[str, Tensor],
        scales: Mapping[str, float],
        metrics: Mapping[str, Metric] | None = None,
    ) -> Bundle:
        """Sums and metrics of this micro-batch, to be merged and reduced over ranks."""
        named = {f"sum/{name}": sums[name].detach() for name in self.losses}
        for name, amount in amounts.items():
            named[f"amount/{name}"] = amount
        if self.mode == "per_micro_batch":
            for name in self.losses:
                share = scales[name] / self.averaged_over
                named[f"reported/{name}"] = sums[name].detach().double() * share
        return Bundle(named, metrics or {})

    # The end of the step -----------------------------------------------------------------------

    def finish(self, reduced: Bundle) -> LossValues:
        """The values of the exact loss, and the factors that make its gradient.

        `reduced` is the sum of the bundles of all micro-batches and ranks.
        """
        over = self._denominators(reduced)
        for name, expected in (self.expected or {}).items():
            if not math.isclose(expected, over[name], rel_tol=1e-9, abs_tol=1e-9):
                raise InputError(
                    f"the totals give {expected} for {name!r}, but the micro-batches had "
                    f"{over[name]}, so the gradients are wrong by this ratio. Take the totals from "
                    f"the plan and samples that ran, or use mode='deferred'."
                )
        losses = {
            name: float(reduced.sums[f"sum/{name}"]) * _over(1.0, over[normalization.name])
            for name, (normalization, _) in self.losses.items()
        }
        reported = loss = sum(weight * losses[name] for name, (_, weight) in self.losses.items())
        if self.mode == "per_micro_batch":
            reported = sum(float(reduced.sums[f"reported/{name}"]) for name in self.losses)
        undo = self.averaged_over * self.constant
        counted = [value for name, value in over.items() if name not in self.constants]
        return LossValues(
            loss=loss,
            losses=losses,
            denominators=over,
            reported=reported,
            empty=bool(counted) and not any(counted),
            metrics=reduced.metrics,
            factors={name: _over(undo, value) for name, value in over.items()}
            if self.mode == "deferred"
            else {},
        )

    def _denominators(self, reduced: Bundle) -> dict[str, float]:
        """The denominators summed over the micro-batches that ran."""
        over = {}
        for name in self.denominators:
            value = self.constants.get(name)
            value = float(reduced.sums[f"amount/{name}"]) if value is None else value
            if not 0 <= value < math.inf:
                raise InputError(
                    f"the denominator {name!r} of this step is {value}; expected a finite number, "
                    f"0 or more. Use finite, non-negative weights."
                )
            over[name] = value
        return over


def _known(
    denominators: Mapping[str, Normalization], totals: Mapping[str, float]
) -> dict[str, float]:
    """The denominators that `totals` give, by name."""
    known = {name: each.known(totals) for name, each in denominators.items()}
    return {name: value for name, value in known.items() if value is not None}


def power_of_two(tokens: float) -> float:
    """The power of two nearest to a token budget, for `StepLoss.constant`.

    >>> power_of_two(5000), power_of_two(1)
    (4096.0, 1.0)
    """
    return 2.0 ** round(math.log2(tokens))


def _over(amount: float, denominator: float) -> float:
    """amount / denominator, or 0 if the denominator is 0."""
    return amount / denominator if denominator else 0.0


# The losses of a micro-batch ----------------------------------------------------------------------


def compute_losses(
    runner: Runner,
    heads: Heads,
    losses: Mapping[str, Loss],
    batch: Batch,
    shard: Batch | BatchShard,
    amounts: dict[str, Tensor],
) -> tuple[Any, dict[str, Sums | Tensor], dict[str, Metric]]:
    """(outputs of the model for a micro-batch, what each loss returns, all metrics).

    `shard` is this rank's part of the batch. Divisors that losses return are added to `amounts`.
    """
    batches: dict[str, Any] = {}  # of this rank, with the weights of each loss
    for name, loss in losses.items():
        whole = weighted(batch, loss.normalization)
        batches[name] = whole if runner.shard is None else runner.shard(whole)
    calls = 0 if batch.exchange is None else CALLS[batch.exchange.name]
    functions = {name: loss.function for name, loss in losses.items()}
    outputs, in_head = heads.run(shard, functions, batches)
    if batch.exchange is not None:
        check_exchanged(runner.model, batch, calls)

    values: dict[str, Sums | Tensor] = {}
    metrics: dict[str, Metric] = {}
    for name, loss in losses.items():
        value = in_head.get(name)
        if value is None:
            value = loss.function(*_inputs(loss.function, outputs, batches[name]))
        if isinstance(value, tuple) or isinstance(loss.normalization, ByLoss):
            value, divisor = _split(name, loss.normalization, value)
            amounts[loss.normalization.name] = divisor.detach().double()
        values[name] = value
        if isinstance(value, Sums):
            prefix = f"{name}/" if len(losses) > 1 else ""
            metrics |= {f"{prefix}{key}": each for key, each in value.metrics.items()}
    return outputs, values, metrics


def _inputs(function: Any, outputs: Any, batch: Any) -> tuple[Any, Any]:
    """What a loss function takes: (outputs, batch). Where samples share prefixes, a function that
    is no `PerSequence` gets the outputs of each sample."""
    if batch.tree is None or isinstance(function, PerSequence):
        return outputs, batch
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor) or outputs.shape[:2] != batch.tokens.shape:
        raise ConfigError(
            "this loss function needs one output per token where samples share prefixes. Let "
            "forward return logits, or plan without prefixes."
        )
    return batch.tree.of_samples(outputs), batch.tree.samples


def _split(name: str, normalization: Normalization, returned: Any) -> tuple[Sums | Tensor, Tensor]:
    """(loss, divisor) that a loss function has returned for `ByLoss`."""
    loss, divisor = returned if isinstance(returned, tuple) else (returned, None)
    if not isinstance(normalization, ByLoss):
        raise ConfigError(
            f"the loss {name!r} returned a divisor, but its normalization is {normalization!r}. "
            f"Set normalization=ByLoss(...), or return the loss alone."
        )
    if not isinstance(divisor, Tensor):
        raise ConfigError(
            f"the loss {name!r} is normalized by the divisor that it returns, but it returned "
            f"none. Return (loss, divisor), two tensors."
        )
    return loss, divisor
