"""Compare strategies on the same lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evenstep.core.plan import Plan
from evenstep.core.stats import Value
from evenstep.report.numbers import count, factor, percent, seconds


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One strategy: its plan and the planning time, or the reason why it has no plan.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> Entry("packed", plan, seconds=0.001).stats["num_micro_batches"]
    1
    """

    name: str
    plan: Plan | None = None
    seconds: float = 0.0
    fault: str = ""
    stats: dict[str, Value] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", {} if self.plan is None else self.plan.stats())

    @property
    def modelled_time(self) -> float:
        """The modelled time of all steps: the cost of each step's slowest rank, summed."""
        assert self.plan is not None
        over = float(self.stats[f"imbalance_cost_{self.stats['sync_every']}"])
        return over * float(self.plan.costs.sum()) / self.plan.num_ranks


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of the table; `best` marks the lowest of its column."""

    text: str
    best: bool = False


HEADER = (
    "micro-batches",
    "slots",
    "padding",
    "imbalance per micro-batch",
    "imbalance per step",
    "modelled time",
    "planning time",
)
LEGEND = (
    "Imbalance: cost of the slowest rank over the mean, if ranks synchronise at every micro-batch "
    "or once per step. Modelled time: sum over steps of the slowest rank, relative to the fastest "
    "strategy."
)


def cells(entries: Sequence[Entry]) -> list[list[Cell]]:
    """The cells of each entry under `HEADER`; an entry without a plan has none."""
    times = [entry.modelled_time for entry in entries if entry.plan is not None]
    least = min((time for time in times if time > 0), default=1.0)  # 0 if every sample was dropped
    figures = [_figures(entry, least) for entry in entries]
    planned = [figure for figure in figures if figure]
    lowest = [min(column) for column in zip(*planned, strict=True)] if len(planned) > 1 else []
    return [_cells(figure, lowest) for figure in figures]


def _cells(figures: list[float], lowest: list[float]) -> list[Cell]:
    """Format figures. Imbalance has no best: a plan with more padding can be more even."""
    write = (count, count, percent, factor, factor, factor, seconds)
    return [
        Cell(text(value), bool(lowest) and index in (1, 2, 5) and value == lowest[index])
        for index, (text, value) in enumerate(zip(write, figures, strict=False))
    ]


def _figures(entry: Entry, least: float) -> list[float]:
    if entry.plan is None:
        return []
    names = (
        "num_micro_batches",
        "slots",
        "padding_ratio",
        "imbalance_cost_micro_batch",
        "imbalance_cost_step",
    )
    figures = [float(entry.stats[name]) for name in names]
    return [*figures, entry.modelled_time / least, entry.seconds]
