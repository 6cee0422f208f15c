"""StepWork: one planned step, from which every rank takes its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe
from evenstep.data.streams.estimate import Estimate
from evenstep.data.streams.position import StreamPosition

Progress: TypeAlias = Callable[[int, int], None]


class StepBounds(NamedTuple):
    """Where a step begins and ends, and whether it is the last of its epoch."""

    before: StreamPosition
    after: StreamPosition
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """The plan of a step, whose sample i has the id `sample_ids[i]` in the source.

    `rest` holds what each rank still has to do of a step that was begun before; None for a whole
    step.
    """

    plan: Plan
    sample_ids: IntArray
    rest: list[list[MicroBatch]] | None = None

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a rank, with samples named by id."""
        if self.rest is not None:
            return tuple(self.rest[rank])
        return tuple(micro.renumbered(self.sample_ids) for micro in self.plan[0, rank])

    @property
    def count(self) -> int:
        """Micro-batches per rank."""
        return int(self.plan.cell_offsets[1]) if self.rest is None else len(self.rest[0])


class StepSource(Protocol):
    """Where the steps of a planned stream come from: a recipe and an order, or a saved plan.

    An epoch has `len` units. A step takes the next of them.
    """

    @property
    def recipe(self) -> Recipe: ...

    def __len__(self) -> int: ...

    def next_step(self, at: StreamPosition) -> tuple[int, bool] | None:
        """(units of the next step, whether they are the last of the epoch); None at its end."""

    def work(self, bounds: StepBounds) -> StepWork:
        """The step, or what is left of it."""

    def plan_epoch(self, epoch: int, progress: Progress | None = None) -> Plan:
        """One plan of a whole epoch; `progress(done, total)` is called after each step."""

    def known_count(self, bounds: StepBounds) -> int | None:
        """Micro-batches per rank of a step, if that is known without planning it."""

    def same_epoch(self, epoch: int) -> int:
        """The first epoch that has the same steps as this one."""

    def details(self) -> dict[str, Any]:
        """What else determines the steps, besides `belongs` and the recipe; as plain data."""

    def belongs(self, *, inside: bool) -> dict[str, str]:
        """What a cursor between steps, or inside one, belongs to."""

    @property
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; may be an estimate."""
