"""SecondWork: work of its own that a column of the samples measures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.cost import Cost
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.validate import truth_field
from evenstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondWork:
    """A phase of each micro-batch whose work is not in the tokens, such as an image encoder.

    column      the per-sample column that measures it, for example image patches
    cost        what a sample costs in this phase, by its column, in the unit of `Recipe.cost`;
                None makes both works of a step equally large
    same_waves  in each wave, either every rank has a sample with this work or no rank has: an
                encoder that communicates would wait for ranks without images

    A plan evens out both works: its modelled time is the sum of the two, each as `sync_every` says.

    >>> SecondWork(column="patches").column
    'patches'
    """

    column: str
    cost: Cost | None = None
    same_waves: bool = False

    def __post_init__(self) -> None:
        if self.column == "" or type(self.column) is not str:
            raise ConfigError(
                f"second_work.column must be the name of a column, got {self.column!r}."
            )
        if self.cost is not None and not isinstance(self.cost, Cost):
            raise ConfigError(f"second_work.cost must be Cost, got {self.cost!r}.")
        if self.cost is not None and self.cost.per_micro_batch:
            raise ConfigError(
                f"second_work.cost.per_micro_batch must be 0, got {self.cost.per_micro_batch:g}. "
                f"Set cost.per_micro_batch."
            )
        truth_field(self, "second_work.same_waves")

    def of_column(self, column: IntArray) -> FloatArray:
        """The work of samples with this column; none where the column is 0.

        Without a cost, in units of the column: see `scale`.
        """
        cost = Cost() if self.cost is None else self.cost
        return np.where(column > 0, cost.of_lengths(column), 0.0)

    def scale(self, first: float, second: float) -> float:
        """What the works of a step are multiplied with, given the totals of both works."""
        return 1.0 if self.cost is not None or not second else first / second
