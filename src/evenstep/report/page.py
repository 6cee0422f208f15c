"""Self-contained HTML pages with pictures and tables, light and dark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from evenstep.core.measures import Value
from evenstep.core.plan import Plan
from evenstep.report import comparison, ink
from evenstep.report.comparison import Entry
from evenstep.report.markup import escape
from evenstep.report.numbers import count
from evenstep.report.picture import comparison_picture, plan_picture
from evenstep.report.tables import cost_line, sections, step_table

_MOST_STEPS = 500


def plan_page(plan: Plan, title: str = "Plan") -> str:
    """A page about one plan: picture, stats, steps and recipe.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> plan_page(plan)[:15]
    '<!doctype html>'
    """
    stats = plan.stats()
    parts = [_bottleneck(stats), scroll(plan_picture(plan, title)), stat_sections(plan, stats)]
    parts += ["<h2>Steps</h2>", _steps(plan.step_stats()[:_MOST_STEPS])]
    if plan.num_steps > _MOST_STEPS:
        parts.append(f"<p>Lists the first {_MOST_STEPS} of {count(plan.num_steps)} steps.</p>")
    recipe = json.dumps(plan.recipe.to_dict(), indent=2)
    parts.append(f"<details><summary>Recipe</summary><pre>{escape(recipe)}</pre></details>")
    return document(title, parts)


def comparison_page(entries: Sequence[Entry], title: str = "Comparison") -> str:
    """A page that compares strategies on the same lengths.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> comparison_page([Entry("packed", plan, seconds=0.001)])[:15]
    '<!doctype html>'
    """
    plans = {entry.name: entry.plan for entry in entries if entry.plan is not None}
    parts = [f"<h1>{escape(title)}</h1>", comparison_grid(entries)]
    parts.append(f"<p>{escape(comparison.LEGEND)}</p>")
    if plans:
        parts.append(f"<p>{escape(cost_line(plans.values()))}</p>")
        parts.append(scroll(comparison_picture(plans, "One step under each strategy")))
    return document(title, parts)


def stat_sections(plan: Plan, stats: Mapping[str, Value]) -> str:
    """The tables of a plan's stats."""
    tables = []
    for section in sections(stats, plan.recipe):
        rows = "".join(
            f"<tr><th>{escape(row.label)}</th><td>{escape(row.value)}</td>"
            f'<td class="about">{escape(row.note)}</td></tr>'
            for row in section.rows
        )
        tables.append(f"<section><h2>{escape(section.title)}</h2><table>{rows}</table></section>")
    return f'<div class="sections">{"".join(tables)}</div>'


def _steps(steps: list[dict[str, Value]]) -> str:
    header, rows = step_table(steps)
    return grid(header, [[(cell, "") for cell in row] for row in rows])


def comparison_grid(entries: Sequence[Entry]) -> str:
    """One row per strategy."""
    rows = []
    for entry, cells in zip(entries, comparison.cells(entries), strict=True):
        figures = [(cell.text, "best" if cell.best else "") for cell in cells]
        rows.append([(entry.name, "name"), *(figures or [(entry.fault, "fault")])])
    return grid(["strategy", *comparison.HEADER], rows)


def grid(header: Sequence[str], rows: list[list[tuple[str, str]]]) -> str:
    """A table of (text, class) pairs; a fault spans the columns after the first."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}"{_span(kind, len(header))}>{escape(text)}</td>'
            for text, kind in row
        )
        + "</tr>"
        for row in rows
    )
    return scroll(
        f'<table class="grid"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    )


def _span(kind: str, columns: int) -> str:
    return f' colspan="{columns - 1}"' if kind == "fault" else ""


def scroll(inner: str) -> str:
    """Something wide, which scrolls on a narrow screen."""
    return f'<div class="scroll">{inner}</div>'


def _bottleneck(stats: Mapping[str, Value]) -> str:
    text = str(stats["bottleneck"])
    return f'<p class="bottleneck">{escape(text)}</p>' if text else ""


def document(title: str, parts: Sequence[str], style: str = "") -> str:
    """A page with these parts; empty ones are left out."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{ink.variables()}{_STYLE}{style}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


_STYLE = (
    f"body{{margin:0;background:var(--paper);color:var(--ink);font:14px/1.45 {ink.FONT}}}"
    "main{max-width:1240px;margin:0 auto;padding:16px 24px 48px}"
    "@media(max-width:600px){main{padding:12px 12px 32px}}"
    "h1{font-size:21px}h2{font-size:15px;margin:28px 0 6px}"
    ".scroll{overflow-x:auto}"
    ".scroll svg{display:block;max-width:100%;min-width:900px;height:auto}"
    ".sections{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));"
    "gap:0 36px}"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}"
    "th,td{padding:4px 12px 4px 0;border-bottom:1px solid var(--rule);text-align:left;"
    "vertical-align:top}"
    "th{font-weight:500}"
    "section td:nth-child(2){text-align:right;font-weight:600;white-space:nowrap}"
    ".about,details,p{color:var(--muted)}"
    ".grid td,.grid th{text-align:right;white-space:nowrap}"
    ".grid td:first-child,.grid th:first-child{text-align:left}"
    ".grid th{color:var(--muted)}"
    ".grid .best{color:var(--good);font-weight:650}"
    ".grid .fault{text-align:left;color:var(--mark);white-space:normal}"
    ".bottleneck{border-left:4px solid var(--mark);background:var(--card);color:var(--ink);"
    "padding:10px 14px}"
    "summary{cursor:pointer;margin-top:24px}pre{overflow-x:auto}"
)
