"""Compare strategies on the same samples. The first is the one that others are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from evenstep.core.measures import (
    TimeParts,
    Value,
    step_means,
    step_times,
    time_parts,
)
from evenstep.core.plan import Plan
from evenstep.core.recipe import SecondWork, SyncEvery
from evenstep.report.numbers import count, factor, percent, seconds, times

MUCH = 1.01  # the smallest ratio of two times that is worth a sentence


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One strategy: its plan and the planning time, or the reason why it has no plan.

    `second_work` is counted in its time, also if its plan was made without it.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> Entry("packed", plan, seconds=0.001).stats["num_micro_batches"]
    1
    """

    name: str
    plan: Plan | None = None
    seconds: float = 0.0
    fault: str = ""
    second_work: SecondWork | None = None
    stats: dict[str, Value] = field(init=False)
    parts: TimeParts = field(init=False)
    """Modelled time of all steps, by what it is spent on."""

    def __post_init__(self) -> None:
        plan = self.plan
        object.__setattr__(self, "stats", {} if plan is None else plan.stats())
        parts = TimeParts(0.0, 0.0, 0.0) if plan is None else time_parts(plan, self.second_work)
        object.__setattr__(self, "parts", parts)

    @property
    def modelled_time(self) -> float:
        """The modelled time of all steps, second work included."""
        return self.parts.total

    def imbalance(self, sync_every: SyncEvery) -> float:
        """The time over the mean work of a rank, if ranks synchronise this often."""
        assert self.plan is not None
        time = step_times(self.plan, sync_every, second_work=self.second_work).sum()
        mean = step_means(self.plan, self.second_work).sum()
        return float(time / mean) if mean else 1.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of the table; `best` marks the lowest of its column."""

    text: str
    best: bool = False


HEADER = (
    "micro-batches",
    "slots",
    "padding",
    "padding removed",
    "imbalance per micro-batch",
    "imbalance per step",
    "modelled time",
    "planning time",
)
LEGEND = (
    "Padding removed: compared with the first strategy. Imbalance: cost of the slowest rank over "
    "the mean, if ranks synchronise at every micro-batch or once per step. Modelled time: sum over "
    "steps of the slowest rank, relative to the fastest strategy."
)


def shared_second_work(plans: Iterable[Plan]) -> SecondWork | None:
    """The second work that all of these plans are measured with: that of the first with one."""
    works = (plan.recipe.second_work for plan in plans)
    return next((work for work in works if work is not None), None)


def padding_removed(entry: Entry, first: Entry) -> float | None:
    """The share of the first strategy's padding that this one does not have; None without any."""
    if entry.plan is None or first.plan is None or not first.stats["padding"]:
        return None
    return 1 - float(entry.stats["padding"]) / float(first.stats["padding"])


def time_saved(entry: Entry, first: Entry) -> float | None:
    """The first strategy's modelled time divided by this one's; None without a plan."""
    if entry.plan is None or first.plan is None or not entry.modelled_time:
        return None
    return first.modelled_time / entry.modelled_time


def closing(parts: Mapping[str, TimeParts]) -> str:
    """What the comparison shows, in one sentence, about the first of the nearly fastest.

    >>> slow, fast = TimeParts(10.0, 20.0, 2.0), TimeParts(10.0, 0.0, 0.0)
    >>> closing({"padded batches of 8": slow, "packed": fast})
    'packed: 3.2× less time than padded batches of 8.'
    """
    found = {name: part.total for name, part in parts.items() if part.total > 0}
    if len(found) < 2:
        return ""
    first, *others = found
    least = min(found[name] for name in others)
    fastest = next(name for name in others if found[name] <= MUCH * least)
    ratio = found[first] / found[fastest]
    if ratio <= MUCH:
        return f"No strategy takes much less time than {first}."
    return f"{fastest}: {ratio:.{1 if ratio >= 2 else 2}f}× less time than {first}."


def one_step_warning(plan: Plan) -> str:
    """A warning if all samples are one step; empty otherwise."""
    if plan.num_steps != 1:
        return ""
    steps = plan.recipe.steps
    unset = steps.samples is None and steps.tokens is None and steps.micro_batches is None
    remedy = "Set steps.samples to the samples of a step." if unset else "Pass more lengths."
    whole = times(len(plan.lengths), "sample")
    return f"The whole file is one step of {whole}, which training rarely is. {remedy}"


def cells(entries: Sequence[Entry]) -> list[list[Cell]]:
    """The cells of each entry under `HEADER`; an entry without a plan has none."""
    times = [entry.modelled_time for entry in entries if entry.plan is not None]
    least = min((time for time in times if time > 0), default=1.0)  # 0 if every sample was dropped
    figures = [_figures(entry, entries[0], least) for entry in entries]
    planned = [figure for figure in figures if figure]
    lowest = [_lowest(column) for column in zip(*planned, strict=True)] if len(planned) > 1 else []
    return [_cells(figure, lowest) for figure in figures]


def _lowest(column: Sequence[float | None]) -> float | None:
    return min((value for value in column if value is not None), default=None)


def _cells(figures: list[float | None], lowest: list[float | None]) -> list[Cell]:
    """Format figures. Imbalance has no best: a plan with more padding can be more even."""
    write = (count, count, percent, percent, factor, factor, factor, seconds)
    return [
        Cell(
            "–" if value is None else text(value),
            bool(lowest) and index in (1, 2, 6) and value == lowest[index],
        )
        for index, (text, value) in enumerate(zip(write, figures, strict=False))
    ]


def _figures(entry: Entry, first: Entry, least: float) -> list[float | None]:
    if entry.plan is None:
        return []
    stats = entry.stats
    return [
        float(stats["num_micro_batches"]),
        float(stats["slots"]),
        float(stats["padding_ratio"]),
        padding_removed(entry, first),
        entry.imbalance("micro_batch"),
        entry.imbalance("step"),
        entry.modelled_time / least,
        entry.seconds,
    ]
