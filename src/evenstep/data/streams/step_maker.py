"""StepMaker: planned work -> the steps of ranks, with totals over all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenstep.core.measures import time_of_works, works_of
from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.ragged import FloatArray, IntArray, frozen
from evenstep.core.step import Cursor, Step
from evenstep.data.streams.lookup import SampleLookup
from evenstep.data.streams.position import StreamPosition
from evenstep.data.streams.step_work import StepWork


@dataclass(frozen=True, slots=True, eq=False)
class StepMaker:
    """Makes the steps of a stream. `loss_tokens` are those of each sample, if they are known.

    `fingerprint` is that of the stream.
    """

    lookup: SampleLookup
    loss_tokens: NDArray[np.integer] | None
    fingerprint: str

    def steps(
        self, work: StepWork, at: StreamPosition, after: Cursor, ranks: Iterable[int]
    ) -> Iterator[Step]:
        """The step at a position for each of these ranks; `after` is the cursor after it."""
        plan, recipe, whole = work.plan, work.plan.recipe, work.rest is None
        over = recipe.longest_segment
        beyond = 0 if over is None else int((plan.lengths > over).sum())
        overflow = {"drop": "dropped", "truncate": "truncated"}.get(recipe.overflow)
        # [rank, micro-batch]
        works = [each.reshape(plan.num_ranks, -1) for each in works_of(plan)] if whole else []
        totals = self._totals(work.sample_ids, plan, works) if whole else {}
        fingerprint = self._fingerprint(at, after)
        sample_ids = frozen(work.sample_ids) if whole else None
        samples = self.lookup.in_epoch(at.epoch)
        for rank in ranks:
            micro_batches = work.micro_batches(rank)
            yield Step(
                number=at.step,
                epoch=at.epoch,
                micro_batches=micro_batches,
                samples=samples,
                cursor=after,
                totals=totals,
                lost={overflow: beyond} if overflow and beyond else {},
                budget=recipe.layout.budget,
                ranks=plan.num_ranks if work.rest is None else len(work.rest),
                loss_tokens=self._labels(micro_batches) if "loss_tokens" in totals else {},
                plan=plan if whole else None,
                sample_ids=sample_ids,
                costs=tuple(np.sum(works, axis=0)[rank].tolist()) if whole else (),
                fingerprint=fingerprint,
            )

    def _fingerprint(self, at: StreamPosition, after: Cursor) -> str:
        text = f"{self.fingerprint} {at.step} {at.epoch} {at.position} {at.inside} {after.step}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _labels(self, micro_batches: Iterable[MicroBatch]) -> dict[int, int]:
        """The number of loss tokens of each sample of the micro-batches."""
        assert self.loss_tokens is not None
        ids = sorted({i for micro in micro_batches for i in micro.segments.sample.tolist()})
        return dict(zip(ids, self.loss_tokens[ids].tolist(), strict=True))

    def _totals(
        self, sample_ids: IntArray, plan: Plan, works: list[FloatArray]
    ) -> dict[str, float]:
        """Totals over all ranks; loss tokens only if they are known and no sample can be lost."""
        run = plan.step_of >= 0
        ideal = sum(float(work.sum()) for work in works) / plan.num_ranks
        totals: dict[str, float] = {
            "tokens": int(plan.segments.length.sum()),
            "empty": int((np.diff(plan.segment_offsets) == 0).sum()),
            "imbalance_step": time_of_works(works, "step") / ideal if ideal else 1.0,
            "imbalance_micro_batch": time_of_works(works, "micro_batch") / ideal if ideal else 1.0,
        }
        if self.lookup.on_error == "skip":
            return totals  # unreadable samples are not known yet
        totals["samples"] = int(run.sum())
        if self.loss_tokens is not None and totals["tokens"] == plan.lengths[run].sum():
            labels = self.loss_tokens[sample_ids[run]]
            totals["loss_tokens"] = int(labels.sum())
            totals["sequences"] = int((labels > 0).sum())
            if plan.groups is not None:
                totals["groups"] = len(np.unique(plan.groups[run][labels > 0]))
        return totals
