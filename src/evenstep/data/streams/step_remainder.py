"""StepRemainder: what is left of a step whose ranks stopped within it, dealt to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe, Steps
from evenstep.core.segments import Segments
from evenstep.planning.planner import plan_step


@dataclass(frozen=True, slots=True, eq=False)
class StepRemainder:
    """A planned step as segments of numbered samples, and what is needed to plan it again.

    Segments were cut by the first plan and are never divided again, so each later plan takes
    them as they are.
    """

    recipe: Recipe
    by_rank: list[list[MicroBatch]]
    about: Mapping[int, Mapping[str, Any]]
    """Sample number -> its place in the step, its group and its columns."""

    @classmethod
    def of(cls, plan: Plan, samples: IntArray, about: Mapping[str, Any]) -> StepRemainder:
        """The whole of a step, planned for its first ranks."""
        by_rank = [
            [micro.renumbered(samples) for micro in plan[0, rank]] for rank in range(plan.num_ranks)
        ]
        groups, columns = about["groups"], about["columns"]
        known = {
            int(number): {
                "place": at,
                "group": None if groups is None else int(groups[at]),
                **{name: int(column[at]) for name, column in columns.items()},
            }
            for at, number in enumerate(samples)
        }
        return cls(replace(plan.recipe, steps=Steps()), by_rank, known)

    def micro_batches(
        self, inside: Sequence[tuple[int, int]], rank: int, ranks: int
    ) -> list[MicroBatch]:
        """What `rank` of `ranks` has yet to do, after each of `inside` did its part in turn.

        inside [(4, 2)] on 4 ranks: their third micro-batch onwards. On 2 ranks: the same
        segments, planned anew for two.
        """
        here = self
        for at, (_, done) in enumerate(inside):
            following = inside[at + 1][0] if at + 1 < len(inside) else ranks
            here = here.without(done)
            if following != len(here.by_rank):
                here = here.on(following)
        return here.by_rank[rank]

    def without(self, done: int) -> StepRemainder:
        """Without the first `done` micro-batches of every rank."""
        return replace(self, by_rank=[micros[done:] for micros in self.by_rank])

    def on(self, ranks: int) -> StepRemainder:
        """The same segments, planned for so many ranks."""
        micros = [micro for each in self.by_rank for micro in each]
        pieces = Segments(
            *(
                np.concatenate([getattr(micro.segments, column) for micro in micros])
                for column in ("sample", "start", "length")
            )
        )
        place = [self.about[number]["place"] for number in pieces.sample.tolist()]
        order = np.lexsort((pieces.start, place))
        whole = np.concatenate([micro.sample_lengths for micro in micros])[order]
        ends = np.concatenate([micro.sample_ends for micro in micros])[order]
        pieces = pieces.take(order)
        known = [self.about[number] for number in pieces.sample.tolist()]
        groups = None
        if known and known[0]["group"] is not None:
            groups = np.array([each["group"] for each in known])
        limited = self.recipe.limits.columns
        columns = {name: np.array([each[name] for each in known], np.int64) for name in limited}
        recipe = replace(self.recipe, topology=replace(self.recipe.topology, dp=ranks))
        plan = plan_step(
            pieces.length, recipe, groups=groups, columns=columns, names=pieces.sample, last=True
        )
        by_rank = [
            [_named(micro, pieces, whole, ends) for micro in plan[0, rank]] for rank in range(ranks)
        ]
        return replace(self, recipe=recipe, by_rank=by_rank)


def _named(micro: MicroBatch, pieces: Segments, whole: IntArray, ends: IntArray) -> MicroBatch:
    """A micro-batch of pieces -> of the samples' own segments."""
    at = micro.segments.sample
    return replace(micro, segments=pieces.take(at), sample_lengths=whole[at], truncated_to=ends[at])
