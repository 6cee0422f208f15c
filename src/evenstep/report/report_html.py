"""The page of a report: one HTML file that works offline, on a phone, light and dark."""

from __future__ import annotations

import json
import math

import numpy as np

from evenstep.report import comparison
from evenstep.report.charts import STYLE, Bins, Thinned, histogram, lines, scatter
from evenstep.report.markup import escape
from evenstep.report.numbers import count, factor, percent, times
from evenstep.report.page import comparison_grid, document, grid, scroll, stat_sections
from evenstep.report.picture import comparison_picture, steps_picture
from evenstep.report.report import Report
from evenstep.report.tables import Row, cost_line


def report_page(report: Report) -> str:
    """The report as a page. Its numbers are in the element `evenstep-data`, as JSON.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> report_page(Report(title="Two samples", plan=plan))[:15]
    '<!doctype html>'
    """
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        _cards(_headline(report)),
        _advice(report),
        _strategies(report),
        _measured(report),
        _charts(report),
        "<h2>The plan</h2><p>One line per rank. Point at a micro-batch to see its samples.</p>",
        scroll(steps_picture(report.plan, "Steps")),
        stat_sections(report.plan, report.stats),
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        _recipe(report),
        _data(report),
        f'<div id="tip" hidden></div><script>{_SCRIPT}</script>',
    ]
    return document(report.title, parts, STYLE + _STYLE)


def _headline(report: Report) -> list[Row]:
    stats, saving, log = report.stats, report.saving, report.log
    rows = []
    if saving is not None:
        rows.append(Row(f"less time than {saving.than}", f"{saving.times_less_time:.2f}×"))
        rows.append(Row("slots not computed", count(saving.slots)))
        if saving.gpu_hours is not None:
            rows.append(Row("GPU-hours saved, estimated", _hours(saving.gpu_hours)))
    if log is not None and math.isfinite(log.per_second()):
        rows.append(Row("tokens/s", count(log.per_second())))
    often = str(stats["sync_every"])
    return [
        *rows,
        Row("of slots are real tokens", percent(1 - stats["padding_ratio"])),
        Row(f"imbalance per {often.replace('_', '-')}", factor(stats[f"imbalance_cost_{often}"])),
        Row("real tokens", count(stats["tokens"])),
        Row(
            f"samples in {times(stats['num_steps'], 'step')} on "
            f"{times(stats['num_ranks'], 'rank')}",
            count(stats["num_samples"]),
        ),
    ]


