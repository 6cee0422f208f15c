"""Tables of a plan's stats, as labelled rows for a terminal or a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenstep.core.measures import Value
from evenstep.core.plan import Plan
from evenstep.core.recipe import Recipe
from evenstep.report.numbers import agreeing, count, factor, percent, times


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its label, its value, and a note that explains it.

    >>> Row("padding", "12 %", "of all slots").value
    '12 %'
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Rows under one heading.

    >>> Section("Padding", [Row("padding", "12 %")]).title
    'Padding'
    """

    title: str
    rows: list[Row]


def sections(stats: Mapping[str, Value], recipe: Recipe | None = None) -> list[Section]:
    """The stats of a plan in five sections: contents, padding, balance, bounds, over-long samples.

    With the recipe of the plan, a note says where the bound on time is loose.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> len(sections(plan.stats()))
    5
    """
    bounds = _bounds(stats, recipe)
    return [_contents(stats), _padding(stats), _balance(stats), bounds, _over_long(stats)]


def cost_line(plans: Iterable[Plan]) -> str:
    """The cost that plans were made with, in one line; each once where they differ.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> cost_line([make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))])
    'cost: tokens only; name a model to count attention'
    """
    costs = dict.fromkeys(plan.recipe.cost.description for plan in plans)
    hint = "; name a model to count attention" if list(costs) == ["tokens only"] else ""
    return f"cost: {' or '.join(costs)}{hint}"


def headline(stats: Mapping[str, Value]) -> list[Row]:
    """The five figures at the top of a picture."""
    often = str(stats["sync_every"])
    when = often.replace("_", "-")
    return [
        Row("of slots are real tokens", percent(1 - _number(stats, "padding_ratio"))),
        Row(
            f"imbalance per {when}",
            factor(_number(stats, f"imbalance_cost_{often}")),
            "cost of the slowest rank over the mean",
        ),
        Row(
            f"{_noun(stats, 'num_packs', 'micro-batch')}; bound {_int(stats, 'num_packs_bound')}",
            _int(stats, "num_packs"),
        ),
        Row(_noun(stats, "num_samples", "sample"), _int(stats, "num_samples")),
        Row(_noun(stats, "tokens", "real token"), _int(stats, "tokens")),
    ]


def _contents(stats: Mapping[str, Value]) -> Section:
    where = f"{_times(stats, 'num_steps', 'step')} on {_times(stats, 'num_ranks', 'rank')}"
    empty = _number(stats, "num_empty_micro_batches")
    return Section(
        "Plan",
        [
            Row("samples", _int(stats, "num_samples"), where),
            Row("segments", _int(stats, "num_segments")),
            Row(
                "micro-batches",
                _int(stats, "num_micro_batches"),
                f"{count(empty)} empty, to keep counts equal" if empty else "",
            ),
            *_sharing(stats),
            *_shared(stats),
        ],
    )


def _sharing(stats: Mapping[str, Value]) -> list[Row]:
    """What shared prefixes save, if samples were planned with them."""
    possible = _number(stats, "shared_tokens_possible") if "shared_tokens_possible" in stats else 0
    if not possible:
        return []
    saved = _number(stats, "shared_tokens_saved")
    tokens = factor((saved + _number(stats, "tokens")) / _number(stats, "tokens"))
    note = f"{percent(saved / possible)} of the possible; {tokens} fewer tokens"
    return [Row("tokens saved by sharing", _int(stats, "shared_tokens_saved"), note)]


def _shared(stats: Mapping[str, Value]) -> list[Row]:
    """What ranks share, if any do."""
    if not stats.get("num_shared"):
        return []
    note = f"by several ranks, which receive {_times(stats, 'tokens_received', 'token')}"
    return [Row("shared sequences", _int(stats, "num_shared"), note)]


def _padding(stats: Mapping[str, Value]) -> Section:
    return Section(
        "Padding",
        [
            Row("real tokens", _int(stats, "tokens")),
            Row("slots", _int(stats, "slots"), "real tokens plus padding"),
            Row(
                "padding",
                _int(stats, "padding"),
                f"{percent(_number(stats, 'padding_ratio'))} of slots",
            ),
            Row("padding removed", _int(stats, "removed_padding"), _removed(stats)),
            Row(
                "budget used",
                percent(_number(stats, "bin_utilization")),
                "mean over micro-batches with segments",
            ),
        ],
    )


