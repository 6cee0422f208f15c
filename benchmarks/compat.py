"""Measure functions of other systems, compared with ours that replace them.

python benchmarks/compat.py            everything, written to benchmarks/results
python benchmarks/compat.py --quick    a small version
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.bench import Bench
from benchmarks.function_rules import Rule, their_rules
from benchmarks.functions import our_rules
from benchmarks.instances import distributions
from benchmarks.lengths import draw
from benchmarks.problem import Outcome, Problem
from benchmarks.runner import run
from benchmarks.tables import Section, Table, Target
from benchmarks.timing import interleave
from evenstep import Cost

COST = Cost(per_token=24576, per_pair=1)
SHAPES = ((512, 16, 16384), (2048, 64, 16384), (2048, 64, 32768))  # (samples, ranks, budget)
OURS = "evenstep"
WORSE = 1.01


@dataclass(slots=True)
class Measured:
    """What one rule gave on all steps."""

    outcomes: list[Outcome] = field(default_factory=list)
    padding: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """The mean of a field of the outcomes."""
        return float(np.mean([getattr(outcome, name) for outcome in self.outcomes]))


def functions(bench: Bench) -> Section:
    """Compare one step as each system divides it with what our function gives it."""
    section = Section(
        "One function",
        notes=[
            "One step with all samples; cost 24576·L + L²; over-long samples truncated; samples "
            "in the order drawn. Installed: the system's own function. Re-implemented: a few "
            "lines on our kernels, so that its time says nothing about the system. verl at "
            "1dda039b derives the number of micro-batches from the token sum; 0.9 raises it until "
            "all fit. TRL's rule is that of July 2026, without shared prefixes. Largest is the "
            "largest micro-batch over the budget. Lock-step and rank sum are over the ideal. "
            "Padding is what micro-batches of a fixed size, the budget, would leave empty; those "
            "of any size have none. ms is the mean time to plan a step; with verl and AReaL, ranks "
            "plan for themselves, here one after the other. Faster steps: within the budget and "
            "over 1 % faster than ours in lock-step.",
        ],
    )
    columns = {
        "system": "", "rule": "", "steps": "d", "micro-batches per rank": ".2f",
        "largest": ".3f", "steps over budget": "d", "lock-step": ".4f", "rank sum": ".4f",
        "padding": ".1%", "ms": ".1f", "faster steps": "d",
    }  # fmt: skip
    table = Table("All lengths and shapes", columns)
    theirs, ours = their_rules(), our_rules()
    over, worse = 0, 0
    for system, rules in theirs.items():
        found = _measured(bench, {OURS: ours[system], **rules}, system)
        for name, got in found.items():
            table.add(system, name, *_cells(got), _faster_steps(found[OURS], got))
        over += sum(outcome.over_budget for outcome in found[OURS].outcomes)
        worse += sum(_faster(found[OURS], got) for got in found.values())
    section.tables.append(table)
    promise = "our functions: no micro-batch over the budget"
    section.targets.append(Target(promise, f"{over}", over == 0))
    promise = "rules that keep the budget and are over 1 % faster on average, in lock-step"
    section.targets.append(Target(promise, f"{worse}", worse == 0))
    return section


def _measured(bench: Bench, rules: dict[str, Rule], system: str) -> dict[str, Measured]:
    found = {name: Measured() for name in rules}
    for source, lengths in distributions(bench).items():
        for samples, ranks, budget in bench.pick(SHAPES, ((64, 8, 16384),)):
            bench.say(f"{system}: {samples:,} of {source} on {ranks}, budget {budget:,}")
            problem = Problem(draw(lengths, samples, budget), budget, ranks, COST)
            calls: dict[str, Callable[[], object]] = {
                name: partial(rule, problem) for name, rule in rules.items()
            }
            timed = interleave(calls, repeats=bench.pick(2, 1), burst=1, patience=1.0)
            for name, got in timed.items():
                outcome = problem.measure(*got.result)
                room = outcome.micro_batches * ranks * budget
                found[name].outcomes.append(outcome)
                found[name].padding.append(1 - int(problem.lengths.sum()) / room)
                found[name].ms.append(got.ms)
    return found


def _cells(got: Measured) -> tuple[int | float, ...]:
    return (
        len(got.outcomes),
        got.mean("micro_batches"),
        max(outcome.largest for outcome in got.outcomes),
        sum(outcome.over_budget > 0 for outcome in got.outcomes),
        got.mean("lock_step"),
        got.mean("rank_sum"),
        float(np.mean(got.padding)),
        float(np.mean(got.ms)),
    )


def _faster_steps(ours: Measured, theirs: Measured) -> int:
    """Steps that a rule keeps within the budget and runs over 1 % faster in lock-step."""
    return sum(
        other.over_budget == 0 and other.lock_step * WORSE < mine.lock_step
        for mine, other in zip(ours.outcomes, theirs.outcomes, strict=True)
    )


def _faster(ours: Measured, theirs: Measured) -> bool:
    kept = all(outcome.over_budget == 0 for outcome in theirs.outcomes)
    return kept and theirs.mean("lock_step") * WORSE < ours.mean("lock_step")


SECTIONS: dict[str, Callable[[Bench], Section]] = {"functions": functions}


def main(arguments: list[str] | None = None) -> int:
    """Measure functions that replace those of other systems."""
    return run("compat", "Compatibility benchmark", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
