"""StepResult: what a step cost, held and reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from evenstep.core import summary
from evenstep.errors import InputError
from evenstep.train.bundle import Bundle
from evenstep.train.collectives import Collective
from evenstep.train.step_loss import LossValues, StepLoss

BUSY, BUSY_MOST, FLOPS = "evenstep/busy", "evenstep/busy_most", "evenstep/flops"
TOKENS, SLOTS, LABELS = "evenstep/tokens", "evenstep/slots", "evenstep/labels"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one rank's step.

    wait         the model had nothing to run because the next micro-batch was not ready
    prepare      reading, collating and copying, mostly while the model ran
    compute      forwards and backwards; the last includes what DDP or FSDP exchange in it
    communicate  our own sums over ranks
    total        all of it, from the call to its end
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
    """The loss, metrics and measures of a step.

    Where denominators were known, nothing has been exchanged but gradients: `reduced` is False,
    and what concerns all ranks can be read after `reduce`, one all-reduce, which every rank calls
    when somebody wants to know.
    """

    timings: Timings
    tokens: int
    """Real tokens that this rank ran."""
    slots: int
    """The same with padding."""
    num_micro_batches: int
    planned_imbalance: float | None
    """Largest over mean cost of ranks, as planned, for how often they synchronise."""
    ages: tuple[float, ...] = ()
    """Seconds from the making of each sample to its forward, where that is known."""
    peak_flops: float | None = None
    bundle: Bundle = field(repr=False)
    numbers: LossValues | None = None
    known: tuple[StepLoss, Mapping[str, float]] | None = field(default=None, repr=False)
    """What is needed to conclude later, where nothing was exchanged yet."""

    def __repr__(self) -> str:
        """The loss, and what this rank ran, in one line."""
        planned = self.planned_imbalance
        parts = (
            summary.attempt(lambda: f"loss {self.loss:.6g}" if self.reduced else "not reduced"),
            summary.counted(self.num_micro_batches, "micro-batch"),
            summary.counted(self.tokens, "token"),
            summary.fill(self.tokens, self.slots),
            "" if planned is None else f"imbalance {planned:.3f} planned",
            summary.attempt(lambda: f"imbalance {self.measured_imbalance:.3f} measured"),
            f"{self.timings.total:.3g} s",
        )
        return summary.line("StepResult", parts)

    @property
    def reduced(self) -> bool:
        """Whether the numbers of all ranks are here."""
        return self.numbers is not None

    def reduce(self, collective: Collective) -> StepResult:
        """The same with the numbers of all ranks. Every rank must call it, or none."""
        if self.reduced:
            return self
        assert self.known is not None
        step_loss, totals = self.known
        numbers = step_loss.finish([], self.bundle.reduce(collective), totals)
        return replace(self, numbers=numbers)

    @property
    def _numbers(self) -> LossValues:
        if self.numbers is None:
            raise InputError(
                "this step's denominators were known, so its numbers were not exchanged and this "
                "rank knows only its own part. Call result.reduce(collective) on every rank."
            )
        return self.numbers

    @property
    def loss(self) -> float:
        """The exact loss of the step, over all micro-batches and ranks."""
        return self._numbers.loss

    @property
    def losses(self) -> dict[str, float]:
        """Each loss by itself."""
        return self._numbers.losses

    @property
    def empty(self) -> bool:
        """Whether the whole step had no label, or none that weighs anything; loss and gradients
        are 0 then."""
        return self._numbers.empty or float(self._numbers.metrics[LABELS].value) == 0

    @property
    def deviation(self) -> float:
        """By how much the loss whose gradient was taken differs from the exact one: 0, except
        with per-micro-batch normalization."""
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
        """Largest over mean time that ranks were busy. Waiting for each other is not counted."""
        metrics = self._numbers.metrics
        mean = float(metrics[BUSY].value)
        return float(metrics[BUSY_MOST].value) / mean if mean > 0 else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks a second."""
        return float(self._numbers.metrics[TOKENS].value) / self.timings.total

    @property
    def padding(self) -> float:
        """The part of all ranks' slots that holds no token."""
        metrics = self._numbers.metrics
        return 1 - float(metrics[TOKENS].value) / float(metrics[SLOTS].value)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs of real tokens over what the ranks could have done in the time."""
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
            "tokens_per_second": self.tokens_per_second,
            "padding": self.padding,
            "imbalance/planned": self.planned_imbalance,
            "imbalance/measured": self.measured_imbalance,
            "mfu": self.mfu,
            "age": sum(self.ages) / len(self.ages) if self.ages else None,
            **{f"seconds/{name}": getattr(self.timings, name) for name in Timings.__slots__},
        }
        return {name: value for name, value in found.items() if value is not None}