def _removed(stats: Mapping[str, Value]) -> str:
    before = _number(stats, "slots_before") - _number(stats, "tokens")
    if not before:
        return "padded batches of 8 have none"
    share = percent(_number(stats, "removed_padding") / before)
    return f"{share} of the {count(before)} of padded batches of 8"


def _balance(stats: Mapping[str, Value]) -> Section:
    cost, note = str(stats["cost"]), "of a segment with L tokens, up to a factor"
    if cost == "tokens only":
        note = "attention is not counted; name a model to count it"
    rows = [Row("cost", cost, note)]
    for key, what, most in (("cost", "cost", "slowest"), ("tokens", "token", "most")):
        for often in ("micro_batch", "step"):
            minimised = key == "cost" and stats["sync_every"] == often
            minimised = minimised and stats["balance"] != "none"
            rows.append(
                Row(
                    f"{what} imbalance per {often.replace('_', '-')}",
                    factor(_number(stats, f"imbalance_{key}_{often}")),
                    f"{most} over mean{'; this plan minimises it' if minimised else ''}",
                )
            )
    return Section("Balance", rows)


def _bounds(stats: Mapping[str, Value], recipe: Recipe | None) -> Section:
    packs = f"lower bound {_int(stats, 'num_packs_bound')}"
    if stats["packs_optimal"]:
        packs += "; the count per rank is optimal"
    time = "modelled time over its lower bound"
    if stats["balance_optimal"]:
        time += "; no plan of this recipe is faster"
    elif _loose_floor(recipe):
        time += ", which leaves out padding that may be unavoidable (about 5 %)"
    return Section(
        "Bounds",
        [
            Row("micro-batches with segments", _int(stats, "num_packs"), packs),
            Row("time over floor", factor(_number(stats, "time_over_floor")), time),
        ],
    )


def _loose_floor(recipe: Recipe | None) -> bool:
    """Whether rows of one micro-batch wait for each other at one width.

    The floor counts most of them at their own width: decision 028 has the gap.
    """
    if recipe is None or recipe.sync_every != "micro_batch" or recipe.layout.pad_to is not None:
        return False
    return recipe.layout.segments_per_row is not None


def _over_long(stats: Mapping[str, Value]) -> Section:
    rows = [
        Row("truncated", _int(stats, "num_truncated"), _lost(stats, "tokens_truncated")),
        Row("split", _int(stats, "num_split"), "samples in several segments"),
        Row(
            "alone",
            _int(stats, "num_alone"),
            "over a limit, each in a micro-batch of its own",
        ),
        Row("dropped", _int(stats, "num_dropped"), _lost(stats, "tokens_dropped")),
    ]
    some = [row for row in rows if row.value != "0"]
    return Section("Over-long samples", some or [Row("none", "")])


def _lost(stats: Mapping[str, Value], key: str) -> str:
    return f"{_times(stats, key, 'token')} lost"


def step_table(steps: Sequence[Mapping[str, Value]]) -> tuple[list[str], list[list[str]]]:
    """The header and one row per step."""
    header = [
        "step",
        "samples",
        "micro-batches",
        "slots",
        "padding",
        "imbalance per micro-batch",
        "imbalance per step",
        "time over floor",
    ]
    rows = [
        [
            _int(step, "step"),
            _int(step, "num_samples"),
            _int(step, "num_micro_batches"),
            _int(step, "slots"),
            percent(_number(step, "padding_ratio")),
            factor(_number(step, "imbalance_cost_micro_batch")),
            factor(_number(step, "imbalance_cost_step")),
            factor(_number(step, "time_over_floor")),
        ]
        for step in steps
    ]
    return header, rows


def _number(stats: Mapping[str, Value], key: str) -> float:
    value = stats[key]
    assert isinstance(value, int | float), f"{key} is a number"
    return value


def _int(stats: Mapping[str, Value], key: str) -> str:
    return count(_number(stats, key))


def _times(stats: Mapping[str, Value], key: str, noun: str) -> str:
    return times(_number(stats, key), noun)


def _noun(stats: Mapping[str, Value], key: str, noun: str) -> str:
    return agreeing(_number(stats, key), noun)
