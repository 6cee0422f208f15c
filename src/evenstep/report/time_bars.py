"""Draw the modelled time of strategies as bars: work, padding and waiting in three colours."""

from __future__ import annotations

from collections.abc import Mapping

from evenstep.core.measures import TimeParts
from evenstep.report.markup import escape, shortened
from evenstep.report.numbers import factor, percent

_MOST_RATIO = 8.0  # a time above this many times the shortest does not set the scale
_NAME, _FIGURE = 200, 90  # widths of the names and of the figures
_PITCH, _HEIGHT = 26, 18
_LAYERS = {"work": ("work",), "padding": ("pad", "hatch"), "waiting": ("idle",)}
LABELS = {"work": "useful work", "padding": "padding", "waiting": "waiting"}


def shared_end(times: list[float], most: float) -> float:
    """Where a scale for these times ends: at the longest of at most `most` times the shortest.

    >>> shared_end([1.0, 3.0, 12.0], most=4.0)
    3.0
    """
    shown = [time for time in times if time > 0]
    return max((time for time in shown if time <= most * min(shown)), default=1.0)


def time_bars(
    parts: Mapping[str, TimeParts], left: float, width: float, y: float
) -> tuple[str, float]:
    """One bar per strategy as SVG with the top at `y`, and the height of all.

    A bar that would be much longer than the others is torn: its work is to scale, the rest is not.
    """
    times = [part.total for part in parts.values()]
    shortest = min((time for time in times if time > 0), default=1.0)
    end, room = shared_end(times, _MOST_RATIO), width - _NAME - _FIGURE
    torn = any(time > end for time in times)
    unit = (0.72 if torn else 1.0) * room / end
    drawn = []
    for index, (name, part) in enumerate(parts.items()):
        top = y + index * _PITCH
        scaled = [value * unit for value in part]
        if part.total > end:
            scaled = _torn(scaled, room)
        drawn += [
            f'<text class="bar" x="{left:g}" y="{top + 13:g}">'
            f"{escape(shortened(name, (_NAME - 8) / 12))}</text>",
            *_bar(part, scaled, left + _NAME, top),
            _tear(left + _NAME + 0.9 * room, top) if part.total > end else "",
            f'<text class="figure-end" x="{left + width:g}" y="{top + 14:g}">'
            f"{factor(part.total / shortest)}</text>",
        ]
    return "".join(drawn), _PITCH * len(parts)


def _torn(scaled: list[float], room: float) -> list[float]:
    """The lengths of a bar that fills the room: [10, 60, 30] in 40 -> [10, 20, 10]."""
    work, *rest = scaled
    work = min(work, 0.7 * room)
    return [work, *(length * (room - work) / sum(rest) for length in rest)]


def legend(left: float, y: float) -> str:
    """The three colours with their names."""
    drawn, x = [], left
    for part, label in LABELS.items():
        drawn += [
            f'<rect class="{layer}" x="{x:g}" y="{y:g}" width="17" height="13"/>'
            for layer in _LAYERS[part]
        ]
        drawn.append(f'<text class="note" x="{x + 23:g}" y="{y + 11:g}">{label}</text>')
        x += 44 + 7 * len(label)
    return "".join(drawn)


def _bar(part: TimeParts, lengths: list[float], x: float, top: float) -> list[str]:
    drawn = []
    for (name, layers), length in zip(_LAYERS.items(), lengths, strict=True):
        share = percent(getattr(part, name) / (part.total or 1.0))
        for layer in layers if length else ():
            drawn.append(
                f'<rect class="{layer}" x="{x:.2f}" y="{top:g}" width="{length:.2f}" '
                f'height="{_HEIGHT}"><title>{LABELS[name]}: {escape(share)}</title></rect>'
            )
        x += length
    return drawn


def _tear(x: float, top: float) -> str:
    """Two slanted lines across a bar that is not to scale."""
    bottom, gap = top + _HEIGHT + 3, 5
    return (
        f'<path class="gap" d="M{x:g} {top - 3:g}L{x + 6:g} {top - 3:g}L{x + gap:g} {bottom:g}'
        f'L{x - 6 + gap:g} {bottom:g}Z"/>'
        f'<path class="tear" d="M{x:g} {top - 3:g}L{x - 1:g} {bottom:g}'
        f'M{x + 6:g} {top - 3:g}L{x + gap:g} {bottom:g}"/>'
    )
