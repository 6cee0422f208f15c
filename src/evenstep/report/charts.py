"""Charts of a page: lines over steps, a histogram of lengths, planned against measured time.

A chart has a bounded size however many values it shows: lines are means over neighbouring steps
with a band from the least to the most, lengths are counted in bins, points are a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.report.drawing import round_ticks
from evenstep.report.markup import escape
from evenstep.report.numbers import count

_WIDTH, _HEIGHT = 440, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 12, 26
_MOST_POINTS = 240
_MOST_DOTS = 600
_BINS = 40


@dataclass(frozen=True, slots=True, eq=False)
class Thinned:
    """Neighbouring values joined: their mean, least and most. `at` is the first of each."""

    at: FloatArray
    mean: FloatArray
    least: FloatArray
    most: FloatArray

    @classmethod
    def of(cls, at: FloatArray, values: FloatArray, most: int = _MOST_POINTS) -> Thinned:
        """At most `most` points; values that are NaN are left out.

        >>> Thinned.of(np.arange(4.0), np.array([1.0, 3.0, 5.0, 5.0]), most=2).mean.tolist()
        [2.0, 5.0]
        """
        real = np.isfinite(values)
        at, values = at[real], values[real]
        if len(values) == 0:
            return cls(at, values, values, values)
        starts = np.unique(np.linspace(0, len(values), min(most, len(values)) + 1).astype(int))[:-1]
        size = np.diff(np.append(starts, len(values)))
        return cls(
            at[starts],
            np.add.reduceat(values, starts) / size,
            np.minimum.reduceat(values, starts),
            np.maximum.reduceat(values, starts),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """How many samples and tokens there are of which lengths: bin i has `edges[i]` up to, but not
    including, `edges[i + 1]`."""

    edges: IntArray
    samples: IntArray
    tokens: IntArray

    @classmethod
    def of(cls, lengths: IntArray) -> Bins:
        """Bins in equal ratios from the shortest to the longest.

        >>> found = Bins.of(np.array([1, 1, 2, 3]))
        >>> found.edges.tolist(), found.samples.tolist(), found.tokens.tolist()
        ([1, 2, 3, 4], [2, 1, 1], [2, 2, 3])
        """
        low = int(lengths.min()) if len(lengths) else 1
        high = int(lengths.max(initial=low))
        inner = np.geomspace(low, high + 1, _BINS + 1).round().astype(np.int64)
        edges = np.unique(np.clip(inner, low, high + 1))
        at = np.searchsorted(edges, lengths, side="right") - 1
        samples = np.bincount(at, minlength=len(edges) - 1)
        tokens = np.bincount(at, weights=lengths, minlength=len(edges) - 1)
        return cls(edges, samples, tokens.astype(np.int64))


def lines(
    title: str, series: Mapping[str, Thinned], label: str, *, least: float | None = None
) -> str:
    """A chart with one line per name; the scale begins at `least` or at the lowest value."""
    shown = {name: line for name, line in series.items() if len(line.at)}
    if not shown:
        return ""
    frame = _Frame(
        (min(line.at[0] for line in shown.values()), max(line.at[-1] for line in shown.values())),
        _range([v for line in shown.values() for v in (line.least.min(), line.most.max())], least),
    )
    parts = frame.axes(label, "step")
    for index, line in enumerate(shown.values()):
        there = [frame.point(x, y) for x, y in zip(line.at, line.most, strict=True)]
        back = [frame.point(x, y) for x, y in zip(line.at[::-1], line.least[::-1], strict=True)]
        parts.append(f'<path class="band c{index % 4}" d="M{"L".join(there + back)}Z"/>')
        middle = [frame.point(x, y) for x, y in zip(line.at, line.mean, strict=True)]
        parts.append(f'<path class="line c{index % 4}" d="M{"L".join(middle)}"/>')
        if len(middle) == 1:
            x, y = middle[0].split()
            parts.append(f'<circle class="dot c{index % 4}" cx="{x}" cy="{y}" r="3"/>')
    return _figure(title, parts, list(shown))


def histogram(title: str, bins: Bins) -> str:
    """Samples by length as bars, and where the tokens are as a line, on a logarithmic axis."""
    low, high = math.log(bins.edges[0]), math.log(bins.edges[-1])
    shares = [values / max(1, values.sum()) for values in (bins.samples, bins.tokens)]
    frame = _Frame((low, max(high, low + 1e-6)), (0.0, 100 * max(s.max() for s in shares)))
    parts = frame.axes("% of all", "tokens per sample", logarithmic=True)
    for at in range(len(bins.samples)):
        left, right = (math.log(edge) for edge in bins.edges[at : at + 2])
        x, y = frame.across(left), frame.up(100 * shares[0][at])
        width = max(0.5, frame.across(right) - x - 0.6)
        label = (
            f"{count(bins.edges[at])} to {count(bins.edges[at + 1] - 1)} tokens: "
            f"{count(bins.samples[at])} samples, {count(bins.tokens[at])} tokens"
        )
        parts.append(
            f'<rect class="bin" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{frame.bottom - y:.1f}"><title>{escape(label)}</title></rect>'
        )
    middles = [
        frame.point(math.log(math.sqrt(a * b)), 100 * share)
        for a, b, share in zip(bins.edges[:-1], bins.edges[1:], shares[1], strict=True)
    ]
    parts.append(f'<path class="line c1" d="M{"L".join(middles)}"/>')
    return _figure(title, parts, ["samples", "tokens"])


def scatter(title: str, planned: FloatArray, measured: FloatArray) -> str:
    """Planned against measured milliseconds of micro-batches, and the line where both are equal."""
    if len(planned) == 0:
        return ""
    chosen = np.linspace(0, len(planned) - 1, min(_MOST_DOTS, len(planned))).astype(int)
    x, y = 1e3 * planned[chosen], 1e3 * measured[chosen]
    end = float(max(x.max(), np.percentile(y, 99) * 1.05))
    frame = _Frame((0.0, end), (0.0, end))
    parts = frame.axes("measured ms", "planned ms")
    parts.append(f'<path class="same" d="M{frame.point(0, 0)}L{frame.point(end, end)}"/>')
    for px, py in zip(x, y, strict=True):
        at_x, at_y = frame.point(px, min(py, end)).split()
        parts.append(f'<circle class="dot c0" cx="{at_x}" cy="{at_y}" r="2"/>')
    return _figure(title, parts, [])


class _Frame:
    """The scales of a chart."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, y
        self.bottom = _HEIGHT - _BOTTOM

    def across(self, value: float) -> float:
        low, high = self.x
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / ((high - low) or 1.0)

    def up(self, value: float) -> float:
        low, high = self.y
        return self.bottom - (self.bottom - _TOP) * (value - low) / ((high - low) or 1.0)

    def point(self, x: float, y: float) -> str:
        return f"{self.across(x):.1f} {self.up(y):.1f}"

    def axes(self, label: str, below: str, logarithmic: bool = False) -> list[str]:
        parts = []
        for tick in _ticks(*self.y):
            y = self.up(tick)
            parts.append(f'<path class="rule" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{_short(tick)}</text>')
        if logarithmic:
            low, high = (10 ** (value / math.log(10)) for value in self.x)
            powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high)) + 1)
            places = [(math.log(10) * power, 10.0**power) for power in powers]
        else:
            places = [(tick, tick) for tick in _ticks(*self.x)]
        for at, value in places:
            parts.append(
                f'<text class="mid" x="{self.across(at):.1f}" y="{self.bottom + 15}">'
                f"{_short(value)}</text>"
            )
        parts.append(
            f'<text class="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 1}">{escape(below)}</text>'
        )
        parts.append(f'<text x="{_LEFT}" y="{_TOP - 3}">{escape(label)}</text>')
        return parts


