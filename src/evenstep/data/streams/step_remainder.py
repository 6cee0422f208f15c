"""StepRemainder: the rest of an interrupted step, planned again for another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.ragged import IntArray, Segments
from evenstep.core.recipe import Recipe, Steps
from evenstep.errors import PlanError
from evenstep.planning.planner import plan_step


@dataclass(frozen=True, slots=True, eq=False)
class StepRemainder:
    """The micro-batches of a planned step, and what is needed to plan their segments again.

    The first plan determines the segments. Later plans take them as they are.
    """

    recipe: Recipe
    by_rank: list[list[MicroBatch]]
    about: Mapping[int, Mapping[str, Any]]
    """Sample id -> its index in the step, its group and its columns."""

    @classmethod
    def of(cls, plan: Plan, sample_ids: IntArray, about: Mapping[str, Any]) -> StepRemainder:
        """A whole step, as it was planned first."""
        by_rank = [
            [micro.renumbered(sample_ids) for micro in plan[0, rank]]
            for rank in range(plan.num_ranks)
        ]
        groups, columns = about["groups"], about["columns"]
        known = {
            int(sample_id): {
                "index": index,
                "group": None if groups is None else int(groups[index]),
                **{name: int(column[index]) for name, column in columns.items()},
            }
            for index, sample_id in enumerate(sample_ids)
        }
        # Ranks need not get equally many segments of a rest: that is not possible in general.
        return cls(replace(plan.recipe, steps=Steps(), equal_sizes=False), by_rank, known)

    def after(self, inside: Sequence[tuple[int, int]], ranks: int) -> StepRemainder:
        """What `ranks` ranks still have to do after the work in `inside`, applied in order.

        inside [(4, 2)], resumed on 4 ranks: their third micro-batch onwards. Resumed on 2 ranks:
        the same segments, planned for two ranks.
        """
        rest = self
        for at, (_, done) in enumerate(inside):
            following = inside[at + 1][0] if at + 1 < len(inside) else ranks
            rest = rest.without(done)
            if following != len(rest.by_rank):
                rest = rest.on(following)
        return rest

    def without(self, done: int) -> StepRemainder:
        """Without the first `done` micro-batches of every rank."""
        return replace(self, by_rank=[micros[done:] for micros in self.by_rank])

    def on(self, ranks: int) -> StepRemainder:
        """The same segments, planned for this number of ranks."""
        micros = [micro for each in self.by_rank for micro in each]
        if all(micro.is_empty for micro in micros):
            return replace(self, by_rank=[self.by_rank[0]] * ranks)
        segments = Segments(
            *(
                np.concatenate([getattr(micro.segments, column) for micro in micros])
                for column in ("sample", "start", "length")
            )
        )
        index = [self.about[sample_id]["index"] for sample_id in segments.sample.tolist()]
        order = np.lexsort((segments.start, index))
        whole = np.concatenate([micro.sample_lengths for micro in micros])[order]
        ends = np.concatenate([micro.sample_ends for micro in micros])[order]
        segments = segments.take(order)
        known = [self.about[sample_id] for sample_id in segments.sample.tolist()]
        groups = None
        if known and known[0]["group"] is not None:
            groups = np.array([each["group"] for each in known])
        columns = {
            name: np.array([each[name] for each in known], np.int64) for name in self.recipe.columns
        }
        recipe = replace(self.recipe, topology=replace(self.recipe.topology, dp=ranks))
        try:
            plan = plan_step(
                segments.length,
                recipe,
                groups=groups,
                columns=columns,
                names=segments.sample,
                last=True,
            )
        except PlanError as error:
            before = len(self.by_rank)
            raise PlanError(
                f"the rest of a step that {before} ranks have begun cannot be planned for {ranks} "
                f"({error}) Resume on {before} ranks, or from a cursor between two steps."
            ) from None
        by_rank = [
            [_renumbered(micro, segments, whole, ends) for micro in plan[0, rank]]
            for rank in range(ranks)
        ]
        return replace(self, recipe=recipe, by_rank=by_rank)


def _renumbered(
    micro: MicroBatch, segments: Segments, whole: IntArray, ends: IntArray
) -> MicroBatch:
    """A micro-batch of indices into `segments` -> a micro-batch of those segments."""
    index = micro.segments.sample
    return replace(
        micro, segments=segments.take(index), sample_lengths=whole[index], truncated_to=ends[index]
    )
