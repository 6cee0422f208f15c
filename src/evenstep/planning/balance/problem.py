"""Problem: the units of one step, and the packs that they go into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.measures import time_of_works
from evenstep.core.ragged import IntArray, rounded_up, sum_by
from evenstep.core.recipe import Recipe
from evenstep.planning.balance.packs import Movable, Room, Shape
from evenstep.planning.units import Units


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Units to assign to packs of `capacity`: a wave has `rows` packs on each of `ranks` ranks.

    An *address* numbers the packs of a step: `(wave * ranks + rank) * rows + row`.
    """

    units: Units
    capacity: int
    recipe: Recipe
    unit: int = 1
    """Packs that all have one size have a multiple of this."""

    def rounded(self, size: int) -> int:
        """The size of packs that all have one size and hold `size`."""
        return rounded_up(size, self.unit)

    @property
    def kinds_matter(self) -> bool:
        """Whether units with second work have waves of their own."""
        second = self.recipe.second_work
        return second is not None and second.same_waves and bool((self.units.second > 0).any())

    def special_waves(self, address: IntArray) -> int:
        """How many waves, from the first on, hold second work; -1 if it may be anywhere."""
        if not self.kinds_matter:
            return -1
        own = address[self.units.second > 0]
        return int(own.max(initial=-1)) // self.per_wave + 1

    @property
    def ranks(self) -> int:
        """The data-parallel ranks."""
        return self.recipe.topology.dp

    @property
    def rows(self) -> int:
        """The packs of a micro-batch."""
        return self.recipe.layout.packs_per_micro_batch

    @property
    def per_wave(self) -> int:
        """The packs of a wave."""
        return self.ranks * self.rows

    @property
    def by_rank(self) -> bool:
        """Whether ranks synchronise once per step."""
        return self.recipe.sync_every == "step"

    @property
    def joint(self) -> bool:
        """Whether packs are formed to be even: not for a packer's bins or another balance."""
        return self.recipe.balance == "refined" and self.recipe.layout.packer is None

    @property
    def free(self) -> bool:
        """Whether units may go anywhere, and only to even out one work."""
        recipe = self.recipe
        grouped = int(self.units.count.max(initial=1)) > 1
        asked = recipe.equal_sizes or recipe.second_work is not None
        return self.joint and not (grouped or asked)

    @property
    def additive(self) -> bool:
        """Whether a micro-batch costs what its units cost, and nothing for its width."""
        recipe = self.recipe
        shaped = recipe.layout.static or recipe.topology.equal_widths or recipe.equal_tokens
        several = self.rows > 1 or recipe.second_work is not None
        return not (shaped or several) and recipe.layout.round_to == 1

    @property
    def simple(self) -> bool:
        """Whether units are free, and the time depends on the works of the ranks alone."""
        return self.free and self.additive

    @property
    def mean(self) -> float:
        """The mean work of a rank."""
        return float(self.units.cost.sum()) / self.ranks

    def time(self, address: IntArray, waves: int) -> float:
        """The modelled time of what depends on the addresses: the units' first and second work."""
        works = [self.units.cost]
        works += [self.units.second] if self.recipe.second_work is not None else []
        loads = [sum_by(address // self.rows, work, waves * self.ranks) for work in works]
        by_rank = [load.reshape(waves, self.ranks).T for load in loads]
        return time_of_works(by_rank, self.recipe.sync_every)

    def full_time(self, address: IntArray, waves: int) -> float:
        """The modelled time of the step where costs are additive, empty micro-batches included."""
        recipe, packs = self.recipe, waves * self.per_wave
        load = sum_by(address, self.units.cost, packs) + recipe.cost.per_micro_batch
        held = np.bincount(address, minlength=packs)
        if held.min() == 0:
            width = np.array([recipe.layout.widths(0, recipe.width_unit)])
            load[held == 0] += float(recipe.cost.of_lengths(width)[0])
        return time_of_works([load.reshape(waves, self.ranks).T], recipe.sync_every)

    def shape(self, waves: int, special: int = -1) -> Shape:
        """The packs for `improve`."""
        equal = self.recipe.equal_sizes
        return Shape(self.ranks, self.rows, waves, self.by_rank, equal, special)

    @property
    def movable(self) -> Movable:
        """The units for `improve`."""
        units = self.units
        kind = (units.second > 0).astype(np.int64)
        return Movable(units.size, units.cost, units.second, units.extra, units.count, kind)

    @property
    def room(self) -> Room:
        """What a pack may hold, for `improve`."""
        return Room(self.capacity, self.units.caps)
