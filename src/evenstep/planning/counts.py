"""How many micro-batches per rank: which numbers are tried, and which is taken."""

from __future__ import annotations

from evenstep.core.recipe import Recipe

MORE = 2  # multiples more than the fewest that are tried


def more_counts(fewest: int, recipe: Recipe) -> list[int]:
    """The numbers above the fewest that are tried; `steps.micro_batches` is never exceeded."""
    multiple, most = recipe.topology.multiple, recipe.steps.micro_batches
    counts = [fewest + more * multiple for more in range(1, MORE + 1)]
    return [count for count in counts if most is None or count <= most]


def first_worth(times: list[float], saving: float) -> int:
    """The first whose time no other undercuts by more than the share `saving`.

    >>> first_worth([100, 99.5, 90], 0.01), first_worth([100, 99.5], 0.01)
    (2, 0)
    """
    least = min(times)
    return next(at for at, time in enumerate(times) if time * (1 - saving) <= least)
