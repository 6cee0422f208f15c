"""Stored plans: 2,000 recipes with their lengths and a digest of the plan that they give.

Each case of `oracle.json` holds a recipe in the names of version 0.1.0, lengths, and perhaps groups
and a column `patches`. `digest` is that of the plan's arrays alone, or null if the recipe is
refused. `time` is the modelled time of all steps when plans had the fewest micro-batches and slots
first; it is missing where steps have other samples since. Where today's plan is slower, `why` is
the reason.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from evenstep import Cost, Limits, Packed, Padded, Plan, Recipe, Steps, Topology, make_plan
from tests.internals import Layout

FILE = Path(__file__).with_name("oracle.json")


def stored_cases() -> list[dict[str, Any]]:
    """All cases, in the order of the file."""
    cases: list[dict[str, Any]] = json.loads(FILE.read_text())
    return cases


def recipe_of(case: dict[str, Any]) -> Recipe:
    """The stored recipe, in today's names.

    0.1.0 had four layouts, `limits.segments` and `clock`. It ignored a packer under the default
    balance and under any limit, a cut in pipelines of one width, a balance under greedy cuts, and
    samples that rows cannot share evenly. Settings without effect were allowed.
    """
    stored = dict(case["recipe"])
    layout, limits = dict(stored.pop("layout")), dict(stored.pop("limits", {}))
    axes = dict(stored.pop("topology"))
    if axes.get("tp", 1) == 1:
        axes.pop("sequence_parallel", None)
    if axes.get("pp", 1) == 1:
        axes.pop("variable_seq_lengths", None)
    topology = Topology(**axes)
    kind, packer, cut = layout.pop("kind"), layout.pop("packer", None), layout.pop("cut", None)
    if "width" in layout:
        layout["pad_to"] = layout.pop("width")
    given = [
        bound for bound in (layout.pop("samples", None), limits.pop("segments", None)) if bound
    ]
    samples = min(given, default=None)
    if samples is not None:
        samples -= samples % layout.get("rows", 1)
    if samples is not None or limits or stored["balance"] == "refined":
        packer = None
    if packer != "first_fit_shuffle":
        stored.pop("seed", None)
    cut = None if topology.equal_widths else cut
    if cut == "greedy":
        stored["balance"] = "stride"
    made: Layout = (
        Padded(samples=samples, cut=cut, **layout)
        if kind == "padded"
        else Packed(samples=samples, packer=packer, **layout)
    )
    return Recipe(
        layout=made,
        topology=topology,
        limits=Limits(**limits),
        steps=Steps(**stored.pop("steps", {})),
        cost=Cost(**stored.pop("cost", {})),
        sync_every=stored.pop("clock"),
        **stored,
    )


def plan_of(case: dict[str, Any]) -> Plan:
    """Plan a stored case with the code at hand."""
    recipe = recipe_of(case)
    columns = {name: case[name] for name in recipe.columns}
    return make_plan(case["lengths"], recipe, groups=case.get("groups"), columns=columns)


def digest_of(plan: Plan) -> str:
    """A digest of the plan's arrays; the recipe is not in it."""
    found = hashlib.sha256()
    for array in (
        plan.step_of,
        plan.segments.sample,
        plan.segments.start,
        plan.segments.length,
        plan.row_offsets,
        plan.micro_offsets,
        plan.cell_offsets,
        plan.widths,
    ):
        found.update(len(array).to_bytes(8, "little"))
        found.update(np.ascontiguousarray(array, "<i8").tobytes())
    return found.hexdigest()[:24]


def time_of(plan: Plan) -> float:
    """The modelled time of all steps."""
    total, ranks = 0.0, plan.num_ranks
    for step in range(plan.num_steps):
        cells = plan.cell_offsets[step * ranks : (step + 1) * ranks + 1]
        costs = plan.costs[cells[0] : cells[-1]].reshape(ranks, -1)
        every = plan.recipe.sync_every == "micro_batch"
        total += float(costs.max(axis=0).sum() if every else costs.sum(axis=1).max())
    return total
