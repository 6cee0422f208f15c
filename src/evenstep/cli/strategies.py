"""The strategies that `compare` runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from evenstep.cli.job import Job
from evenstep.cli.overrides import resolved
from evenstep.config import overridden, recipe_from
from evenstep.core.ragged import rounded_up
from evenstep.core.recipe import Sharing
from evenstep.errors import ConfigError, PlanError
from evenstep.planning.inputs import checked_column, checked_lengths
from evenstep.planning.kernels import compile_seconds
from evenstep.planning.units import refusal, refused
from evenstep.report import Entry

TODAY = "padded batches of 8"
OWN = "your settings"
SHARED = "prompts shared"  # your settings, with prefixes
BETWEEN = "sequences shared"  # your settings, with sharing


@dataclass(frozen=True, slots=True)
class Strategy:
    """A name and the overrides it applies to the shared recipe.

    `longest` is for a strategy without a budget: samples above it are split, truncated or dropped
    first, as the recipe says, so that every strategy runs the same tokens. `share` is for one that
    computes shared prefixes once.
    """

    name: str
    overrides: tuple[str, ...]
    longest: int | None = None
    share: bool = False

    def job(self, job: Job) -> Job:
        """The job with the samples that this strategy plans."""
        return job if self.longest is None else job.within(self.longest)


def parse_strategy(text: str) -> Strategy:
    """Parse `name: key=value, key=value`; without a name, the overrides are the name.

    >>> parse_strategy("lpt: balance=lpt, sync_every=step").overrides
    ('balance=lpt', 'sync_every=step')
    """
    name, colon, rest = text.partition(":")
    if not colon:
        name, rest = text, text
    overrides = tuple(resolved(part.strip()) for part in rest.split(",") if part.strip())
    if not name.strip() or not all("=" in override for override in overrides):
        raise ConfigError(
            f"--strategy must be of the form 'name: key=value, key=value', got {text!r}. "
            f"Write for example 'lpt: balance=lpt'."
        )
    return Strategy(name.strip(), overrides)


def own_strategy(text: str, job: Job) -> Strategy:
    """Parse a strategy of the user; refuse it before any work if its recipe is invalid."""
    strategy = parse_strategy(text)
    data = overridden(job.recipe.to_dict(), strategy.overrides)
    recipe_from(data, f"--strategy {strategy.name!r}")
    return strategy


def refuse_duplicates(strategies: list[Strategy]) -> list[Strategy]:
    """The strategies; two with the same name are refused."""
    names = [strategy.name for strategy in strategies]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name!r} names two strategies. Rename one.")
    return strategies


def built_in_strategies(job: Job) -> list[Strategy]:
    """What most scripts do, the recipe itself, then padded and packed strategies in its budget."""
    recipe = job.recipe
    alone = () if recipe.sharing is None else ("sharing=null",)
    today = (
        "layout.kind=padded",
        "layout.samples=8",
        *(f"layout.{name}=null" for name in ("max_tokens", "pad_to", "cut")),
        "balance=none",
        "equal_sizes=false",
        "equal_tokens=false",
        "second_work=null",
        "min_saving=null",
        "seed=0",
        *alone,
    )
    budget, unit = recipe.layout.budget, recipe.width_unit
    longest = int(np.nan_to_num(job.samples.lengths).max(initial=1))
    widest = rounded_up(longest, unit)
    if budget is None:  # only the number of samples is bounded: as many of the longest
        budget = widest * (recipe.layout.samples or 1)
    widest = min(widest, budget // unit * unit)
    shared = (f"layout.max_tokens={budget}", "layout.samples=null", "balance=refined", "seed=0")
    shared = (*shared, *alone)
    unaware = "second_work=null"  # such plans do not even it out; their time counts it
    padded = (*shared, unaware, "layout.kind=padded", "layout.cut=null", "layout.pad_to=null")
    plain = ("layout.rows=1", "layout.pad_to=null", "layout.packer=null")
    packed = (*shared, "layout.kind=packed", *plain)
    greedy, optimal = "layout.packer=first_fit_decreasing", "layout.packer=optimal"
    return [
        Strategy(TODAY, today, recipe.longest_segment),
        Strategy(OWN, ()),
        *([] if job.samples.prefixes is None else [Strategy(SHARED, (), share=True)]),
        *([Strategy(BETWEEN, ("sharing.most_ranks=null",))] if _may_gain_by_sharing(job) else []),
        Strategy("padded to longest", (*padded, f"layout.pad_to={widest}")),
        Strategy("dynamic, greedy", (*padded, "layout.cut=greedy")),
        Strategy("dynamic, optimal", padded),
        Strategy("packed in order", (*packed, unaware, "balance=none", "equal_sizes=false")),
        Strategy("packed, FFD stride", (*packed, unaware, greedy, "balance=stride")),
        Strategy("packed, FFD LPT", (*packed, unaware, greedy, "balance=lpt")),
        Strategy("packed, optimal", (*packed, unaware, optimal)),
        Strategy("packed, even", packed),
    ]


def _may_gain_by_sharing(job: Job) -> bool:
    """Whether ranks could share sequences, and one costs more than a rank's part of a mean step."""
    recipe, lengths = job.recipe, np.nan_to_num(job.samples.lengths).astype(np.int64)
    ranks, size = recipe.topology.dp, recipe.steps.samples
    if recipe.sharing is not None or ranks == 1 or job.samples.groups is not None:
        return False
    try:
        replace(recipe, sharing=Sharing())
    except ConfigError:
        return False
    costs = recipe.cost.of_lengths(lengths)
    steps = len(lengths) / size if size else 1.0
    if recipe.steps.tokens:
        steps = float(lengths.sum()) / recipe.steps.tokens
    fits = recipe.longest_segment is None or lengths.max(initial=0) <= recipe.longest_segment
    return bool(fits and costs.max(initial=0) * ranks * max(steps, 1.0) > 1.01 * costs.sum())


