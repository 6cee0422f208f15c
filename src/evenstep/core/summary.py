"""One-line summaries of values for `repr`. They are cheap and never raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evenstep.core.modelled_time import step_means, step_times

if TYPE_CHECKING:
    from evenstep.core.plan import Plan


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "step"), counted(1200, "micro-batch"), counted(2, "epoch")
    ('1 step', '1,200 micro-batches', '2 epochs')
    """
    plural = f"{noun}es" if noun.endswith("batch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def fill(tokens: float, slots: float) -> str:
    """The share of slots that hold tokens; 100% only if all do. Empty without slots.

    >>> fill(992, 1000), fill(99999, 100000), fill(8, 8), fill(0, 0)
    ('fill 99.2%', 'fill 99.9%', 'fill 100%', '')
    """
    if not slots > 0:
        return ""
    ratio = tokens / slots
    if ratio == 1:
        return "fill 100%"
    return f"fill {min(100 * ratio, 99.9) if ratio < 1 else 100 * ratio:.1f}%"


def attempt(measure: Callable[[], str]) -> str:
    """The result of `measure`; empty if it raises, for example on a damaged value."""
    try:
        with np.errstate(all="ignore"):
            return measure()
    except Exception:
        return ""


def line(name: str, parts: Iterable[str]) -> str:
    """The parts that are not empty, in one line.

    >>> line("Plan", ["2 steps", "", "1 rank"])
    'Plan(2 steps, 1 rank)'
    """
    return f"{name}({', '.join(part for part in parts if part)})"


def constructor(value: object) -> str:
    """The constructor call of a dataclass, with the fields that differ from their defaults.

    >>> from evenstep.core.topology import Topology
    >>> constructor(Topology(dp=8))
    'Topology(dp=8)'
    """
    if is_dataclass(value) and not isinstance(value, type):
        given = ((f.name, getattr(value, f.name), f) for f in fields(value) if f.init)
        parts = [f"{name}={constructor(held)}" for name, held, f in given if held != _default(f)]
        return line(type(value).__name__, parts)
    if isinstance(value, Mapping):
        return repr(dict(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return repr(value)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def of_plan(plan: Plan) -> str:
    """Sizes, fill and imbalance; only sizes if the offsets of the plan do not nest.

    Floors are left out, because they take time to compute.
    """
    from evenstep.core.checks import offsets_nest  # which imports Plan

    sizes = [
        counted(max(plan.num_steps, 0), "step"),
        counted(plan.num_ranks, "rank"),
        counted(len(plan.lengths), "sample"),
        counted(plan.num_micro_batches, "micro-batch"),
    ]
    if attempt(lambda: "broken" if offsets_nest(plan) else "whole") != "whole":
        return line("Plan", [*sizes, "offsets do not nest"])
    measures = (
        lambda: fill(plan.tokens.sum(), (plan.rows * plan.widths.astype(np.float64)).sum()),
        lambda: _imbalance(plan),
    )
    return line("Plan", [*sizes, *map(attempt, measures)])


def _imbalance(plan: Plan) -> str:
    """The modelled time divided by the ideal, for the recipe's `sync_every`."""
    ideal = float(step_means(plan).sum())
    return f"imbalance {step_times(plan).sum() / ideal:.3f}" if ideal > 0 else ""
