"""StepLoss: how the sums of micro-batches become the gradient of one mean over the step.

A step minimises L = sum over its losses k of w_k S_k / D_k. S_k sums weight times value over all
micro-batches and ranks, D_k is the loss's denominator. A backward runs when a micro-batch is there,
and by then D_k may not be known. Frameworks average gradients over F ranks, which F undoes.

known            Every D_k is known before the step. A micro-batch's backward is of
                 F * sum of w_k s_k / D_k. Nothing is left to do; D_k is verified at the end.
deferred         A backward is of sum of w_k s_k / c, with one constant c for all micro-batches and
                 ranks of the step. At the end every gradient is multiplied by F * c / D. This is
                 exact for ONE denominator D: another loss would need w_j S_j / D_j * D / c in its
                 backward, for the multiplication to leave w_j S_j / D_j, and D is what is missing.
                 That holds even if D_j itself is known. So two denominators are refused, unless
                 `separate` gives each a backward and an accumulator of its own.
per_micro_batch  A backward is of F * sum of w_k s_k / (A_k M): A_k is what all ranks' micro-batches
                 at this position add to D_k, M the number of positions. It is the exact loss if
                 all A_k are equal, and another one otherwise; how far off is reported.

With powers of two for c and w_k, scaling before backward changes exponents alone, so deferring
costs no more than the rounding of F * c / D and of one multiplication. c near the number of tokens
keeps 16-bit gradients in their familiar range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor

from evenstep.core.validate import one_of, truth_value, whole_number
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.metrics import Metric
from evenstep.train.bundle import Bundle
from evenstep.train.gradients import SeparateGradients, rescale
from evenstep.train.normalization import Normalization

Mode: TypeAlias = Literal["known", "deferred", "per_micro_batch"]


@dataclass(frozen=True, slots=True)
class LossValues:
    """The numbers of a finished step."""

    loss: float
    """The exact loss: the weighted sum of `losses`."""
    losses: dict[str, float]
    """Each loss by itself: its sum over the step over its denominator, not weighted."""
    denominators: dict[str, float]
    reported: float
    """The loss whose gradient was taken: another one than `loss` only in per_micro_batch mode."""
    empty: bool
    """Whether nothing was trained, so that loss and gradients are 0."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def deviation(self) -> float:
        """Reported minus exact."""
        return self.reported - self.loss


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLoss:
    """What every micro-batch's sums are multiplied by, and the gradients at the end of a step.

    `losses` names each loss with its normalization and weight. Losses of the same normalization
    share a denominator. For each micro-batch: `amounts` of the batch, `scales`, a backward of
    `objective`, and its `bundle`; for each step `finish`, with the bundles merged and reduced.

    >>> from evenstep.train.normalization import TokenMean
    >>> import torch
    >>> step_loss = StepLoss(losses={"nll": (TokenMean(), 1.0)}, constant=4.0)
    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> parts = []
    >>> for value, labels in ((3 * x, 3.0), (2 * x, 1.0)):
    ...     sums, amounts = {"nll": value}, {"loss_tokens": torch.tensor(labels)}
    ...     scales = step_loss.scales()
    ...     step_loss.objective(sums, scales).backward()
    ...     parts.append(step_loss.bundle(sums, amounts, scales))
    >>> step_loss.finish([x], Bundle.merge(parts)).loss, float(x.grad)
    (2.5, 1.25)
    """

    losses: Mapping[str, tuple[Normalization, float]]
    mode: Mode = "deferred"
    averaged_over: int = 1
    """F: the ranks over which the framework averages gradients; 1 where it sums them."""
    constant: float = 1.0
    """c, in deferred mode; a power of two. `power_of_two(tokens)` is one near a budget."""
    separate: bool = False
    """In deferred mode: one backward for each denominator, into `SeparateGradients`."""

    def __post_init__(self) -> None:
        one_of("mode", self.mode, Mode)
        whole_number("averaged_over", self.averaged_over)
        truth_value("separate", self.separate)
        if not 0 < self.constant < math.inf:
            raise ConfigError(
                f"constant is {self.constant}, so gradients would vanish or turn. Set it above 0."
            )
        if not self.losses:
            raise ConfigError("there is no loss, so nothing would be trained. Name at least one.")
        for name, (normalization, weight) in self.losses.items():
            if not math.isfinite(weight):
                raise ConfigError(f"the loss {name!r} weighs {weight}. Give it a finite weight.")
            if self.denominators[normalization.name] != normalization:
                raise ConfigError(
                    f"two different normalizations are called {normalization.name!r}, so their "
                    f"denominators would be added up. Give each a name of its own."
                )
        if self.mode == "deferred" and len(self.denominators) > 1 and not self.separate:
            raise ConfigError(
                f"losses with the denominators {sorted(self.denominators)} were deferred together, "
                f"but one multiplication at the end of a step can make up for one denominator "
                f"only; the others' gradients would be wrong. Give all losses one normalization, "
                f"or know all denominators before the step (mode='known', with totals of the plan "
                f"or Constant), or set separate=True for one backward each, on plain parameters."
            )
        if self.separate and self.mode != "deferred":
            raise ConfigError(
                f"separate=True defers denominators, but the mode is {self.mode!r}, where one "
                f"backward is enough. Leave it out."
            )

    @property
    def denominators(self) -> dict[str, Normalization]:
        """The normalizations by the name of their denominator, each once."""
        return {n.name: n for n, _ in reversed(list(self.losses.values()))}

    # Each micro-batch --------------------------------------------------------------------------

    def amounts(self, batch: Batch, counted: bool = True) -> dict[str, Tensor]:
        """What the whole batch adds to each denominator; constants are left out.

        Context-parallel ranks hold shards of one batch, which must count once: `counted` is False
        on all of them but one.
        """
        found = {name: n.amount(batch) for name, n in self.denominators.items() if not _fixed(n)}
        return found if counted else {name: value.new_zeros(()) for name, value in found.items()}

    def scales(
        self,
        totals: Mapping[str, float] | None = None,
        *,
        reduced: Mapping[str, Tensor] | None = None,
        micro_batches: int | None = None,
    ) -> dict[str, float]:
        """The factor of each loss's sum in the backward of one micro-batch.

        `totals` are the plan's, for known mode. In per_micro_batch mode, `reduced` are the amounts
        of the micro-batches at this position, summed over ranks (`Bundle(amounts).reduce(...)`),
        and `micro_batches` how many positions the step has.
        """
        if self.mode == "deferred":
            return {name: weight / self.constant for name, (_, weight) in self.losses.items()}
        over = self._known(totals or {}) if self.mode == "known" else {}
        if self.mode == "per_micro_batch":
            if reduced is None or not micro_batches:
                raise InputError(
                    "per_micro_batch divides by what all ranks' micro-batches at one position "
                    "hold, and by the number of positions. Pass `reduced` and `micro_batches`."
                )
            for name, normalization in self.denominators.items():
                always = normalization.known({})
                over[name] = float(reduced[name]) * micro_batches if always is None else always
        factors = {name: _over(self.averaged_over, value) for name, value in over.items()}
        return {name: weight * factors[n.name] for name, (n, weight) in self.losses.items()}

    def objective(self, sums: Mapping[str, Tensor], scales: Mapping[str, float]) -> Tensor:
        """What to call backward on: the losses' sums, scaled and added."""
        parts = [sums[name] * scales[name] for name in self.losses]
        return sum(parts[1:], start=parts[0])

    def objectives(
        self, sums: Mapping[str, Tensor], scales: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """The same by denominator, for `SeparateGradients.backward`."""
        parts: dict[str, Tensor] = {}
        for name, (normalization, _) in self.losses.items():
            held = parts.get(normalization.name, 0.0)
            parts[normalization.name] = held + sums[name] * scales[name]
        return parts

    def bundle(
        self,
        sums: Mapping[str, Tensor],
        amounts: Mapping[str, Tensor],
        scales: Mapping[str, float],
        metrics: Mapping[str, Metric] | None = None,
    ) -> Bundle:
        """What the step must know of this micro-batch, as sums that ranks can add up."""
        named = {f"sum/{name}": sums[name].detach().double() for name in self.losses}
        named |= {f"amount/{name}": amount for name, amount in amounts.items()}
        if self.mode == "per_micro_batch":
            named |= {
                f"reported/{name}": named[f"sum/{name}"] * (scales[name] / self.averaged_over)
                for name in self.losses
            }
        return Bundle(named, metrics or {})

    # The end of the step -----------------------------------------------------------------------

    def finish(
        self,
        gradients: Iterable[Tensor] | SeparateGradients,
        reduced: Bundle,
        totals: Mapping[str, float] | None = None,
    ) -> LossValues:
        """Make the gradients those of the exact loss, and say what it is.

        `gradients` are the parameters, after the last backward and before clipping. `reduced` is
        the sum of all micro-batches' bundles over all ranks.
        """
        if self.separate is not isinstance(gradients, SeparateGradients):
            raise InputError(
                "gradients are kept by denominator if and only if separate=True. Pass "
                "SeparateGradients then, and the parameters otherwise."
            )
        over = self._denominators(reduced)
        if self.mode == "known":
            _verify(self._known(totals or {}), over)
        undo = self.averaged_over * self.constant
        factors = {name: _over(undo, value) for name, value in over.items()}
        if isinstance(gradients, SeparateGradients):
            gradients.combine(factors)
        elif self.mode == "deferred":
            rescale(gradients, next(iter(factors.values())))
        losses = {
            name: float(reduced.sums[f"sum/{name}"]) * _over(1.0, over[normalization.name])
            for name, (normalization, _) in self.losses.items()
        }
        loss = sum(weight * losses[name] for name, (_, weight) in self.losses.items())
        reported = loss
        if self.mode == "per_micro_batch":
            reported = sum(float(reduced.sums[f"reported/{name}"]) for name in self.losses)
        counted = [over[name] for name, n in self.denominators.items() if not _fixed(n)]
        return LossValues(
            loss=loss,
            losses=losses,
            denominators=over,
            reported=reported,
            empty=bool(counted) and not any(counted),
            metrics=reduced.metrics,
        )

    def _known(self, totals: Mapping[str, float]) -> dict[str, float]:
        known = {name: n.known(totals) for name, n in self.denominators.items()}
        missing = [name for name, value in known.items() if value is None]
        if missing:
            raise ConfigError(
                f"the denominators {missing} are not known before the step; its totals tell "
                f"{sorted(totals)}. Use mode='deferred', or totals that have them."
            )
        return {name: value for name, value in known.items() if value is not None}

    def _denominators(self, reduced: Bundle) -> dict[str, float]:
        """What the step's micro-batches really added up to."""
        found = {}
        for name, normalization in self.denominators.items():
            always = normalization.known({})
            value = float(reduced.sums[f"amount/{name}"]) if always is None else always
            if not 0 <= value < math.inf:
                raise InputError(
                    f"the denominator {name!r} of this step is {value}, so its loss has no "
                    f"meaning. Give weights that are finite and not negative."
                )
            found[name] = value
        return found


def power_of_two(tokens: float) -> float:
    """The power of two nearest to a token budget, as `StepLoss.constant`.

    >>> power_of_two(5000), power_of_two(1)
    (4096.0, 1.0)
    """
    return 2.0 ** round(math.log2(tokens))


def _fixed(normalization: Normalization) -> bool:
    return normalization.known({}) is not None


def _over(amount: float, denominator: float) -> float:
    """0 where nothing was counted: then there is nothing to divide."""
    return amount / denominator if denominator else 0.0


def _verify(promised: Mapping[str, float], found: Mapping[str, float]) -> None:
    for name, value in found.items():
        if not math.isclose(promised[name], value, rel_tol=1e-9, abs_tol=1e-9):
            raise InputError(
                f"the totals promised {promised[name]} for {name!r} but the micro-batches had "
                f"{value}, so the gradients are off by that much. Take the totals from the plan "
                f"and samples that ran, or use mode='deferred'."
            )
