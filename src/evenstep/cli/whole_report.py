"""Make the report of a saved plan or of a training run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from evenstep import make_plan
from evenstep.cli.job import Job
from evenstep.cli.samples import samples_of
from evenstep.cli.strategies import OWN, SHARED, TODAY, built_in_strategies, run
from evenstep.core.checks import assert_valid
from evenstep.core.plan import Plan, join_plans
from evenstep.core.ragged import IntArray
from evenstep.data.run_folder import read_run
from evenstep.errors import InputError
from evenstep.report import Advice, Entry, Report, advice
from evenstep.report.comparison import one_step_warning
from evenstep.report.fitting import fit_cost
from evenstep.report.numbers import count
from evenstep.report.run_log import typical_error
from evenstep.report.suggestions import of_error, of_ranks, of_waiting
from evenstep.screen import progress

_SIDE_BY_SIDE = (TODAY, OWN, SHARED, "dynamic, optimal", "packed, even")
_MOST_SAMPLES = 100_000  # that strategies are compared on


def of_plan(path: Path) -> Report:
    """The report of a saved plan."""
    with progress(f"Reading {path.name}"):
        plan = Plan.load(path)
        assert_valid(plan)
    entries, notes = _compared(plan, np.zeros(len(plan.lengths), np.int64))
    notes += [text for text in (one_step_warning(plan),) if text]
    return Report(
        title=f"Report on {path.name}",
        plan=plan,
        own=_own(plan),
        entries=entries,
        advice=_advised(plan),
        notes=notes,
    )


def of_run(folder: Path) -> Report:
    """The report of a run of `evenstep train`."""
    with progress(f"Planning the steps of {folder.name} again") as advance:
        found = read_run(folder, advance)
    plan, log = found.plan, found.log
    entries, notes = _compared(plan, found.epochs)
    error, fitted = typical_error(*log.micro_batches()), None
    with suppress(InputError):  # too few steps, or an older log
        fitted = fit_cost(log).error
    measured = [
        *of_ranks(log.rank_speeds()),
        *of_waiting(log.waiting_share()),
        *of_error(error, fitted),
    ]
    return Report(
        title=f"Report on {folder.resolve().name}",
        plan=plan,
        own=_own(plan),
        entries=entries,
        runs={_own(plan): log},
        advice=[*measured, *_advised(plan)],
        notes=[*found.notes, *notes],
    )


def _compared(plan: Plan, epochs: IntArray) -> tuple[list[Entry], list[str]]:
    """A few strategies on the samples of the plan, or on those of its first steps, epoch by epoch.

    The entry of the plan's own recipe is the plan itself, unless only a part of it is compared.
    """
    which, notes = _part(plan)
    samples = samples_of(plan)
    parts = [which[epochs[which] == epoch] for epoch in np.unique(epochs[which])]
    jobs = [Job(replace(samples.take(part), ids=None), plan.recipe) for part in parts]
    whole = Job(replace(samples.take(which), ids=None), plan.recipe)
    entries = []
    for strategy in built_in_strategies(whole):
        if strategy.name not in _SIDE_BY_SIDE:
            continue
        with progress(f"Planning: {strategy.name}") as advance:
            entry = _joined([run(job, strategy, advance) for job in jobs])
        if strategy.name == _own(plan) and len(which) == len(plan.lengths):
            entry = Entry(strategy.name, plan, entry.seconds)
        entries.append(entry)
    return entries, notes


def _own(plan: Plan) -> str:
    """The strategy that made the plan."""
    return OWN if plan.prefixes is None else SHARED


def _joined(entries: list[Entry]) -> Entry:
    """One entry for several parts of the samples, which are planned one after the other."""
    plans = [entry.plan for entry in entries if entry.plan is not None]
    if len(plans) < len(entries):
        return next(entry for entry in entries if entry.plan is None)
    ends = np.cumsum([0, *(len(plan.lengths) for plan in plans)])
    numbers = [np.arange(*pair) for pair in pairwise(ends.tolist())]
    seconds = sum(entry.seconds for entry in entries)
    plan, second = join_plans(plans, numbers), entries[0].second_work
    return Entry(entries[0].name, plan, seconds, second_work=second)


def _part(plan: Plan) -> tuple[IntArray, list[str]]:
    """The samples of as many first steps as are not too many, and a note if they are not all."""
    if len(plan.lengths) <= _MOST_SAMPLES:
        return np.arange(len(plan.lengths)), []
    ends = np.cumsum(np.bincount(plan.step_of[plan.step_of >= 0], minlength=plan.num_steps))
    steps = max(1, int(np.searchsorted(ends, _MOST_SAMPLES, side="right")))
    which = np.flatnonzero((plan.step_of >= 0) & (plan.step_of < steps))[:_MOST_SAMPLES]
    return which, [f"Strategies are compared on the first {count(len(which))} samples."]


def _advised(plan: Plan) -> list[Advice]:
    with progress("Trying changes"):
        return advice(plan, make_plan)
