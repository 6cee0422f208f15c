"""StepResult: loss, metrics and timings of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from evenstep.core.text import attempt, counted, fill, line
from evenstep.errors import InputError
from evenstep.train.bundle import Bundle
from evenstep.train.collectives import Collective
from evenstep.train.kept import Kept
from evenstep.train.step_loss import LossValues, StepLoss

BUSY, BUSY_MOST, FLOPS = "evenstep/busy", "evenstep/busy_most", "evenstep/flops"
TOKENS, SLOTS, LABELS = "evenstep/tokens", "evenstep/slots", "evenstep/labels"
PREDICTED = "evenstep/predicted"  # tokens that are not the first of their sample
SQUARE = "evenstep/gradient_square"
GROUPS_MOST = "evenstep/groups_most"  # of a rank, counted by GroupMean

ANY_CAUSE = (
    "Labels are -100 or loss masks 0 for every token. A chat template without {% generation %} "
    "marks gives assistant_masks of zeros: encode chats with evenstep.data.ChatEncoder."
)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one rank's step.

    wait         waiting for the next micro-batch to be prepared
    prepare      reading, collating and copying, mostly while the model runs
    compute      forwards and backwards, including the communication of DDP or FSDP in them
    communicate  the runner's own sums over ranks
    total        from the call to its end
    first        from the call to the first forward
    """

    wait: float = 0.0
    prepare: float = 0.0
    compute: float = 0.0
    communicate: float = 0.0
    total: float = 0.0
    first: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The loss, metrics and measurements of a step.

    If denominators were known before the step, ranks have exchanged gradients only and `reduced`
    is False. Call `reduce` on every rank (one all-reduce) before reading values of all ranks.

        result = runner.run(step).reduce(runner.collective)
        log(result.to_dict())
    """

    timings: Timings
    tokens: int
    """Real tokens of this rank."""
    slots: int
    """Real tokens and padding of this rank."""
    num_micro_batches: int
    planned_imbalance: float | None
    """Planned cost of the slowest rank over the mean: per wave with fully_shard, else per step."""
    busy: tuple[float, ...] = ()
    """Busy seconds of each micro-batch of this rank, without waiting for other ranks."""
    costs: tuple[float, ...] = ()
    """Planned cost of each of them; empty if the step has no plan."""
    ages: tuple[float, ...] = ()
    """Seconds from the creation of each fed sample to its forward."""
    peak_flops: float | None = None
    skipped: bool = False
    """Whether the step was not finite and its gradient was discarded (`on_nonfinite="skip"`)."""
    kept: Kept | None = field(default=None, repr=False)
    """Loss values of this rank's samples, with `Runner(keep=...)`."""
    bundle: Bundle = field(repr=False)
    numbers: LossValues | None = None
    known: tuple[StepLoss, Mapping[str, float]] | None = field(default=None, repr=False)
    """What `reduce` needs, if values were not exchanged yet."""

    def __repr__(self) -> str:
        """The loss and what this rank ran, in one line."""
        planned = self.planned_imbalance
        parts = (
            attempt(lambda: f"loss {self.loss:.6g}" if self.reduced else "not reduced"),
            counted(self.num_micro_batches, "micro-batch"),
            counted(self.tokens, "token"),
            fill(self.tokens, self.slots),
            "" if planned is None else f"imbalance {planned:.3f} planned",
            attempt(lambda: f"imbalance {self.measured_imbalance:.3f} measured"),
            "skipped" if self.skipped else "",
            f"{self.timings.total:.3g} s",
        )
        return line("StepResult", parts)

    @property
    def reduced(self) -> bool:
        """Whether the values of all ranks are available."""
        return self.numbers is not None

    def reduce(self, collective: Collective) -> StepResult:
        """The result with the values of all ranks. Every rank must call it, or none."""
        if self.reduced:
            return self
        assert self.known is not None
        step_loss, totals = self.known
        numbers = step_loss.finish([], self.bundle.reduce(collective), totals)
        found = replace(self, numbers=numbers)
        if found.without_loss:
            raise InputError(f"no token of this step counts in the loss, on any rank. {ANY_CAUSE}")
        return found

    @property
    def _numbers(self) -> LossValues:
        if self.numbers is None:
            raise InputError(
                "this result is not reduced over ranks. Call result.reduce(collective) on every "
                "rank first."
            )
        return self.numbers

    @property
    def loss(self) -> float:
        """The exact loss of the step, over all micro-batches and ranks."""
        return self._numbers.loss

    @property
    def losses(self) -> dict[str, float]:
        """Each loss by name, not weighted."""
        return self._numbers.losses

    @property
    def grad_norm(self) -> float:
        """The norm of this step's gradient, over all parameters, ranks and shards.

        Of the exact gradient: before clipping, without a scaler's scale, and without gradients
        that were in `.grad` before the step.
        """
        square, factor = float(self._numbers.metrics[SQUARE].value), self._numbers.factor
        return math.sqrt(square) * factor if factor else 0.0

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients of the step are finite, on all ranks."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def empty(self) -> bool:
        """Whether the step has no loss tokens, or all weights are 0; loss and gradients are 0."""
        return self._numbers.empty or float(self._numbers.metrics[LABELS].value) == 0

    @property
    def without_loss(self) -> bool:
        """Whether labels are needed and all of them are ignored, although there are tokens to
        predict. A step without samples, or with samples of one token only, is just empty."""
        assert self.known is not None
        metrics, (step_loss, _) = self._numbers.metrics, self.known
        none = float(metrics[LABELS].value) == 0 and float(metrics[PREDICTED].value) > 0
        return none and step_loss.needs_labels(self._numbers.denominators)

    @property
    def deviation(self) -> float:
        """The loss whose gradient was taken minus the exact loss.

        0, except with mode="per_micro_batch".
        """
        return self._numbers.deviation

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the loss functions, by name."""
        return {
            name: float(metric.value)
            for name, metric in self._numbers.metrics.items()
            if not name.startswith("evenstep/")
        }

    @property
    def measured_imbalance(self) -> float:
        """Busy time of the slowest rank over the mean, without waiting for other ranks."""
        metrics = self._numbers.metrics
        mean = float(metrics[BUSY].value)
        return float(metrics[BUSY_MOST].value) / mean if mean > 0 else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second, over all ranks."""
        return float(self._numbers.metrics[TOKENS].value) / self.timings.total

    @property
    def padding(self) -> float:
        """Share of padding in the slots of all ranks."""
        metrics = self._numbers.metrics
        return 1 - float(metrics[TOKENS].value) / float(metrics[SLOTS].value)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: FLOPs of real tokens over peak FLOPs in the same time."""
        flops = self._numbers.metrics.get(FLOPS)
        if flops is None or self.peak_flops is None:
            return None
        return float(flops.value) / (self.timings.total * self.peak_flops)

    def to_dict(self) -> dict[str, float]:
        """Plain numbers for a logger."""
        found: dict[str, float | None] = {
            **self.metrics,
            "loss": self.loss,
            **{f"loss/{name}": value for name, value in self.losses.items()},
            "grad_norm": self.grad_norm,
            "tokens_per_second": self.tokens_per_second,
            "padding": self.padding,
            "imbalance/planned": self.planned_imbalance,
            "imbalance/measured": self.measured_imbalance,
            "mfu": self.mfu,
            "age": sum(self.ages) / len(self.ages) if self.ages else None,
            **{f"seconds/{name}": getattr(self.timings, name) for name in Timings.__slots__},
        }
        return {name: value for name, value in found.items() if value is not None}
