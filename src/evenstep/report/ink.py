"""Colours and fonts of pictures and pages, light and dark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from string import Template

from evenstep.report.numbers import count

SHADES = 6

_LIGHT = {
    "paper": "#ffffff",
    "card": "#f6f7f9",
    "ink": "#1c2128",
    "muted": "#5d6772",
    "rule": "#d3d8de",
    "work": "#2b87b5",
    "pad": "#e3e7eb",
    "hatch": "#a9b1bb",
    "idle": "#f3b3a0",
    "second": "#b48fd0",
    "mark": "#c2410c",
    "good": "#1a7f4b",
    **dict(
        zip(
            (f"s{shade}" for shade in range(SHADES)),
            ("#c9e7cf", "#8ed1bd", "#4bb0bd", "#2b87b5", "#2c5da3", "#2c3778"),
            strict=True,
        )
    ),
}
_DARK = {
    "paper": "#14181d",
    "card": "#1c2229",
    "ink": "#e7eaee",
    "muted": "#9aa5b1",
    "rule": "#39424c",
    "work": "#3fa3b8",
    "pad": "#262e37",
    "hatch": "#5b6773",
    "idle": "#8c4433",
    "second": "#8a67a8",
    "mark": "#fb923c",
    "good": "#4ade80",
    **dict(
        zip(
            (f"s{shade}" for shade in range(SHADES)),
            ("#2c4a5e", "#2b6580", "#2b83a0", "#3fa3b8", "#72c2c6", "#b4e0d3"),
            strict=True,
        )
    ),
}


def variables() -> str:
    """The colours as CSS variables, with a dark variant for dark mode."""
    return themed(f":root{{{''.join(f'--{name}:${name};' for name in _LIGHT)}}}")


def themed(rules: str) -> str:
    """CSS rules in which names such as `$ink` become colours, for light mode and for dark mode.

    The colours are plain values: many SVG renderers outside browsers lack CSS variables.
    """
    light, dark = (Template(rules).substitute(inks) for inks in (_LIGHT, _DARK))
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


@dataclass(frozen=True, slots=True)
class Shading:
    """Map segment lengths to shades; `edges[i]` is the longest length of shade i."""

    edges: tuple[int, ...]

    @classmethod
    def of(cls, shortest: int, longest: int) -> Shading:
        """Shades in equal ratios between two lengths, with round edges.

        >>> Shading.of(100, 10000).edges
        (220, 460, 1000, 2200, 4600, 10000)
        """
        ratio = (max(longest, 1) / max(shortest, 1)) ** (1 / SHADES)
        inner = {_round(max(shortest, 1) * ratio**step) for step in range(1, SHADES)}
        return cls((*sorted(edge for edge in inner if shortest <= edge < longest), longest))

    def shade(self, length: float) -> int:
        """The shade of a length; with few edges, shades are spread over the full range."""
        at = next((i for i, edge in enumerate(self.edges) if length <= edge), len(self.edges) - 1)
        return self.spread(at)

    def spread(self, at: int) -> int:
        """The shade of edge `at`."""
        return round(at * (SHADES - 1) / max(1, len(self.edges) - 1))

    def labels(self) -> list[tuple[int, str]]:
        """(shade, label) pairs for a legend."""
        return [(self.spread(at), f"≤ {count(edge)}") for at, edge in enumerate(self.edges)]


def _round(value: float) -> int:
    """Round to two significant digits: 1234 -> 1200."""
    step = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return int(round(value / step) * step)
