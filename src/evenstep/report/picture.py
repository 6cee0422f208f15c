"""Draw plans as SVG: one line per rank, micro-batches as blocks over time, segments as bars.

The horizontal axis is modelled cost. Padding is hatched; time that a rank waits is tinted.
The SVG is self-contained, and the same plan always gives the same SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from evenstep.core.measures import TimeParts, step_imbalances, time_parts
from evenstep.core.plan import Plan
from evenstep.report import ink
from evenstep.report.comparison import closing, one_step_warning, shared_second_work
from evenstep.report.drawing import LEFT, RIGHT, WIDTH, Drawing, fitting
from evenstep.report.markup import escape
from evenstep.report.numbers import factor, percent, times
from evenstep.report.panel import Panel
from evenstep.report.tables import Row, cost_line, headline
from evenstep.report.time_bars import legend, time_bars
from evenstep.report.timeline import Timeline, timelines

MANY_RANKS = 16  # with more ranks than this, two steps fill a screen

Block: TypeAlias = Callable[[float], tuple[str, float]]
"""Draws something with its top at a height; returns the SVG and how high it is."""


def plan_picture(plan: Plan, title: str = "Plan") -> str:
    """An SVG of a plan: its first steps and the most uneven of the rest.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> plan_picture(plan)[:4]
    '<svg'
    """
    return _steps_picture(plan, title, _headline(headline(plan.stats())))


def steps_picture(plan: Plan, title: str) -> str:
    """The same steps without the figures above them, which take time to compute."""
    return _steps_picture(plan, title, lambda y: ("", 8.0))


def _steps_picture(plan: Plan, title: str, top: Block) -> str:
    shown, left_out = _choose(plan)
    lines = timelines(plan, shown)
    panels = [Panel(plan, line, *_describe(plan, line)) for line in lines]
    return _compose(title, top, panels, [*left_out, cost_line([plan])], unit=None)


def comparison_picture(plans: Mapping[str, Plan], title: str = "Comparison", step: int = 0) -> str:
    """An SVG that compares strategies: the time of all steps, then one step of the most telling.

    The first strategy is the one that the closing sentence compares with.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> comparison_picture({"packed": plan})[:4]
    '<svg'
    """
    second = shared_second_work(plans.values())
    parts = {name: time_parts(plan, second) for name, plan in plans.items()}
    lines = {
        name: timelines(plans[name], [step], second)[0]
        for name in _telling(parts)
        if step < len(plans[name])
    }
    shortest = min((line.end for line in lines.values()), default=1.0) or 1.0
    panels = []
    for name, line in lines.items():
        _, detail = _describe(plans[name], line)
        panels.append(Panel(plans[name], line, f"{name}: {factor(line.end / shortest)}", detail))
    notes = [f"Step {step}; the shortest is 1."] if panels else []
    notes += dict.fromkeys(filter(None, map(one_step_warning, list(plans.values())[:1])))
    notes += [cost_line(plans.values())] if plans else []
    return _compose(title, _bars(parts), panels, notes, unit=shortest)


def _bars(parts: Mapping[str, TimeParts]) -> Block:
    """The time of all steps, and what it shows."""

    def draw(y: float) -> tuple[str, float]:
        bars, height = time_bars(parts, LEFT, WIDTH - LEFT - RIGHT, y + 32)
        said, end = closing(parts), y + 32 + height
        sentence = f'<text class="closing" x="{LEFT}" y="{end + 24:g}">{escape(said)}</text>'
        return legend(LEFT, y) + bars + (sentence if said else ""), 32 + height + 52

    return draw


def _telling(parts: Mapping[str, TimeParts]) -> list[str]:
    """At most three strategies: the first two, and the fastest."""
    names = list(parts)
    fastest = min(names, key=lambda name: parts[name].total, default="")
    return names if len(names) <= 3 else list(dict.fromkeys([*names[:2], fastest]))


def _choose(plan: Plan) -> tuple[list[int], list[str]]:
    """The first steps and the most uneven of the rest, and a note about what is left out."""
    most = 4 if plan.num_ranks <= MANY_RANKS else 2
    if plan.num_steps <= most:
        return list(range(plan.num_steps)), []
    worst = most - 1 + int(step_imbalances(plan)[most - 1 :].argmax())
    first = "the first" if most == 2 else f"the first {most - 1}"
    note = (
        f"Shows {most} of {times(plan.num_steps, 'step')}: {first}, and step {worst}, the most "
        f"uneven of the rest."
    )
    return [*range(most - 1), worst], [note]


def _describe(plan: Plan, line: Timeline) -> tuple[str, str]:
    micro = slice(int(line.micro.min()), int(line.micro.max()) + 1)
    offsets = plan.segment_offsets
    segments = int(offsets[micro.stop] - offsets[micro.start])
    slots, tokens = int(plan.slots[micro].sum()), int(plan.tokens[micro].sum())
    often = "micro-batch" if line.lock_step else "step"
    over = line.end / line.mean if line.mean else 1.0
    ranks, waves = line.micro.shape
    detail = (
        f"{times(segments, 'segment')} · {times(ranks, 'rank')} × "
        f"{times(waves, 'micro-batch')} · {percent((slots - tokens) / slots)} padding · "
        f"imbalance per {often} {factor(over)}"
    )
    return f"Step {line.step}", detail


def _compose(
    title: str, top: Block, panels: Sequence[Panel], notes: list[str], unit: float | None
) -> str:
    """Stack title, what is at the top, legend, panels and notes."""
    drawing = Drawing(panels, unit)
    parts: list[str] = []
    y = 44.0
    heading = escape(fitting(title, 21))
    parts.append(f'<text class="h1" x="{LEFT}" y="{y:g}">{heading}</text>')
    y += 18
    first, height = top(y)
    parts.append(first)
    y += height
    if panels:
        parts.append(_legend(drawing, y))
        y += 50
    for panel in panels:
        body, height = drawing.panel(panel, y)
        parts.append(body)
        y += height + 22
    for note in [*notes, *drawing.notes()]:
        parts.append(f'<text class="note" x="{LEFT}" y="{y:g}">{escape(note)}</text>')
        y += 17
    height = y + 10
    colours = _COLOURS + (".evenstep .shared{fill:$mark}" if drawing.has_shared else "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="evenstep" role="img" '
        f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}">'
        f"<title>{escape(title)}</title><style>{_FORM}{ink.themed(colours)}</style>{_PATTERN}"
        f'<rect class="paper" width="{WIDTH}" height="{height:g}"/>{"".join(parts)}</svg>\n'
    )


def _headline(figures: list[Row]) -> Block:
    """The figures in one line."""
    step = (WIDTH - LEFT - RIGHT) / len(figures)

    def draw(y: float) -> tuple[str, float]:
        drawn = (
            f'<g transform="translate({LEFT + step * index:g} {y:g})">'
            f'<text class="figure" y="24">{escape(row.value)}</text>'
            f'<text class="note" y="42">{escape(row.label)}</text></g>'
            for index, row in enumerate(figures)
        )
        return "".join(drawn), 62

    return draw


def _legend(drawing: Drawing, y: float) -> str:
    """One line: segment lengths by shade, padding, waiting, empty micro-batches, mean load."""
    x, parts = float(LEFT), []

    def add(mark: str, label: str, gap: float = 16) -> None:
        nonlocal x
        parts.append(mark.format(x=f"{x:g}", y=f"{y:g}", text=f"{y + 10:g}"))
        parts.append(f'<text class="note" x="{x + 23:g}" y="{y + 11:g}">{escape(label)}</text>')
        x += 23 + 7 * len(label) + gap

    box = '<rect class="{kind}" x="{{x}}" y="{{y}}" width="17" height="13"/>'
    parts.append(f'<text class="note" x="{x:g}" y="{y + 11:g}">segment length</text>')
    x += 104
    for shade, label in drawing.shading.labels():
        add(box.format(kind=f"s{shade}"), label, 8)
    x += 12
    hatched = box.format(kind="pad") + box.format(kind="hatch")
    add(hatched, "padding")
    add(box.format(kind="idle"), "waiting")
    if drawing.second_work:
        add(box.format(kind="second"), f"second work ({drawing.second_work})")
    if drawing.has_shared:
        add(box.format(kind="shared"), "shared prefix")
    if drawing.has_empty:
        add(box.format(kind="empty"), "empty micro-batch")
    if drawing.unit is None:
        line = '<path class="mean" d="M{x} {text}m0 -4h17"/>'
        add(line, "mean load")
    return "".join(parts)


_FORM = (
    f".evenstep{{font-family:{ink.FONT}}}"
    ".evenstep text{font-size:12px}"
    ".evenstep .h1{font-size:21px;font-weight:650}"
    ".evenstep .h2{font-size:14px;font-weight:650}"
    ".evenstep .figure{font-size:22px;font-weight:600}"
    ".evenstep .tick{font-size:11px;text-anchor:middle}"
    ".evenstep .unit{font-size:11px}"
    ".evenstep .closing{font-size:18px;font-weight:650}"
    ".evenstep .bar{font-size:13px}"
    ".evenstep .figure-end{font-size:13px;font-weight:600;text-anchor:end}"
    ".evenstep .tear{stroke-width:1.2;fill:none}"
    ".evenstep .rank{text-anchor:end;dominant-baseline:central}"
    ".evenstep .busy{dominant-baseline:central}"
    ".evenstep .slowest{font-weight:650}"
    ".evenstep .apart{stroke-width:.7}"
    ".evenstep .hatch{fill:url(#evenstep-hatch)}"
    ".evenstep .hatching{stroke-width:1.4}"
    ".evenstep .empty{stroke-dasharray:2 2}"
    ".evenstep .block{fill:none;stroke-width:2.6}"
    ".evenstep .barrier{stroke-width:.6;stroke-dasharray:1 2;fill:none}"
    ".evenstep .axis{stroke-width:1;fill:none}"
    ".evenstep .mean{stroke-width:1.5;stroke-dasharray:5 3;fill:none}"
    ".evenstep .hover{fill:none;pointer-events:all}"
)
_COLOURS = (
    ".evenstep .paper{fill:$paper}"
    ".evenstep text{fill:$ink}"
    ".evenstep .note,.evenstep .tick,.evenstep .unit,.evenstep .rank,.evenstep .busy{fill:$muted}"
    ".evenstep .slowest{fill:$mark}"
    f"{''.join(f'.evenstep .s{shade}{{fill:$s{shade}}}' for shade in range(ink.SHADES))}"
    ".evenstep .apart,.evenstep .block{stroke:$paper}"
    ".evenstep .work{fill:$work}"
    ".evenstep .gap{fill:$paper}"
    ".evenstep .tear{stroke:$muted}"
    ".evenstep .pad{fill:$pad}"
    ".evenstep .hatching{stroke:$hatch}"
    ".evenstep .idle{fill:$idle}"
    ".evenstep .second{fill:$second}"
    ".evenstep .empty{fill:$paper;stroke:$muted}"
    ".evenstep .barrier{stroke:$muted}"
    ".evenstep .axis{stroke:$rule}"
    ".evenstep .mean{stroke:$mark}"
)
_PATTERN = (
    '<defs><pattern id="evenstep-hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatching" d="M0 0V5"/></pattern></defs>'
)
