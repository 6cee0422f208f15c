"""Metric: a number about sequences that knows how it adds up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.errors import InputError

Reduction: TypeAlias = Literal["sum", "mean", "min", "max"]


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A value and how it merges with its like, over sequences, micro-batches and ranks.

    A mean carries the sum and the count, so that merging means of unequal size stays exact:
    a mean of means is not the mean. Values are float64 and detached: large counts do not drift,
    and no graph is held alive.

    >>> first, second = Metric.mean(torch.tensor(6.0), 3), Metric.mean(torch.tensor(4.0), 1)
    >>> float(merge([{"loss": first}, {"loss": second}])["loss"].value)
    2.5
    """

    reduction: Reduction
    total: Tensor
    count: Tensor | None = None

    @classmethod
    def sum(cls, total: Tensor) -> Metric:
        """Adds up."""
        return cls("sum", total.detach().double())

    @classmethod
    def mean(cls, total: Tensor, count: Tensor | float) -> Metric:
        """`total` summed over `count` things: tokens, sequences, or weights."""
        total = total.detach().double()
        return cls("mean", total, torch.as_tensor(count, device=total.device).detach().double())

    @classmethod
    def min(cls, values: Tensor) -> Metric:
        """The least of `values`; infinity where there are none, which never wins."""
        return cls("min", _extreme(values, "min"))

    @classmethod
    def max(cls, values: Tensor) -> Metric:
        """The greatest of `values`; minus infinity where there are none."""
        return cls("max", _extreme(values, "max"))

    def emptied(self) -> Metric:
        """The same metric of nothing: merging it with its like changes nothing."""
        nothing = {"min": float("inf"), "max": float("-inf")}.get(self.reduction, 0.0)
        count = None if self.count is None else torch.zeros_like(self.count)
        return Metric(self.reduction, torch.full_like(self.total, nothing), count)

    @property
    def value(self) -> Tensor:
        """The number itself; a mean over nothing is not a number."""
        return self.total if self.count is None else self.total / self.count


def merge(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of several sequences, micro-batches or ranks -> those of all of them together.

    Each name merges over those that have it, so that an empty micro-batch changes nothing.
    """
    by_name: dict[str, list[Metric]] = {}
    for each in metrics:
        for name, metric in each.items():
            by_name.setdefault(name, []).append(metric)
    return {name: _merge(name, found) for name, found in by_name.items()}


def _merge(name: str, found: list[Metric]) -> Metric:
    ways = {metric.reduction for metric in found}
    if len(ways) > 1:
        raise InputError(
            f"the metric {name!r} is a {' here and a '.join(sorted(ways))} there, so it has no "
            f"single meaning. Give it one reduction, or two names."
        )
    first = found[0]
    totals = torch.stack([metric.total for metric in found])
    if first.reduction in ("min", "max"):
        return Metric(first.reduction, getattr(totals, f"a{first.reduction}")(0))
    counts = [metric.count for metric in found if metric.count is not None]
    count = torch.stack(counts).sum(0) if counts else None
    return Metric(first.reduction, totals.sum(0), count)


def _extreme(values: Tensor, way: Literal["min", "max"]) -> Tensor:
    worst = float("inf") if way == "min" else float("-inf")
    flat = values.detach().double().reshape(-1)
    flat = torch.cat((flat, flat.new_full((1,), worst)))
    return flat.amin() if way == "min" else flat.amax()