def _hours(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 10 else count(value)


def _cards(rows: list[Row]) -> str:
    cards = "".join(
        f"<div><b>{escape(row.value)}</b><span>{escape(row.label)}</span></div>" for row in rows
    )
    return f'<div class="cards">{cards}</div>'


def _advice(report: Report) -> str:
    if not report.advice:
        return ""
    items = "".join(f"<li>{escape(each.text)}</li>" for each in report.advice)
    return f'<h2>Advice</h2><ul class="advice">{items}</ul>'


def _strategies(report: Report) -> str:
    plans = {entry.name: entry.plan for entry in report.entries if entry.plan is not None}
    if len(plans) < 2:
        return ""
    return (
        f"<h2>Strategies side by side</h2>{comparison_grid(report.entries)}"
        f"<p>{escape(comparison.LEGEND)} {escape(cost_line(plans.values()))}</p>"
        f"{scroll(comparison_picture(plans, 'Modelled time'))}"
    )


def _measured(report: Report) -> str:
    """A table of the runs, and their losses and throughput over steps."""
    if not report.runs:
        return ""
    header = ["run", "steps", "tokens/s", "padding", "imbalance, planned", "imbalance, measured",
              "waiting for data", "last loss"]  # fmt: skip
    rows = []
    for name, log in report.runs.items():
        steady = log.steady
        cells = [
            count(len(log)),
            _number(log.per_second(), ",.0f"),
            _number(_mean(log.padding), ".2%"),
            _number(_mean(log.planned), ".4f"),
            _number(_mean(log.measured[steady]), ".4f"),
            _number(log.waiting_share(), ".1%"),
            _number(log.loss[-1] if len(log) else math.nan, ".6f"),
        ]
        rows.append([(name, "name"), *((cell, "") for cell in cells)])
    losses = {name: Thinned.of(log.step, log.loss) for name, log in report.runs.items()}
    speeds = {
        name: Thinned.of(log.step[log.steady], log.tokens_per_second[log.steady])
        for name, log in report.runs.items()
    }
    charts = [
        lines("Loss", losses, "loss"),
        lines("Throughput", speeds, "tokens/s", least=0.0),
        *_times(report),
    ]
    return (
        f'<h2>Measured</h2>{grid(header, rows)}<div class="charts measured">{"".join(charts)}</div>'
    )


def _times(report: Report) -> list[str]:
    """Planned against measured time: of the steps, and of micro-batches."""
    log = report.log
    if log is None:
        return []
    planned, measured = log.step_times(report.plan.recipe.sync_every)
    steady = log.steady
    series = {
        "planned": Thinned.of(log.step[steady], planned[steady]),
        "measured": Thinned.of(log.step[steady], measured[steady]),
    }
    return [
        lines("Slowest rank of a step", series, "seconds", least=0.0),
        scatter("Micro-batches, planned and measured", *log.micro_batches()),
    ]


def _charts(report: Report) -> str:
    fill, imbalance = {"fill": report.fill()}, {"planned": report.imbalance()}
    log = report.log
    if log is not None:
        imbalance["measured"] = Thinned.of(log.step[log.steady], log.measured[log.steady])
    charts = [
        histogram("Lengths", Bins.of(report.plan.lengths)),
        lines("Fill: tokens over slots", fill, "share", least=0.0),
        lines("Imbalance: slowest rank over the mean", imbalance, "×", least=1.0),
    ]
    return f'<h2>Lengths and steps</h2><div class="charts">{"".join(charts)}</div>'


def _recipe(report: Report) -> str:
    text = json.dumps(report.plan.recipe.to_dict(), indent=2)
    return f"<details><summary>Recipe</summary><pre>{escape(text)}</pre></details>"


def _data(report: Report) -> str:
    """The numbers as JSON; `<` is escaped, so that no text can end the element."""
    text = json.dumps(report.numbers(), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="evenstep-data">{text}</script>'


def _mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    real = values[np.isfinite(values)]
    return float(real.mean()) if len(real) else math.nan


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


_STYLE = (
    ".cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px}"
    ".cards div{background:var(--card);padding:12px 14px;border-radius:6px}"
    ".cards b{display:block;font-size:22px;font-variant-numeric:tabular-nums}"
    ".cards span{color:var(--muted)}"
    ".advice{border-left:4px solid var(--mark);background:var(--card);margin:0;"
    "padding:10px 14px 10px 32px}"
    ".measured{margin-top:18px}"
    "#tip{position:fixed;z-index:9;max-width:min(420px,90vw);background:var(--ink);"
    "color:var(--paper);padding:6px 10px;border-radius:4px;font-size:12px;pointer-events:none}"
)
# Tooltips that also work by touch: the text of <title> moves into a box next to the pointer.
_SCRIPT = """
(function () {
  var tip = document.getElementById("tip");
  function show(event) {
    var shape = event.target.closest("[data-tip]");
    tip.hidden = !shape;
    if (!shape) return;
    tip.textContent = shape.getAttribute("data-tip");
    var wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - wide - 4)) + "px";
    var below = event.clientY + 16;
    tip.style.top = (below + high > innerHeight ? event.clientY - high - 10 : below) + "px";
  }
  document.querySelectorAll("svg :not(svg) > title").forEach(function (title) {
    title.parentNode.setAttribute("data-tip", title.textContent);
    title.remove();
  });
  document.addEventListener("pointermove", show);
  document.addEventListener("click", show);
})();
"""
