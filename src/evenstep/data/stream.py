"""Stream: what planned and pooled streams have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from evenstep.core.cursor import Cursor
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.recipe import Recipe
from evenstep.core.step import Step
from evenstep.core.world import World
from evenstep.data.pool import micro_batch


class Stream(Protocol):
    """Steps of one rank, from a chosen place on. Iterating does not move that place."""

    world: World
    recipe: Recipe
    infinite_loop: bool
    max_num_steps: int | None

    @property
    def ends_together(self) -> bool:
        """Whether all ranks come to the end of a finite stream after the same step."""

    def __iter__(self) -> Iterator[Step]: ...

    def __len__(self) -> int:
        """An estimate where lengths decide it."""

    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of several workers of this rank, who take turns."""

    def start(self, workers: int = 1) -> Cursor:
        """The cursor of this rank before its first step."""

    def join(self, cursors: Sequence[Cursor]) -> Cursor:
        """What several workers' cursors, old and new, say together."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor behind the step that was given out last, as plain data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin behind the step that the state was taken after."""

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Begin at the beginning of an epoch."""

    def skip_batches(self, steps: int) -> None:
        """Begin so many steps later."""


def until_all_end(
    steps: Iterator[Step], anyone: Callable[[bool], bool], recipe: Recipe
) -> Iterator[Step]:
    """The steps of this rank, and empty ones until every rank has come to its end.

    `anyone(mine)` says whether any rank has a step: a reduction that all ranks take part in, once
    for each step. So nobody waits for a rank that has left, and no sample is dropped.

    >>> list(until_all_end(iter([]), lambda mine: mine, recipe=None))  # type: ignore
    []
    """
    before: Step | None = None
    while True:
        step = next(steps, None)
        if not anyone(step is not None):
            return
        if step is None:
            step = _empty(before, recipe)
        before = step
        yield step


def _empty(before: Step | None, recipe: Recipe) -> Step:
    """A step in which this rank has nothing to do."""
    dummy: MicroBatch = micro_batch([], recipe)
    if before is None:
        nowhere = Cursor(belongs={}, step=0, place={})
        count = recipe.steps.micro_batches or 1
        return Step(
            number=0,
            epoch=0,
            micro_batches=(dummy,) * count,
            samples={},
            cursor=nowhere,
            budget=recipe.layout.max_tokens,
        )
    return replace(
        before,
        number=before.number + 1,
        micro_batches=(dummy,) * len(before),
        samples={},
        cursor=replace(before.cursor, step=before.cursor.step + 1),
        lost={},
        batches=None,
    )
