"""Backward: from the loss sums of micro-batches to the exact gradient of a step in `.grad`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep.tensors.losses import Metric
from evenstep.train.bundle import Bundle
from evenstep.train.collectives import Collective
from evenstep.train.framework import Framework, sum_gradients
from evenstep.train.gradient_norm import square_share
from evenstep.train.gradients import SeparateGradients
from evenstep.train.recovery import held_gradients
from evenstep.train.result import SQUARE
from evenstep.train.step_checks import check_constants, check_trainable
from evenstep.train.step_loss import LossValues, StepLoss
from evenstep.train.stopwatch import Stopwatch


class Finished(NamedTuple):
    """The numbers of a step after its last backward."""

    bundle: Bundle
    """Of this rank."""
    numbers: LossValues | None
    """Of all ranks; None if they are exchanged later."""
    counts: Tensor
    """The sums of `counts` over ranks, maybe on a device that has not computed them yet."""


class Backward:
    """Runs the backwards of a step; `finish` exchanges, rescales and measures their gradients.

    `sums` if the runner, not the framework, sums gradients over ranks. `scaler` is a GradScaler.
    """

    def __init__(
        self,
        framework: Framework,
        parameters: list[Tensor],
        step_loss: StepLoss,
        ranks: Collective,
        sums: bool,
        scaler: Any = None,
    ) -> None:
        self.framework, self.parameters, self.ranks = framework, parameters, ranks
        self.step_loss, self.sums, self.scaler = step_loss, sums, scaler
        self.separate = SeparateGradients(parameters) if step_loss.separate else None
        self.scale: Tensor | None = None
        """Of the GradScaler in this step."""

    def exchanges(self, last: bool) -> bool:
        """Whether the framework exchanges gradients in a micro-batch, which is the last or not."""
        # Sharded accumulators of several denominators hold exchanged gradients only.
        return (last or self.separate is not None) and not self.sums

    def run(self, sums: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        """The backward of a micro-batch."""
        if self.separate is None:
            objective = self.step_loss.objective(sums, scales)
            check_trainable(objective, self.parameters)
            self._scaled(objective).backward()
            return
        objectives = self.step_loss.objectives(sums, scales)
        for objective in objectives.values():
            check_trainable(objective, self.parameters)
        self.separate.backward({name: self._scaled(each) for name, each in objectives.items()})

    def gradients(self) -> list[Tensor]:
        """All gradients of the step so far, exchanged or not."""
        if self.separate is not None:
            return self.separate.tensors
        own = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [*own, *held_gradients(self.framework)]

    def finish(
        self,
        measured: Sequence[Bundle],
        totals: Mapping[str, float],
        communicate: Stopwatch,
        later: bool,
        counts: Sequence[float] = (),
    ) -> Finished:
        """The gradients become those of the step; `counts` are small numbers to sum over ranks.

        `later` leaves the exchange of numbers to `StepResult.reduce`, if denominators were known
        before the step.
        """
        summed = torch.tensor(counts)
        if self.separate is None:
            summed = self._sum_gradients(communicate, counts)
            measured = [*measured, self._square()]
        bundle = Bundle.merge(measured)
        if later and self.step_loss.ahead and self.ranks.size > 1:
            return Finished(bundle, None, summed)
        with communicate:
            reduced = bundle.reduce(self.ranks)
        check_constants(reduced)
        numbers = self.step_loss.finish(self.separate or self.parameters, reduced, totals)
        if self.separate is not None:
            self._sum_gradients(communicate)
            with communicate:
                square = self._square().reduce(self.ranks).metrics
            numbers = replace(numbers, metrics={**numbers.metrics, **square})
        return Finished(bundle, numbers, summed)

    def _scaled(self, objective: Tensor) -> Tensor:
        if self.scaler is None:
            return objective
        self.scale = self.scaler.scale(objective.detach().new_ones(()))
        scaled: Tensor = self.scaler.scale(objective)
        return scaled

    def _sum_gradients(self, communicate: Stopwatch, counts: Sequence[float] = ()) -> Tensor:
        """Sum gradients, unless the framework has, and `counts` over ranks."""
        with communicate:
            if self.sums:
                return sum_gradients(self.parameters, self.ranks, counts)
            summed = torch.tensor(counts)
            return self.ranks.all_reduce_sum(summed) if counts else summed

    def _square(self) -> Bundle:
        """This rank's share of the squared norm of the gradient, without a scaler's scale."""
        share = square_share(self.parameters, self.ranks.size, self.framework.kind == "fsdp")
        if self.scale is not None:
            share = share / self.scale.double().square()
        return Bundle({}, {SQUARE: Metric.sum(share)})
