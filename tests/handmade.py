"""Plans written by hand, for tests of code that uses plans."""

from collections.abc import Sequence

import numpy as np

from evenstep import Padded, Plan, Recipe
from tests.internals import Segments, offsets_of

Rows = Sequence[Sequence[int]]  # the samples of each row
Steps = Sequence[Sequence[Sequence[Rows]]]  # [step][rank][micro-batch]


def handmade(lengths: Sequence[int], steps: Steps, recipe: Recipe) -> Plan:
    """The plan that runs whole samples as given; a micro-batch `[[]]` is empty."""
    unit = recipe.width_unit
    samples: list[int] = []
    rows: list[int] = []
    micro_rows: list[int] = []
    cells: list[int] = []
    widths: list[int] = []
    step_of = np.full(len(lengths), -1)
    for number, step in enumerate(steps):
        for rank in step:
            cells.append(len(rank))
            for micro in rank:
                micro_rows.append(len(micro))
                used = [sum(-(-lengths[s] // unit) * unit for s in row) for row in micro]
                widths.append(getattr(recipe.layout, "pad_to", None) or max(unit, *used, 1))
                for row in micro:
                    rows.append(len(row))
                    samples += row
                    step_of[list(row)] = number
    taken = np.array(samples, np.int64)
    return Plan(
        recipe=recipe,
        lengths=np.array(lengths, np.int64),
        step_of=step_of,
        segments=Segments(taken, np.zeros_like(taken), np.array(lengths, np.int64)[taken]),
        row_offsets=offsets_of(np.array(rows, np.int64)),
        micro_offsets=offsets_of(np.array(micro_rows, np.int64)),
        cell_offsets=offsets_of(np.array(cells, np.int64)),
        widths=np.array(widths, np.int64),
    )


def first_fit(lengths: Sequence[int], recipe: Recipe, per_step: int) -> Plan:
    """A simple packed or padded plan: first fit decreasing, dealt round robin."""
    ranks, capacity = recipe.topology.dp, recipe.capacity
    assert capacity is not None
    steps = []
    for start in range(0, len(lengths), per_step):
        chosen = range(start, min(start + per_step, len(lengths)))
        bins: list[list[int]] = []
        for sample in sorted(chosen, key=lambda s: (-lengths[s], s)):
            for bin_ in bins:
                if _fits(lengths, [*bin_, sample], recipe, capacity):
                    bin_.append(sample)
                    break
            else:
                bins.append([sample])
        per_rank = -(-len(bins) // ranks)
        padded = isinstance(recipe.layout, Padded)
        cells: list[list[Rows]] = [[] for _ in range(ranks)]
        for at in range(per_rank * ranks):
            bin_ = bins[at] if at < len(bins) else []
            cells[at % ranks].append([[s] for s in bin_] if padded and bin_ else [bin_])
        steps.append(cells)
    return handmade(lengths, steps, recipe)


def _fits(lengths: Sequence[int], samples: list[int], recipe: Recipe, capacity: int) -> bool:
    unit = recipe.width_unit
    sizes = [-(-lengths[s] // unit) * unit for s in samples]
    if isinstance(recipe.layout, Padded):
        return len(sizes) * max(sizes) <= capacity
    return sum(sizes) <= capacity
