"""Plans that a person can review, as text. A change here is a change in what users get."""

from pathlib import Path

import pytest

from evenstep import (
    Cost,
    Packed,
    Padded,
    Plan,
    Recipe,
    Steps,
    Topology,
    make_plan,
)

LENGTHS = [12, 3, 7, 5, 9, 2, 2, 14, 6, 4, 1, 8]
FOLDER = Path(__file__).parent

RECIPES = {
    "packed": Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2)),
    "packed_attention": Recipe(
        layout=Packed(max_tokens=16), topology=Topology(dp=2), cost=Cost(per_pair=0.5)
    ),
    "packed_context_parallel": Recipe(
        layout=Packed(max_tokens=32), topology=Topology(dp=2, cp=2), steps=Steps(samples=6)
    ),
    "padded": Recipe(layout=Padded(max_tokens=16), topology=Topology(dp=2)),
    "padded_greedy": Recipe(layout=Padded(max_tokens=16, cut="greedy"), topology=Topology(dp=2)),
    "packed_static": Recipe(layout=Packed(rows=2, pad_to=16), topology=Topology(dp=2)),
    "fixed": Recipe(layout=Packed(samples=3), topology=Topology(dp=2)),
    "split": Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=3), overflow="split"),
}


def draw(plan: Plan) -> str:
    """One line per row: |sample:length ...| and what is padding, as `..`"""
    lines = []
    for step in range(plan.num_steps):
        for rank in range(plan.num_ranks):
            lines.append(f"step {step} rank {rank}")
            for micro in plan[step, rank]:
                rows = []
                for a, b in zip(micro.row_offsets[:-1], micro.row_offsets[1:], strict=True):
                    part = micro.segments.take(slice(int(a), int(b)))
                    cells = [
                        f"{s}:{n}" + (f"@{start}" if start else "")
                        for s, start, n in zip(part.sample, part.start, part.length, strict=True)
                    ]
                    empty = micro.width - int(part.length.sum())
                    rows.append(" ".join(cells + ([f"..{empty}"] if empty else [])))
                lines.append(f"  {micro.width:3} wide | " + " | ".join(rows))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_is_the_one_that_was_reviewed(name: str) -> None:
    drawn = draw(make_plan(LENGTHS, RECIPES[name]))
    path = FOLDER / f"{name}.txt"
    assert path.exists(), f"review this and save it as {path.name}:\n{drawn}"
    assert drawn == path.read_text()
