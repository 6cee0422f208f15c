"""Plans that share samples between ranks, made by dividing the samples of plans that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from evenstep import Plan
from tests.internals import ELSEWHERE, Segments, offsets_of, rounded_up


def share_samples(rng: np.random.Generator, plan: Plan, chance: float = 0.5) -> Plan:
    """The plan with some samples of some waves divided at random over ranks.

    Samples that share a prefix or were split stay whole. Packs keep their order; parts are put
    anywhere between them. The budget becomes as large as needed.
    """
    cells: list[list[list[Row]]] = [[] for _ in range(len(plan.cell_offsets) - 1)]
    for step in range(plan.num_steps):
        ranks = plan[step]
        for position in range(len(ranks[0])):
            wave = [_rows(micro[position]) for micro in ranks]
            if rng.random() < 0.8:
                wave = _divide(rng, plan, wave, chance)
            for rank, rows in enumerate(wave):
                cells[step * plan.num_ranks + rank].append(rows)
    return plan_of_cells(plan, cells)


Row = tuple[int, int, int, int]  # sample, start, length, index of the parent


def _rows(micro: Any) -> list[Row]:
    segments = micro.segments
    parent = segments.parent if segments.parent is not None else np.full(len(segments), -1)
    columns = (segments.sample, segments.start, segments.length, parent)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _divide(
    rng: np.random.Generator, plan: Plan, wave: list[list[Row]], chance: float
) -> list[list[Row]]:
    ranks, parts = len(wave), []
    for rows in wave:
        inside = {parent for *_, parent in rows if parent >= 0}
        for at, (sample, start, length, parent) in enumerate(rows):
            whole = start == 0 and length == plan.ends(np.array([sample]))[0]
            can = whole and parent == -1 and at not in inside and length > 1 and ranks > 1
            if not can or rng.random() > chance:
                continue
            most = min(ranks, length)
            count = int(rng.integers(2, most + 1))
            cuts = np.sort(rng.choice(np.arange(1, length), count - 1, replace=False)).tolist()
            ends, owners = [*cuts, length], rng.permutation(ranks)[:count].tolist()
            begins = [0, *cuts]
            parts += [
                (owner, (sample, a, b - a, -1 if a == 0 else ELSEWHERE))
                for owner, a, b in zip(owners, begins, ends, strict=True)
            ]
    divided = {row[0] for _, row in parts}
    wave = [_without(rows, divided) for rows in wave]
    for owner, row in parts:
        rows = wave[owner]
        # Between trees, so that those stay in preorder.
        places = [at for at in range(len(rows) + 1) if at == len(rows) or rows[at][3] < 0]
        place = int(rng.choice(places))
        moved = [(*r[:3], r[3] + 1 if r[3] >= place else r[3]) for r in rows]
        wave[owner] = [*moved[:place], row, *moved[place:]]
    return wave


def _without(rows: list[Row], divided: set[int]) -> list[Row]:
    kept = [at for at, row in enumerate(rows) if row[0] not in divided]
    number = {at: new for new, at in enumerate(kept)}
    return [(*rows[at][:3], number.get(rows[at][3], -1)) for at in kept]


def plan_of_cells(plan: Plan, cells: list[list[list[Row]]]) -> Plan:
    micros = [rows for cell in cells for rows in cell]
    flat = np.array([row for rows in micros for row in rows], np.int64).reshape(-1, 4)
    recipe = plan.recipe
    unit, align = recipe.width_unit, recipe.topology.alignment
    slots = [
        int(rounded_up(np.array([r[2] for r in rows], np.int64), align).sum()) for rows in micros
    ]
    widths = [max(rounded_up(each, unit), unit) for each in slots]
    longest = rounded_up(int(plan.lengths.max()), unit)
    layout = replace(recipe.layout, max_tokens=max(longest, *widths))
    return replace(
        plan,
        recipe=replace(recipe, layout=layout),
        segments=Segments(*flat.T),
        row_offsets=offsets_of(np.array([len(rows) for rows in micros], np.int64)),
        micro_offsets=np.arange(len(micros) + 1),
        cell_offsets=offsets_of(np.array([len(cell) for cell in cells], np.int64)),
        widths=np.array(widths),
    )
