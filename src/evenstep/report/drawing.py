"""Draw panels as SVG: lines of ranks, blocks, bars and axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.core.plan import Plan
from evenstep.core.ragged import BoolArray, FloatArray, IntArray, divided_up, offsets_of, rounded_up
from evenstep.report import ink
from evenstep.report.markup import escape, shortened
from evenstep.report.numbers import count, percent, times
from evenstep.report.panel import Panel
from evenstep.report.time_bars import shared_end

WIDTH = 1240
LEFT, RIGHT = 28, 28
_LABELS, _BUSY = 52, 58  # the margins left and right of the lines
_X = LEFT + _LABELS
_RIGHT = WIDTH - RIGHT - _BUSY
_LINE_WIDTH = _RIGHT - _X
_MOST_BARS = 24_000  # per picture
_MOST_HOVERS = 2500  # with more blocks there are no tooltips
_MOST_SAMPLES = 12  # that a tooltip lists
_DIGIT = 7  # width of a digit under the axis, in pixels
_THINNEST = 2.5  # minimum height of a row in pixels; thinner rows share a line
_MOST_RATIO = 4.0  # a panel of more than this many times the shortest has its own scale
_APART = 4  # minimum width in pixels of a bar with an outline

_SHADES = [f"s{shade}" for shade in range(ink.SHADES)]
_LAYERS = [
    "idle",
    "second",
    "pad",
    "hatch",
    *_SHADES,
    *(f"apart {s}" for s in _SHADES),
    "shared",
    "block",
    "empty",
]


class Drawing:
    """The state that all panels of one picture share: scale, shades and notes.

    `unit` is the cost shown as 1 on a shared axis; panels that are much longer than the shortest
    have a scale of their own. Without it every panel has its own axis, in mean loads.
    """

    def __init__(self, panels: Sequence[Panel], unit: float | None) -> None:
        self.unit = unit
        self._span = shared_end([panel.span for panel in panels], _MOST_RATIO)
        lengths = [panel.plan.segments.length[panel.segments] for panel in panels]
        every = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        self.shading = ink.Shading.of(int(every.min(initial=2**40)), int(every.max(initial=1)))
        self.has_empty = any(
            bool((np.diff(panel.plan.segment_offsets)[panel.line.micro] == 0).any())
            for panel in panels
        )
        self.second_work = next(
            (panel.line.second_name for panel in panels if panel.line.second_name), ""
        )
        self.has_shared = any(panel.plan.segments.parent is not None for panel in panels)
        self._hover = sum(panel.blocks for panel in panels) <= _MOST_HOVERS
        self._narrowest = self._fit(panels)
        self._merged = 0
        self._left_out: list[str] = []

    def notes(self) -> list[str]:
        """One sentence for each thing that the picture leaves out or merges."""
        if not self._merged:
            return self._left_out
        merged = (
            f"Merges {times(self._merged, 'segment')} too small to draw with their neighbours, in "
            f"the shade of their mean length."
        )
        return [*self._left_out, merged]

    def panel(self, panel: Panel, y: float) -> tuple[str, float]:
        """The panel as SVG with its top at `y`, and its height."""
        own = self.unit is None or panel.span > self._span
        scale = _LINE_WIDTH / (panel.span if own else self._span)
        top = y + 42
        paint: dict[str, list[str]] = {layer: [] for layer in _LAYERS}
        labels, hovers = [], []
        for index, rank in enumerate(panel.ranks):
            line_y = top + index * panel.pitch
            labels.append(_labels(panel, rank, line_y + panel.height / 2))
            hovers += _second_blocks(paint, panel, rank, scale, line_y)
            for wave in range(panel.waves):
                hovers.append(self._block(paint, panel, rank, wave, scale, line_y))
        self._left_out += [note for note in panel.notes() if note not in self._left_out]
        heading = escape(fitting(panel.heading, 14))
        detail = panel.detail
        if self.unit is not None and own:
            detail += f" · drawn {self._span / panel.span:.2g}× as wide as the others"
        parts = [
            f'<text class="h2" x="{LEFT}" y="{y + 12:g}">{heading}</text>',
            f'<text class="note" x="{LEFT}" y="{y + 30:g}">{escape(detail)}</text>',
            f'<text class="unit" x="{_RIGHT + 10}" y="{y + 30:g}">busy</text>',
            *labels,
            *(f'<path class="{kind}" d="{"".join(d)}"/>' for kind, d in paint.items() if d),
            self._axis(panel, scale, top),
            *(hovers if self._hover else []),
        ]
        return "".join(parts), 42 + panel.pitch * len(panel.ranks) + 24

    def _block(
        self,
        paint: dict[str, list[str]],
        panel: Panel,
        rank: int,
        wave: int,
        scale: float,
        y: float,
    ) -> str:
        """Draw one micro-batch and the wait after it; return its tooltip."""
        line, height = panel.line, panel.height
        x = _X + float(line.starts[rank, wave]) * scale
        width = float(line.costs[rank, wave]) * scale
        wait = float(panel.waits[rank, wave]) * scale
        box = _rect(x, y, width, height)
        bars = bars_of(
            panel.plan,
            int(line.micro[rank, wave]),
            self._narrowest / max(width, 1e-9),
            _THINNEST / height,
        )
        self._merged += bars.merged
        if wait > 0.3:
            paint["idle"].append(_rect(x + width, y, wait, height))
        if len(bars) == 0:  # an empty micro-batch; its cost is too small to draw to scale
            mark = max(width, 9)
            at = min(x + 1.5, _X + panel.span * scale - mark)
            paint["empty"].append(_rect(at, y + 1, mark, height - 2))
            return _hover(panel, rank, wave, bars, box)
        for layer in ("pad", "hatch", "block"):
            paint[layer].append(box)
        for index in range(len(bars)):
            left, right = float(bars.left[index]) * width, float(bars.right[index]) * width
            top, bottom = float(bars.top[index]) * height, float(bars.bottom[index]) * height
            shade = f"s{self.shading.shade(float(bars.length[index]))}"
            layer = f"apart {shade}" if right - left >= _APART else shade
            paint[layer].append(_rect(x + left, y + top, max(right - left, 0.4), bottom - top))
            if bars.shared[index]:  # a line along the top of what others see in front
                paint["shared"].append(_rect(x + left, y + top, max(right - left, 0.4), 3))
        return _hover(panel, rank, wave, bars, box)

    def _fit(self, panels: Sequence[Panel]) -> float:
        """The minimum width of a bar in pixels, chosen so that the number of bars stays bounded."""
        narrowest = 1.6
        segments = sum(panel.segments.stop - panel.segments.start for panel in panels)
        lines = sum(len(panel.ranks) for panel in panels)
        if segments > _MOST_BARS:
            narrowest = max(narrowest, lines * _LINE_WIDTH / _MOST_BARS)
        return narrowest

    def _axis(self, panel: Panel, scale: float, top: float) -> str:
        bottom = top + panel.pitch * len(panel.ranks)
        unit = self.unit or panel.line.mean or 1.0
        end = panel.span / unit
        parts = []
        if panel.waves > 1:
            barriers = panel.line.barriers[: panel.waves]
            lines = "".join(
                f"M{_n(_X + float(at) * scale)} {_n(top - 3)}V{_n(bottom)}" for at in barriers
            )
            parts.append(f'<path class="barrier" d="{lines}"/>')
        parts.append(f'<path class="axis" d="M{_X} {_n(bottom + 2)}h{_n(panel.span * scale)}"/>')
        for tick in round_ticks(end):
            x = _X + tick * unit * scale
            parts.append(f'<path class="axis" d="M{_n(x)} {_n(bottom + 2)}v4"/>')
            text = f"{tick:g}"
            x = min(x, _RIGHT - _DIGIT / 2 * len(text))  # do not overlap the name of the axis
            parts.append(f'<text class="tick" x="{_n(x)}" y="{_n(bottom + 18)}">{text}</text>')
        name = "mean loads" if self.unit is None else "× shortest"
        label = f'<text class="unit" x="{_RIGHT + 10}" y="{_n(bottom + 18)}">{name}</text>'
        parts.append(label)
        if self.unit is None and end >= 1 - 1e-9:
            x = _X + unit * scale
            parts.append(f'<path class="mean" d="M{_n(x)} {_n(top - 5)}V{_n(bottom + 2)}"/>')
        return "".join(parts)


def fitting(text: str, size: float) -> str:
    """Text shortened to fit one line of the picture at this font size."""
    return shortened(text, (WIDTH - LEFT - RIGHT) / size)


def _labels(panel: Panel, rank: int, y: float) -> str:
    busy = panel.line.busy
    size = min(12.0, panel.height)
    kind = "busy slowest" if panel.line.slowest[rank] else "busy"
    x = _RIGHT + 10
    return (
        f'<text class="rank" x="{_X - 8}" y="{_n(y)}" style="font-size:{size:g}px">rank {rank}'
        f'</text><text class="{kind}" x="{x}" y="{_n(y)}" style="font-size:{size:g}px">'
        f"{escape(percent(float(busy[rank])))}</text>"
    )


def _second_blocks(
    paint: dict[str, list[str]], panel: Panel, rank: int, scale: float, y: float
) -> list[str]:
    """Draw the second work of a rank and the waits after it; return its tooltips."""
    line, drawn = panel.line, []
    if line.second is None:
        return []
    for wave, end in enumerate(line.second_ends[: panel.waves].tolist()):
        cost = float(line.second[rank, wave])
        x = _X + (end - float(line.second[:, wave].max())) * scale
        width, until = cost * scale, _X + end * scale
        box = _rect(x, y, width, panel.height)
        if width > 0:
            paint["second"].append(box)
        if until - x - width > 0.3:
            paint["idle"].append(_rect(x + width, y, until - x - width, panel.height))
        where = f"micro-batch {wave}" if line.lock_step else "all micro-batches"
        text = f"rank {rank}, {where}: second work ({line.second_name}), cost {cost:.6g}"
        drawn.append(f'<path class="hover" d="{box}"><title>{escape(text)}</title></path>')
    return drawn


def _hover(panel: Panel, rank: int, wave: int, bars: Bars, box: str) -> str:
    plan, micro = panel.plan, int(panel.line.micro[rank, wave])
    rows = int(plan.micro_offsets[micro + 1] - plan.micro_offsets[micro])
    width = int(plan.widths[micro])
    text = (
        f"rank {rank}, micro-batch {wave}: {times(bars.segments, 'segment')}, "
        f"{times(rows, 'row')} × {count(width)} = {times(rows * width, 'slot')}, "
        f"{times(bars.tokens, 'token')}, cost {panel.line.costs[rank, wave]:.6g}"
        f"{_samples(plan, micro)}"
    )
    return f'<path class="hover" d="{box}"><title>{escape(text)}</title></path>'


def _samples(plan: Plan, micro: int) -> str:
    """The samples of a micro-batch with their lengths, in the order in which they run."""
    first, last = plan.row_offsets[plan.micro_offsets[micro : micro + 2]].tolist()
    shown = plan.segments.take(slice(first, min(last, first + _MOST_SAMPLES)))
    if not len(shown):
        return ""
    ids = shown.sample if plan.sample_ids is None else plan.sample_ids[shown.sample]
    names = [f"{i} ({n:,})" for i, n in zip(ids.tolist(), shown.length.tolist(), strict=True)]
    more = last - first - len(names)
    left = f" and {count(more)} more" if more else ""
    return f". Samples (tokens): {', '.join(names)}{left}"


def round_ticks(end: float) -> list[float]:
    """About five round numbers from 0 to `end`."""
    step = 10 ** math.floor(math.log10(max(end, 1e-9) / 4))
    step *= min((1, 2, 2.5, 5, 10), key=lambda times: abs(end / (step * times) - 5))
    return [round(step * index, 9) for index in range(int(end / step + 1e-9) + 1)]


def _rect(x: float, y: float, width: float, height: float) -> str:
    return f"M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h-{_n(width)}z"


def _n(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return text or "0"


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """The segments of a micro-batch as bars; `merged` counts those that share a bar.

    A block is a unit square: x runs along the row, y over the rows. The area without bars is
    padding. Bars that are too narrow to see are merged and counted.
    """

    left: FloatArray
    right: FloatArray
    top: FloatArray
    bottom: FloatArray
    length: FloatArray  # mean length of the segments in the bar, for its shade
    shared: BoolArray  # whether the bar is one segment that others see in front
    segments: int
    tokens: int
    merged: int

    def __len__(self) -> int:
        return len(self.left)


def bars_of(plan: Plan, micro: int, narrowest: float, thinnest: float) -> Bars:
    """The bars of a micro-batch; minimum width and height are fractions of the block."""
    first_row, last_row = plan.micro_offsets[micro : micro + 2]
    rows = plan.row_offsets[first_row : last_row + 1]
    segments = slice(int(rows[0]), int(rows[-1]))
    row_of = np.repeat(np.arange(len(rows) - 1), np.diff(rows))
    lengths = plan.segments.length[segments]
    offsets = offsets_of(rounded_up(lengths, plan.recipe.topology.alignment))
    starts = offsets[:-1] - offsets[(rows - rows[0])[row_of]]
    width, count = float(plan.widths[micro]), len(rows) - 1
    together = max(1, int(np.ceil(count * thinnest - 1e-9)))  # rows that share one line
    if together > 1:
        return _thin_rows(row_of, lengths, width, count, together)
    left, right = starts / width, (starts + lengths) / width
    shared = np.zeros(len(lengths), bool)
    if plan.segments.parent is not None:
        parent = plan.segments.parent[segments]
        shared[parent[parent >= 0]] = True
    group = _groups(left, right, row_of, narrowest)
    firsts = np.flatnonzero(np.diff(group, prepend=-1))
    lasts = np.append(firsts[1:], len(group)) - 1 if len(firsts) else firsts
    size = lasts - firsts + 1
    total = offsets_of(lengths)
    return Bars(
        left[firsts],
        right[lasts],
        row_of[firsts] / count,
        (row_of[firsts] + 1) / count,
        (total[lasts + 1] - total[firsts]) / np.maximum(size, 1),
        shared[firsts] & (size == 1),
        len(lengths),
        int(total[-1]),
        int(size[size > 1].sum()),
    )


def _groups(left: FloatArray, right: FloatArray, row_of: IntArray, narrowest: float) -> IntArray:
    """Number the bars; narrow neighbours in a row share one until it is wide enough."""
    group = np.zeros(len(left), np.int64)
    number, start = 0, 0
    for index in range(1, len(left)):
        same_row = row_of[index] == row_of[index - 1]
        tiny = right[index] - left[index] < narrowest
        unseen = right[index - 1] - left[start] < narrowest
        if not (same_row and tiny and unseen):
            number, start = number + 1, index
        group[index] = number
    return group


def _thin_rows(
    row_of: IntArray, lengths: IntArray, width: float, count: int, together: int
) -> Bars:
    """Draw several rows as one line, as wide as their mean."""
    line = row_of // together
    lines = divided_up(count, together)
    held = np.bincount(line, minlength=lines)
    tokens = np.bincount(line, weights=lengths, minlength=lines)
    rows = np.minimum(together, count - together * np.arange(lines))
    shown = held > 0
    top = np.arange(lines)[shown] * together / count
    share = (tokens / (rows * width))[shown]
    return Bars(
        np.zeros(len(share)),
        share,
        top,
        top + rows[shown] / count,
        tokens[shown] / held[shown],
        np.zeros(len(share), bool),
        len(lengths),
        int(lengths.sum()),
        len(lengths),
    )
