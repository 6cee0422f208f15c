"""Stream: the interface that planned and pooled streams share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from evenstep.core.plan import MicroBatch
from evenstep.core.recipe import Recipe, World
from evenstep.core.step import Cursor, Step
from evenstep.data.streams.batcher import micro_batch
from evenstep.data.streams.estimate import Estimate
from evenstep.errors import ConfigError


class Stream(Protocol):
    """Steps of one rank, from a start that the caller sets. Iterating does not move the start."""

    world: World
    recipe: Recipe
    infinite_loop: bool
    max_num_steps: int | None

    @property
    def fingerprint(self) -> str:
        """A digest of what must be the same on all ranks: data, order, recipe, ranks."""

    @property
    def done(self) -> int:
        """Steps before the start, over all epochs."""

    @property
    def steps_per_epoch(self) -> Estimate:
        """Number of steps in an epoch; may be an estimate."""

    @property
    def ends_together(self) -> bool:
        """Whether all ranks of a finite stream end after the same step."""

    def __iter__(self) -> Iterator[Step]: ...

    def __len__(self) -> int:
        """Steps of one pass; an estimate if they depend on lengths."""

    def walk(self, worker: int = 0, workers: int = 1, turn: int | None = None) -> Iterator[Step]:
        """The steps of one of several workers of this rank, which take turns."""

    def start(self, workers: int = 1) -> Cursor:
        """The cursor of this rank before its first step."""

    def join(self, cursors: Sequence[Cursor]) -> Cursor:
        """Merge cursors of several workers, old and new, into one."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the step that was yielded last, as plain data."""

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Start after the step that the state was taken at. `allow` names what has changed."""

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Start at the beginning of an epoch, or at a loaded position within it."""

    def skip_batches(self, steps: int) -> None:
        """Start `steps` steps later."""


def world_for(recipe: Recipe, world: World | None) -> World:
    """The world of a stream (default: a single rank). Its size must be `recipe.topology.dp`."""
    found, topology = World() if world is None else world, recipe.topology
    if found.size != topology.dp:
        remedy = f"Set topology.dp to {found.size}."
        if found.size == 1:
            alone = topology.cp * topology.tp * topology.pp == 1
            detected = f"World.detect({'' if alone else 'recipe.topology'})"
            remedy = f"Under torchrun pass world={detected}, or set topology.dp to 1."
        raise ConfigError(
            f"the recipe plans for {topology.dp} data-parallel ranks but the world has "
            f"{found.size}. {remedy}"
        )
    return found


def steps_of_pass(stream: Stream, endless: bool) -> int:
    """Steps of one pass: those of an epoch, but no more than are left of `max_num_steps`; all that
    are left if the stream is `endless`."""
    most = stream.max_num_steps
    left = None if most is None else max(most - stream.done, 0)
    if not endless:
        steps = stream.steps_per_epoch.steps
        return steps if left is None else min(steps, left)
    if left is None:
        raise TypeError(
            "an endless stream has no length. Set max_num_steps, or infinite_loop=False."
        )
    return left


def digest_of(data: Mapping[str, Any]) -> str:
    """A digest of plain data, for `Cursor.belongs`."""
    text = json.dumps(data, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def until_all_end(
    steps: Iterator[Step], anyone: Callable[[bool], bool], recipe: Recipe
) -> Iterator[Step]:
    """The steps of this rank, followed by empty steps until every rank has ended.

    `anyone(mine)` returns whether any rank has a step: a reduction over all ranks, called once
    per step. So no rank waits for one that has ended, and no sample is dropped.

    >>> from evenstep import Packed
    >>> others = iter([True, False])  # they have one more step, this rank has none
    >>> recipe = Recipe(layout=Packed(max_tokens=8))
    >>> steps = until_all_end(iter([]), lambda mine: mine or next(others), recipe)
    >>> [step.micro_batches[0].is_empty for step in steps]
    [True]
    """
    before: Step | None = None
    while True:
        step = next(steps, None)
        if not anyone(step is not None):
            return
        if step is None:
            step = empty_step(before, recipe)
        before = step
        yield step


def empty_step(before: Step | None, recipe: Recipe) -> Step:
    """A step without work for this rank: as many empty micro-batches as the step before had."""
    empty: MicroBatch = micro_batch([], recipe)
    if before is None:
        count = recipe.steps.micro_batches or 1
        return Step(
            number=0,
            epoch=0,
            micro_batches=(empty,) * count,
            samples={},
            cursor=Cursor(belongs={}, step=0, place={}),
            budget=recipe.layout.budget,
            ranks=recipe.topology.dp,
        )
    return replace(
        before,
        number=before.number + 1,
        micro_batches=(empty,) * len(before),
        samples={},
        cursor=replace(before.cursor, step=before.cursor.step + 1),
        lost={},
        batches=None,
        plan=None,
        sample_ids=None,
    )
