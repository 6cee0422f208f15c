"""Measure cases with the imported revision of evenstep: reads case names, prints seconds."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

import evenstep
from benchmarks.revision_cases import CASES, lengths_of
from evenstep import PlannedStream, PooledStream, World, make_plan, violations


def _import(name: str, *modules: str) -> Any:
    """The first `name` found: today's module first, then that of an earlier revision."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"no {name} in {', '.join(modules)}")


InMemory = _import("InMemory", "evenstep.data", "evenstep.data.memory")
Lengths = _import("Lengths", "evenstep.data", "evenstep.data.lengths")


def recipe_of(stored: dict[str, Any]) -> Any:
    """The recipe in the imported revision's names."""
    if not hasattr(evenstep, "PackedStatic"):
        return importlib.import_module("tests.golden.oracle").recipe_of({"recipe": stored})
    layouts = importlib.import_module("evenstep.core.layout").LAYOUTS
    parts = {"topology": "Topology", "steps": "Steps", "cost": "Cost", "limits": "Limits"}
    rest = {name: value for name, value in stored.items() if name not in {"layout", *parts}}
    made = {name: getattr(evenstep, kind)(**stored.get(name, {})) for name, kind in parts.items()}
    layout = layouts[stored["layout"]["kind"]](**stored["layout"])
    return evenstep.Recipe(layout=layout, **made, **rest)


@cache
def call_of(name: str) -> Callable[[], object]:
    """The call to measure; its input is prepared beforehand."""
    case = CASES[name]
    lengths, recipe = lengths_of(case), recipe_of(case["recipe"])
    if case.get("stream") == "planned":
        stream = PlannedStream(Lengths(lengths), recipe, world=World(0, recipe.topology.dp))
        return lambda: sum(len(step) for step in islice(stream, 8))
    if case.get("stream") == "pooled":
        samples = [{"input_ids": np.zeros(n, np.int32)} for n in lengths.tolist()]
        pooled = PooledStream(InMemory(samples), recipe)
        return lambda: sum(len(step) for step in pooled)
    about: dict[str, Any] = {}
    if "groups" in case:
        about["groups"] = np.arange(len(lengths)) // case["groups"]
        lengths = np.minimum(lengths, 8000)
    if "columns" in case["recipe"].get("limits", {}):
        about["columns"] = {"patches": np.random.default_rng(1).integers(0, 2000, len(lengths))}
    if case.get("stats") or case.get("checks"):
        plan = make_plan(lengths, recipe, **about)
        return plan.stats if case.get("stats") else lambda: violations(plan)
    return lambda: make_plan(lengths, recipe, **about)


def main() -> None:
    """Measure one case per line of standard input."""
    for line in sys.stdin:
        call = call_of(json.loads(line))
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        gc.enable()
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