def _range(values: Sequence[float], least: float | None) -> tuple[float, float]:
    low, high = min(values), max(values)
    low = low if least is None else min(low, least)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if least is not None else low - room), high + room


def _ticks(low: float, high: float) -> list[float]:
    """About four round numbers between two others."""
    wide = round_ticks(high - low)
    step = wide[1] if len(wide) > 1 else (high - low) or 1.0
    first = math.ceil(low / step - 1e-9)
    found = [step * at for at in range(first, math.floor(high / step + 1e-9) + 1)]
    return [round(tick, 12) for tick in found]


def _short(value: float) -> str:
    """12000 -> 12k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _figure(title: str, parts: Sequence[str], names: Sequence[str]) -> str:
    keys = "".join(
        f'<span><i class="c{index % 4}"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
        if len(names) > 1
    )
    return (
        f'<figure><figcaption>{escape(title)}<span class="keys">{keys}</span></figcaption>'
        f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg></figure>"
    )


STYLE = (
    "figure{margin:0}figcaption{font-weight:600;margin-bottom:4px}"
    ".keys{font-weight:400;color:var(--muted)}.keys span{margin-left:12px;white-space:nowrap}"
    ".keys i{display:inline-block;width:10px;height:10px;margin-right:5px}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));"
    "gap:24px 32px}"
    ".chart{display:block;width:100%;height:auto}"
    ".chart text{font-size:11px;fill:var(--muted)}"
    ".chart .end{text-anchor:end}.chart .mid{text-anchor:middle}"
    ".chart .rule{stroke:var(--rule);stroke-width:.7}"
    ".chart .line{fill:none;stroke-width:1.6}"
    ".chart .band{opacity:.2;stroke:none}"
    ".chart .dot{stroke:none;opacity:.6}"
    ".chart .bin{fill:var(--work)}"
    ".chart .same{stroke:var(--muted);stroke-width:1;stroke-dasharray:4 3}"
    + "".join(
        f".chart .c{index}{{stroke:var(--{name});fill:var(--{name})}}"
        f".chart .line.c{index}{{fill:none}}i.c{index}{{background:var(--{name})}}"
        for index, name in enumerate(("work", "mark", "good", "s5"))
    )
)
