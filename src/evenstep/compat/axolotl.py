"""axolotl's sampler of packed batches.

Arguments and batches are those of `axolotl.utils.samplers.MultipackBatchSampler`. Unlike there,
bins that ranks run at the same time have similar work, and no sample is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import BatchSampler

from evenstep.compat.filled import filled_packs
from evenstep.compat.over_ranks import most_over_ranks
from evenstep.compat.rank_packs import WORK
from evenstep.core.layout import Packed
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe, Topology, World
from evenstep.errors import PlanError
from evenstep.planning.planner import make_plan

__all__ = ["MultipackBatchSampler"]


class MultipackBatchSampler(BatchSampler):  # type: ignore[misc]
    """Batches of `batch_size` bins; a bin is a list of samples within `batch_max_len` tokens.

    A bin has at most `bin_size` samples. Consecutive batches, which accelerate gives to the ranks
    in turn, have similar work; which ones come first depends on the epoch alone. With `sequential`
    samples stay in the sampler's order. `drop_last` drops a last batch with too few bins, which
    only occurs if there are fewer samples than bins.

    The arguments from `packing_efficiency_estimate` on that are not named here have no effect:
    packing needs neither estimates nor processes.

    >>> sampler = MultipackBatchSampler(range(4), 1, 8, lengths=[5, 3, 4, 4], bin_size=4)
    >>> sorted(sampler)
    [[[0, 1]], [[2, 3]]]
    """

    def __init__(
        self,
        sampler: Iterable[int],
        batch_size: int,
        batch_max_len: int,
        lengths: Sequence[int] | IntArray,
        bin_size: int | None,
        packing_efficiency_estimate: float = 1.0,
        drop_last: bool = True,
        num_count_samples: int = 4,
        sequential: bool = False,
        group_size: int = 100_000,
        num_processes: int | None = None,
        safe_mode: bool = True,
        mp_start_method: str = "fork",
        **kwargs: Any,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.batch_max_len, self.bin_size = batch_max_len, bin_size
        self.lengths = np.asarray(lengths, np.int64)
        self.sequential, self.group_size = sequential, group_size
        self.epoch = 0
        self.total_tokens_used = self.total_token_slots = 0
        self._batches: list[list[list[int]]] | None = None
        self._length: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Take a new order from the sampler."""
        self.epoch, self._batches = epoch, None

    def generate_batches(self, set_stats: bool = False) -> list[list[list[int]]]:
        """All batches of the epoch: [batch][bin][sample]."""
        if self._batches is None:
            samples = np.array(list(self.sampler), np.int64)
            bins = [
                samples[first : first + self.group_size][bin_]
                for first in range(0, len(samples), self.group_size)
                for bin_ in self._bins(self.lengths[samples[first : first + self.group_size]])
            ]
            size = self.batch_size
            whole = len(bins) - len(bins) % size if self.drop_last else len(bins)
            self._batches = [
                [bin_.tolist() for bin_ in bins[at : min(at + size, whole)]]
                for at in range(0, whole, size)
            ]
        if set_stats:
            held = [sample for batch in self._batches for bin_ in batch for sample in bin_]
            self.total_tokens_used += int(self.lengths[held].sum())
            self.total_token_slots += sum(map(len, self._batches)) * self.batch_max_len
        return self._batches

    def _bins(self, lengths: IntArray) -> list[IntArray]:
        """The samples of each bin; bins that run at the same time are adjacent."""
        lanes = 1 if self.sequential else self.batch_size * World.detect().size
        recipe = Recipe(
            layout=Packed(
                max_tokens=self.batch_max_len, samples=None if self.sequential else self.bin_size
            ),
            topology=Topology(dp=lanes),
            cost=WORK,
            balance="none" if self.sequential else "refined",
        )
        plan = make_plan(np.maximum(lengths, 1), recipe)
        try:
            lists = filled_packs(plan)
        except PlanError:  # fewer samples than bins
            lists = [[micro.segments.sample for micro in lane] for lane in plan[0]]
        waves = list(zip(*lists, strict=True))
        if not self.sequential:
            order = np.random.default_rng([self.epoch, len(lengths)]).permutation(len(waves))
            waves = [waves[wave] for wave in order]
        return [bin_ for wave in waves for bin_ in wave if len(bin_)]

    def __iter__(self) -> Iterator[list[list[int]]]:
        batches = self.generate_batches(set_stats=True)
        return iter(batches if self._length is None else batches[: self._length])

    def __len__(self) -> int:
        """The number of batches, the least of all ranks; collective on the first call."""
        if self._length is None:
            self._length = self.gather_len_batches(len(self.generate_batches()))
        return self._length

    def gather_len_batches(self, num: int) -> int:
        """The least `num` of all ranks."""
        group = dist.group.WORLD if dist.is_initialized() else None
        return -most_over_ranks([-num], group)[0]

    def efficiency(self) -> float:
        """Tokens over slots of the batches so far."""
        if self.total_token_slots == 0:
            self.generate_batches(set_stats=True)
        return self.total_tokens_used / max(self.total_token_slots, 1)
