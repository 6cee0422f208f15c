"""Stored plans: 2,000 recipes with their lengths and a digest of the plan that they gave.

Each case of `oracle.json` holds a recipe in the names of version 0.1.0, lengths, and perhaps groups
and a column `patches`. `digest` is that of the plan's arrays alone, made by version 0.1.0.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from evenstep import Cost, Limits, Plan, Recipe, Steps, Topology, make_plan
from evenstep.core.layout import LAYOUTS

FILE = Path(__file__).with_name("oracle.json")


def stored_cases() -> list[dict[str, Any]]:
    """All cases, in the order of the file."""
    cases: list[dict[str, Any]] = json.loads(FILE.read_text())
    return cases


def recipe_of(case: dict[str, Any]) -> Recipe:
    """The stored recipe, in today's names."""
    stored = dict(case["recipe"])
    layout = stored.pop("layout")
    parts = {"topology": Topology, "steps": Steps, "cost": Cost, "limits": Limits}
    return Recipe(
        layout=LAYOUTS[layout["kind"]](**layout),
        **{name: part(**stored.pop(name, {})) for name, part in parts.items()},
        **stored,
    )


def plan_of(case: dict[str, Any]) -> Plan:
    """Plan a stored case with the code at hand."""
    columns = {"patches": case["patches"]} if "patches" in case else None
    return make_plan(case["lengths"], recipe_of(case), groups=case.get("groups"), columns=columns)


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
