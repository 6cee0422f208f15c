"""The measures of a plan as labelled rows, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenstep.core.stats import Value
from evenstep.report.numbers import agreeing, count, factor, percent, times


@dataclass(frozen=True, slots=True)
class Row:
    """One measure: what it is called, what it says, and what to compare it with."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Measures that answer one question."""

    title: str
    rows: list[Row]


def sections(stats: Mapping[str, Value]) -> list[Section]:
    """The table of a plan: what it holds, how full, how even, how near the best, what was cut.

    `for section in sections(plan.stats()): print(section.title, section.rows)`
    """
    return [_holds(stats), _full(stats), _even(stats), _near(stats), _over_long(stats)]


def headline(stats: Mapping[str, Value]) -> list[Row]:
    """The few figures that say whether a plan is any good."""
    often = str(stats["sync_every"])
    when = "at every micro-batch" if often == "micro_batch" else "once per step"
    return [
        Row("of slots are real tokens", percent(1 - _number(stats, "padding_ratio"))),
        Row(
            "slowest rank over the mean",
            factor(_number(stats, f"imbalance_cost_{often}")),
            f"ranks synchronise {when}",
        ),
        Row(
            f"{_noun(stats, 'num_packs', 'micro-batch')}; bound {_int(stats, 'num_packs_bound')}",
            _int(stats, "num_packs"),
        ),
        Row(_noun(stats, "num_samples", "sample"), _int(stats, "num_samples")),
        Row(_noun(stats, "tokens", "real token"), _int(stats, "tokens")),
    ]


def _holds(stats: Mapping[str, Value]) -> Section:
    where = f"{_times(stats, 'num_steps', 'step')} on {_times(stats, 'num_ranks', 'rank')}"
    dummies = _number(stats, "num_empty_micro_batches")
    return Section(
        "Plan",
        [
            Row("samples", _int(stats, "num_samples"), where),
            Row("segments", _int(stats, "num_segments")),
            Row(
                "micro-batches",
                _int(stats, "num_micro_batches"),
                f"{times(dummies, 'dummy')} to keep counts equal" if dummies else "",
            ),
        ],
    )


def _full(stats: Mapping[str, Value]) -> Section:
    return Section(
        "Full",
        [
            Row("real tokens", _int(stats, "tokens")),
            Row("slots", _int(stats, "slots"), "real tokens plus padding"),
            Row(
                "padding",
                _int(stats, "padding"),
                f"{percent(_number(stats, 'padding_ratio'))} of slots",
            ),
            Row(
                "padding removed",
                _int(stats, "removed_padding"),
                f"{percent(_number(stats, 'removed_padding_ratio'))} of the "
                f"{_times(stats, 'slots_before', 'slot')} at full width",
            ),
            Row(
                "budget used",
                percent(_number(stats, "bin_utilization")),
                "mean over micro-batches that hold anything",
            ),
        ],
    )


def _even(stats: Mapping[str, Value]) -> Section:
    rows = []
    for often, when in (("micro_batch", "at every micro-batch"), ("step", "once per step")):
        chosen = ", which this plan minimises" if stats["sync_every"] == often else ""
        rows.append(
            Row(
                f"cost, ranks meet {when}",
                factor(_number(stats, f"imbalance_cost_{often}")),
                f"slowest over mean{chosen}",
            )
        )
    for often, when in (("micro_batch", "at every micro-batch"), ("step", "once per step")):
        rows.append(
            Row(
                f"tokens, ranks meet {when}",
                factor(_number(stats, f"imbalance_tokens_{often}")),
                "most over mean",
            )
        )
    return Section("Even", rows)


def _near(stats: Mapping[str, Value]) -> Section:
    verb = "is" if stats["num_packs_bound"] == 1 else "are"
    packs = f"at least {_int(stats, 'num_packs_bound')} {verb} needed"
    if stats["packs_optimal"]:
        packs += "; as few per rank as any plan can have"
    balance = "slowest over its lower bound"
    if stats["balance_optimal"]:
        balance += "; no plan of this recipe can be faster"
    return Section(
        "Bounds",
        [
            Row("micro-batches with segments", _int(stats, "num_packs"), packs),
            Row("time", factor(_number(stats, "time_over_floor")), balance),
        ],
    )


def _over_long(stats: Mapping[str, Value]) -> Section:
    rows = [
        Row("truncated", _int(stats, "num_truncated"), _lost(stats, "tokens_truncated")),
        Row("split", _int(stats, "num_split"), "samples in several segments"),
        Row(
            "alone",
            _int(stats, "num_alone"),
            "over a limit by themselves, in micro-batches of their own",
        ),
        Row("dropped", _int(stats, "num_dropped"), _lost(stats, "tokens_dropped")),
    ]
    some = [row for row in rows if row.value != "0"]
    return Section("Over-long samples", some or [Row("none", "")])


def _lost(stats: Mapping[str, Value], key: str) -> str:
    return f"{_times(stats, key, 'token')} lost"


def step_table(steps: Sequence[Mapping[str, Value]]) -> tuple[list[str], list[list[str]]]:
    """One row per step: header and cells."""
    header = [
        "step",
        "samples",
        "micro-batches",
        "slots",
        "padding",
        "at every micro-batch",
        "once per step",
        "over bound",
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
