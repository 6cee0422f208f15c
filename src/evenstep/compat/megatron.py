"""A packing scheduler for Megatron-LM.

Replaces the packs of `DpBalancedScheduler`, which fills packs in order, by those of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenstep.compat.filled import filled_packs
from evenstep.compat.rank_packs import WORK, pipeline
from evenstep.core.cost import Cost
from evenstep.core.layout import Packed
from evenstep.core.recipe import Recipe
from evenstep.errors import PlanError
from evenstep.planning.planner import make_plan

__all__ = ["PlannedPacking"]


class SchedulerError(PlanError, AssertionError):
    """Samples that cannot be scheduled; Megatron raises `AssertionError`."""


class PlannedPacking:
    """`get_groups_and_subsamples` of a packing scheduler; the rest stays Megatron's.

        from megatron.core.datasets import data_schedule

        class EvenstepScheduler(PlannedPacking, data_schedule.DpBalancedScheduler):
            pass

    Uses `max_seqlen_per_dp_cp_rank`, `cp_size`, `dp_size` and
    `microbatch_group_size_per_vp_stage` of the scheduler and, on dev, `max_num_seqs`. Set `cost`
    in the subclass to balance for another model.
    """

    cost: Cost = WORK
    max_seqlen_per_dp_cp_rank: int
    cp_size: int
    dp_size: int
    microbatch_group_size_per_vp_stage: int | None
    max_num_seqs: int | None = None

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]]
    ) -> list[list[list[int]]]:
        """The sample ids of each rank of the dp x cp group, by micro-batch.

        Ranks of one context-parallel group have the same samples. Pure: all ranks get the same
        result from the same lengths.
        """
        ids = [sample for sample, _ in sample_id_seqlens]
        recipe = Recipe(
            layout=Packed(
                max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size, samples=self.max_num_seqs
            ),
            topology=pipeline(self.dp_size, self.microbatch_group_size_per_vp_stage),
            cost=self.cost,
        )
        lengths = np.array([length for _, length in sample_id_seqlens], np.int64)
        try:
            ranks = filled_packs(make_plan(lengths, recipe, names=np.array(ids, np.int64)))
        except PlanError as error:
            raise SchedulerError(str(error)) from None
        return [
            [[ids[at] for at in np.sort(pack)] for pack in packs for _ in range(self.cp_size)]
            for packs in zip(*ranks, strict=True)
        ]