def refuse_too_long(job: Job, strategies: list[Strategy]) -> None:
    """Raise, before anything is compiled, if a sample is too long for every strategy.

    What most scripts do has no budget, so it does not count.
    """
    lengths = checked_lengths(job.samples.lengths, None)
    first = ""
    for strategy in strategies:
        if strategy.name == TODAY:
            continue
        try:
            recipe = recipe_from(overridden(job.recipe.to_dict(), strategy.overrides))
        except ConfigError:
            continue
        over = refused(lengths, recipe.longest_segment, recipe.overflow)
        if not len(over):
            return
        sample = int(over[0])
        first = first or refusal(sample, int(lengths[sample]), recipe, len(over) - 1)
    if first:
        raise PlanError(f"no strategy can plan these lengths: {first}")


def run(job: Job, strategy: Strategy, progress: Callable[[int, int], None] | None = None) -> Entry:
    """Plan with a strategy; an entry without a plan holds the error message.

    The measured time excludes importing the planner, and compiling and loading kernels.
    """
    import evenstep.planning.planner  # noqa: F401

    job = strategy.job(job)
    try:
        recipe = recipe_from(overridden(job.recipe.to_dict(), strategy.overrides))
        began, compiled = time.perf_counter(), compile_seconds()
        plan = job.plan(recipe, progress, share=strategy.share)
        seconds = time.perf_counter() - began - (compile_seconds() - compiled)
    except (ConfigError, PlanError) as error:
        return Entry(strategy.name, fault=str(error))
    second = job.recipe.second_work
    if second is not None and second.column not in plan.columns:
        column = checked_column(second.column, job.samples.columns, len(plan.lengths))
        plan = replace(plan, columns={**plan.columns, second.column: column})
    return Entry(strategy.name, plan, seconds, second_work=second)
