"""Metric: a number with its reduction over sequences, micro-batches and ranks."""

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
    return {name: _merge(name, found) for name, found in by_name.items()}


def _merge(name: str, found: list[Metric]) -> Metric:
    ways = {metric.reduction for metric in found}
    if len(ways) > 1:
        raise InputError(
            f"the metric {name!r} has several reductions: {', '.join(sorted(ways))}. Use one "
            f"reduction per name."
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
