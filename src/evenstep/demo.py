"""`make demo`: the sources of the Python standard library, planned in three ways for 8 ranks.

A corpus that every machine has: one document per file, one token per byte. The same documents,
in the same steps, are padded to the longest, dynamically batched, and packed.
"""

from __future__ import annotations

import random
import sysconfig
import time
from pathlib import Path

import numpy as np

from evenstep.cli import screen
from evenstep.core.archive import replace_file
from evenstep.core.checks import assert_valid
from evenstep.core.cost import Cost
from evenstep.core.layout import Layout, Packed, Padded
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe, Steps
from evenstep.core.topology import Topology
from evenstep.report import Entry, comparison_page

BUDGET = 65_536  # slots of a micro-batch
RANKS = 8
SAMPLES = 128  # of a step
PAGE = Path("build/demo.html")

LAYOUTS: dict[str, Layout] = {
    "padded to the longest": Padded(max_tokens=BUDGET, pad_to=BUDGET),
    "dynamically batched": Padded(max_tokens=BUDGET),
    "packed": Packed(max_tokens=BUDGET),
}


def main() -> None:
    """Plan, print one table, and leave a page with a picture."""
    lengths = standard_library()
    console = screen.console()
    console.print(
        f"The Python standard library: {len(lengths):,} documents, {lengths.sum():,} tokens, the "
        f"shortest {lengths.min():,}, the median {int(np.median(lengths)):,}, the longest "
        f"{lengths.max():,}.\n{RANKS} ranks, {SAMPLES} documents a step, micro-batches of at most "
        f"{BUDGET:,} slots; longer documents are split.\n"
    )
    entries = [plan(name, layout, lengths) for name, layout in LAYOUTS.items()]
    title = f"The Python standard library on {RANKS} ranks"
    screen.print_comparison(entries, title)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    replace_file(PAGE, comparison_page(entries, title).encode())
    console.print(f"\nThe picture is in {PAGE}: open it in a browser.")


def standard_library() -> IntArray:
    """The size in bytes of every module, in a seeded random order."""
    root = Path(sysconfig.get_path("stdlib"))
    sizes = []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        try:
            size = path.stat().st_size
        except OSError:
            continue
        if size:  # many __init__.py are empty
            sizes.append(size)
    random.Random(0).shuffle(sizes)
    return np.array(sizes, np.int64)


def plan(name: str, layout: Layout, lengths: IntArray) -> Entry:
    """Plan once to compile or load the kernels, then once more with a watch in hand."""
    from evenstep.planning import make_plan

    recipe = Recipe(
        layout=layout,
        topology=Topology(dp=RANKS),
        steps=Steps(samples=SAMPLES),
        cost=Cost.of_model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8),
        overflow="split",
    )
    with screen.progress(f"Compiling what {name} needs (the first time only)"):
        make_plan(lengths[:SAMPLES], recipe)
    with screen.progress(f"Planning: {name}") as advance:
        began = time.perf_counter()
        made = make_plan(lengths, recipe, progress=advance)
        seconds = time.perf_counter() - began
    assert_valid(made)
    return Entry(name, made, seconds)


if __name__ == "__main__":
    main()
