"""Draw the settings of a sweep: memory of a device against GPU-hours of the corpus."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.report import ink
from evenstep.report.drawing import LEFT, RIGHT, WIDTH, fitting, round_ticks
from evenstep.report.markup import escape
from evenstep.report.numbers import count
from evenstep.report.simulation.tuning import Setting, reason

_TOP, _HEIGHT = 86, 420
_X, _RIGHT = LEFT + 70, WIDTH - RIGHT - 20
_GIB = 2**30


def tradeoff_picture(
    settings: Sequence[Setting], chosen: Setting, memory: float, title: str
) -> str:
    """An SVG with one point per setting; filled circles are packed, open ones padded."""
    most = max(memory, *(setting.memory.peak for setting in settings)) / _GIB
    hours = [setting.gpu_hours for setting in settings]
    high = 1.1 * max(hours)
    parts = [
        f'<text class="h1" x="{LEFT}" y="40">{escape(fitting(title, 21))}</text>',
        f'<text class="note" x="{LEFT}" y="62">GPU-hours for the corpus, over the memory of a GPU '
        f"in GiB. Filled: packed. Open: padded. The ring is recommended.</text>",
        *_axes(most, high),
    ]
    full = _across(memory / _GIB, most)
    parts.append(f'<path class="limit" d="M{full:.1f} {_TOP}V{_TOP + _HEIGHT}"/>')
    parts.append(f'<text class="end" x="{full - 6:.1f}" y="{_TOP + 12}">memory of the GPU</text>')
    for setting in settings:
        parts.append(_point(setting, setting is chosen, most, high))
    y = _TOP + _HEIGHT + 56
    for line in reason(chosen, settings, memory).split(". "):
        text = line if line.endswith(".") else f"{line}."
        parts.append(f'<text class="note" x="{LEFT}" y="{y}">{escape(fitting(text, 9))}</text>')
        y += 17
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tradeoff" role="img" width="{WIDTH}" '
        f'height="{y}" viewBox="0 0 {WIDTH} {y}"><title>{escape(title)}</title>'
        f"<style>{_FORM}{ink.themed(_COLOURS)}</style>"
        f'<rect class="paper" width="{WIDTH}" height="{y}"/>{"".join(parts)}</svg>\n'
    )


def tradeoff_page(settings: Sequence[Setting], chosen: Setting, memory: float, title: str) -> str:
    """The picture as an HTML page."""
    picture = tradeoff_picture(settings, chosen, memory, title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{ink.variables()}"
        "body{margin:0;background:var(--paper)}svg{display:block;max-width:100%;height:auto}"
        f"</style></head>\n<body>{picture}</body></html>\n"
    )


def _across(gib: float, most: float) -> float:
    return _X + (_RIGHT - _X) * gib / (1.05 * most)


def _up(hours: float, high: float) -> float:
    return _TOP + _HEIGHT * (1 - hours / high)


def _axes(most: float, high: float) -> list[str]:
    bottom = _TOP + _HEIGHT
    parts = [f'<path class="axis" d="M{_X} {_TOP}V{bottom}H{_RIGHT}"/>']
    for tick in round_ticks(1.05 * most):
        at = _across(tick, most)
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 18}">{tick:g}</text>')
    for tick in round_ticks(high):
        y = _up(tick, high)
        parts.append(f'<path class="axis" d="M{_X} {y:.1f}H{_RIGHT}"/>')
        parts.append(f'<text class="end" x="{_X - 8}" y="{y + 4:.1f}">{tick:g}</text>')
    return parts


def _point(setting: Setting, chosen: bool, most: float, high: float) -> str:
    x = _across(setting.memory.peak / _GIB, most)
    y = _up(setting.gpu_hours, high)
    text = (
        f"{setting.layout}, {count(setting.budget)} slots, {count(setting.samples)} samples per "
        f"step, cp {setting.recipe.topology.cp}"
        f"{', recomputing activations' if setting.checkpointing else ''}: "
        f"{setting.gpu_hours:.4g} GPU-hours, {setting.memory.peak / _GIB:.1f} GiB"
        f"{f'; {setting.change}' if setting.change else ''}"
    )
    ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>' if chosen else ""
    kind = "full" if setting.layout == "packed" else "open"
    return (
        f'{ring}<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">'
        f"<title>{escape(text)}</title></circle>"
    )


_FORM = (
    f".tradeoff{{font-family:{ink.FONT}}}"
    ".tradeoff text{font-size:12px}"
    ".tradeoff .h1{font-size:21px;font-weight:650}"
    ".tradeoff .tick{text-anchor:middle}"
    ".tradeoff .end{text-anchor:end}"
    ".tradeoff .axis{stroke-width:1;fill:none}"
    ".tradeoff .limit{stroke-width:1.5;stroke-dasharray:5 3;fill:none}"
    ".tradeoff .ring{fill:none;stroke-width:2.5}"
    ".tradeoff .open{stroke-width:1.8}"
)
_COLOURS = (
    ".tradeoff .paper{fill:$paper}"
    ".tradeoff text{fill:$ink}"
    ".tradeoff .note,.tradeoff .tick,.tradeoff .end{fill:$muted}"
    ".tradeoff .axis{stroke:$rule}"
    ".tradeoff .limit,.tradeoff .ring{stroke:$mark}"
    ".tradeoff .full{fill:$s4}"
    ".tradeoff .open{fill:$paper;stroke:$s4}"
)
