"""AReaL's allocation of sequences to micro-batches and ranks.

Arguments, results and errors are those of `areal.utils.seqpack`. Both allocators plan alike: groups
of similar work within the capacity, where a sequence of L tokens takes 24576 · L + L².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from evenstep.compat.rank_packs import pack_recipe, packs_needed, packs_of
from evenstep.core.ragged import IntArray, Ragged, rounded_up
from evenstep.core.recipe import Steps, Topology
from evenstep.core.text import one_of
from evenstep.errors import InputError, PlanError
from evenstep.planning.partition import partition
from evenstep.planning.planner import plan_step

__all__ = ["balanced_greedy_partition", "ffd_allocate", "get_allocate_fn", "kk_allocate"]

_Algorithm = Literal["ffd", "kk"]


class AllocateError(InputError, RuntimeError):
    """Values that cannot be allocated; AReaL raises `RuntimeError`."""


def ffd_allocate(
    values: Sequence[int], capacity: int, min_groups: int | None, n_groups_divisor: int = 1
) -> list[list[int]]:
    """The indices of each group: groups of similar work, none above the capacity, none empty.

    There are at least `min_groups`, and `n_groups_divisor` divides their number.

    >>> ffd_allocate([100, 200, 300, 150, 250], capacity=500, min_groups=2)
    [[1, 2], [0, 3, 4]]
    """
    lengths, count = _counted(values, capacity, min_groups, n_groups_divisor)
    return packs_of(lengths, pack_recipe(capacity), count)


def kk_allocate(
    values: Sequence[int],
    capacity: int,
    min_groups: int | None,
    n_groups_divisor: int = 1,
    equal_size: bool = False,
) -> list[list[int]]:
    """The same as `ffd_allocate`; with `equal_size`, all groups have equally many values.

    >>> kk_allocate([9, 8, 2, 1], capacity=20, min_groups=2, equal_size=True)
    [[0, 3], [1, 2]]
    """
    if not equal_size:
        return ffd_allocate(values, capacity, min_groups, n_groups_divisor)
    lengths, count = _counted(values, capacity, min_groups, n_groups_divisor)
    if len(lengths) % count:
        raise AllocateError(
            f"equal_size=True requires len(values) ({len(lengths)}) to be divisible by k ({count})."
        )
    recipe = replace(
        pack_recipe(capacity),
        topology=Topology(dp=count),
        steps=Steps(micro_batches=1),
        equal_sizes=True,
    )
    try:
        plan = plan_step(np.maximum(lengths, 1), recipe)
    except PlanError as error:
        raise AllocateError(f"no equal groups within capacity {capacity}: {error}") from None
    return [sorted(rank[0].segments.sample.tolist()) for rank in plan[0]]


def get_allocate_fn(algorithm: _Algorithm = "ffd") -> Callable[..., list[list[int]]]:
    """`ffd_allocate` or `kk_allocate`, by name.

    >>> get_allocate_fn("kk").__name__
    'kk_allocate'
    """
    one_of("packing algorithm", algorithm, _Algorithm)
    return kk_allocate if algorithm == "kk" else ffd_allocate


def balanced_greedy_partition(nums: Sequence[int], K: int) -> list[list[int]]:
    """The indices of each of K groups with equally many values and similar sums.

    >>> balanced_greedy_partition([1000, 900, 200, 100], 2)
    [[0, 3], [1, 2]]
    """
    if len(nums) < K:
        raise InputError(f"Number of items ({len(nums)}) must be >= K ({K}).")
    if len(nums) % K:
        raise InputError(f"The length of nums, {len(nums)}, must be divisible by K ({K}).")
    return Ragged.group(partition(_array(nums), K, equal_sizes=True), K).tolist()


def _counted(
    values: Sequence[int], capacity: int, min_groups: int | None, divisor: int
) -> tuple[IntArray, int]:
    """(the values, how many groups they form)."""
    lengths, least = _array(values), max(min_groups or 0, divisor)
    if lengths.max(initial=0) > capacity:
        at = int(lengths.argmax())
        raise AllocateError(f"value {lengths[at]} at {at} is larger than capacity {capacity}.")
    if len(lengths) < least:
        raise AllocateError(f"Number of values {len(lengths)} is smaller than min_groups {least}.")
    needed = packs_needed(lengths, pack_recipe(capacity))
    count = int(rounded_up(max(needed, least), divisor))
    if count > len(lengths):
        raise AllocateError(
            f"{len(lengths)} values cannot form {count} groups, which capacity {capacity}, "
            f"min_groups {least} and n_groups_divisor {divisor} need."
        )
    return lengths, count


def _array(values: Any) -> IntArray:
    return np.asarray(values, np.int64)
