"""Draw the pictures of this package as PNG, with Pillow.

Reads the SVG that this package writes: rectangles, circles, straight paths and text, with colours
by class. Uses the font that Pillow ships, so that a picture is the same on every machine and needs
no system packages. Always light.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

_SCALE = 2  # pixels per unit
_HATCH = 5  # units between two lines of a hatched area
_SPELT = str.maketrans({"×": "x", "≤": "<=", "²": "^2", "–": "-", "—": "-", "→": "->"})
_PRESENT = "·…±"  # what the font has beyond ASCII
_COMMAND = re.compile(r"([A-Za-z])([^A-Za-z]*)")
_NUMBER = re.compile(r"-?[0-9.]+(?:e-?[0-9]+)?")

Points = list[tuple[float, float]]


def png_of(svg: str) -> bytes:
    """The PNG of a picture of this package.

    >>> png_of('<svg width="4" height="2"><rect width="4" height="2"/></svg>')[1:4]
    b'PNG'
    """
    root = ET.fromstring(svg)
    canvas = _Canvas(float(root.get("width", 0)), float(root.get("height", 0)), _rules(root))
    canvas.draw(root, 0.0, 0.0)
    return canvas.written()


def _rules(root: ET.Element) -> list[tuple[str, dict[str, str]]]:
    """(tag or .class, its properties), tags first, from the part of the style that is light."""
    style = "".join(e.text or "" for e in root.iter() if e.tag.endswith("style"))
    found = []
    for selectors, body in re.findall(r"([^{}]+){([^{}]*)}", style.partition("@media")[0]):
        for selector in selectors.split(","):
            found.append((selector.split()[-1], _properties(body)))
    return sorted(found, key=lambda rule: rule[0].startswith("."))


def _properties(text: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in text.split(";") if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


class _Canvas:
    """A picture that is drawn element by element."""

    def __init__(
        self, width: float, height: float, rules: list[tuple[str, dict[str, str]]]
    ) -> None:
        from PIL import Image, ImageDraw

        size = max(1, round(width * _SCALE)), max(1, round(height * _SCALE))
        self.image: Any = Image.new("RGB", size, "#ffffff")
        self.pen: Any = ImageDraw.Draw(self.image)
        self.rules = rules
        self.fonts: dict[int, Any] = {}

    def written(self) -> bytes:
        file = io.BytesIO()
        self.image.save(file, "PNG", optimize=True)
        return file.getvalue()

    def draw(self, parent: ET.Element, x: float, y: float) -> None:
        for element in parent:
            tag = element.tag.rpartition("}")[2]
            if tag == "g":
                by = [float(n) for n in _NUMBER.findall(element.get("transform", "0 0"))]
                self.draw(element, x + by[0], y + by[1])
            elif tag == "text":
                self._text(element, x, y)
            elif tag in ("rect", "path", "circle"):
                self._shape(element, tag, x, y)

    def _style(self, element: ET.Element, tag: str) -> dict[str, str]:
        names = {tag, *(f".{name}" for name in element.get("class", "").split())}
        found: dict[str, str] = {}
        for selector, properties in self.rules:
            if selector in names:
                found |= properties
        return found | _properties(element.get("style", ""))

    def _shape(self, element: ET.Element, tag: str, x: float, y: float) -> None:
        style = self._style(element, tag)
        fill, stroke = style.get("fill", "#000000"), style.get("stroke", "none")
        width = max(1, round(float(style.get("stroke-width", 1)) * _SCALE))
        for points, closed in _outlines(element, tag):
            moved = [((x + px) * _SCALE, (y + py) * _SCALE) for px, py in points]
            if tag == "circle":
                (cx, cy), r = moved[0], float(element.get("r", 0)) * _SCALE
                box = (cx - r, cy - r, cx + r, cy + r)
                self.pen.ellipse(box, _colour(fill), _colour(stroke), width)
                continue
            if fill.startswith("url"):
                self._hatched(moved)
            elif fill != "none" and len(moved) > 2:
                self.pen.polygon(moved, fill=fill)
            if stroke != "none":
                around = [*moved, moved[0]] if closed else moved
                self._line(around, stroke, width, style.get("stroke-dasharray", ""))

    def _line(self, points: Any, colour: str, width: int, dashes: str) -> None:
        if not dashes:
            self.pen.line(points, fill=colour, width=width)
            return
        on, off = (float(n) * _SCALE for n in _NUMBER.findall(dashes)[:2])
        for (ax, ay), (bx, by) in pairwise(points):
            length = ((bx - ax) ** 2 + (by - ay) ** 2) ** 0.5 or 1.0
            at = 0.0
            while at < length:
                ends = at / length, min(at + on, length) / length
                dash = [(ax + (bx - ax) * t, ay + (by - ay) * t) for t in ends]
                self.pen.line(dash, fill=colour, width=width)
                at += on + off

    def _hatched(self, box: Any) -> None:
        """Slanted lines over a box."""
        from PIL import Image, ImageDraw

        left, top = (round(min(p[axis] for p in box)) for axis in (0, 1))
        right, bottom = (round(max(p[axis] for p in box)) for axis in (0, 1))
        width, height = right - left, bottom - top
        if width < 1 or height < 1:
            return
        mask = Image.new("L", (width, height))
        pen, gap = ImageDraw.Draw(mask), round(_HATCH * 1.4 * _SCALE)
        for at in range(-(left + top) % gap, width + height, gap):  # x + y is a multiple of gap
            pen.line([(at, 0), (at - height, height)], fill=255, width=_SCALE)
        self.image.paste(self._hatch_colour, (left, top), mask)

    @property
    def _hatch_colour(self) -> str:
        found = (p for name, p in self.rules if name == ".hatching" and "stroke" in p)
        return next(found, {"stroke": "#a9b1bb"})["stroke"]

    def _text(self, element: ET.Element, x: float, y: float) -> None:
        from PIL import ImageFont

        style = self._style(element, "text")
        size = round(float(style.get("font-size", "12px").removesuffix("px")) * _SCALE)
        if size not in self.fonts:
            self.fonts[size] = ImageFont.load_default(size)
        place = (
            (x + float(element.get("x", 0))) * _SCALE,
            (y + float(element.get("y", 0))) * _SCALE,
        )
        across = {"middle": "m", "end": "r"}.get(style.get("text-anchor", ""), "l")
        down = "m" if style.get("dominant-baseline") == "central" else "s"
        bold = 0.5 if float(style.get("font-weight", 400)) >= 600 else 0
        text = (element.text or "").translate(_SPELT)
        text = "".join(char if char.isascii() or char in _PRESENT else "?" for char in text)
        colour = style.get("fill", "#000000")
        self.pen.text(
            place,
            text,
            colour,
            self.fonts[size],
            across + down,
            stroke_width=bold,
            stroke_fill=colour,
        )


def _colour(value: str) -> str | None:
    return None if value == "none" else value


def _outlines(element: ET.Element, tag: str) -> Iterator[tuple[Points, bool]]:
    """(corners, whether closed) of each outline of a shape."""
    at = {name: float(element.get(name, 0)) for name in ("x", "y", "width", "height", "cx", "cy")}
    if tag == "circle":
        yield [(at["cx"], at["cy"])], True
    elif tag == "rect":
        right, bottom = at["x"] + at["width"], at["y"] + at["height"]
        if at["width"] > 0 and at["height"] > 0:
            yield [(at["x"], at["y"]), (right, at["y"]), (right, bottom), (at["x"], bottom)], True
    else:
        yield from _subpaths(element.get("d", ""))


def _subpaths(d: str) -> Iterator[tuple[Points, bool]]:
    points: Points = []
    x = y = 0.0
    for command, text in _COMMAND.findall(d):
        numbers = [float(n) for n in _NUMBER.findall(text)]
        kind, relative = command.upper(), command.islower()
        if kind == "Z":
            yield points, True
            x, y = points[0]
            points = []
            continue
        if kind == "M" and points:
            yield points, False
            points = []
        for px, py in _pairs(kind, numbers, relative, x, y):
            x, y = (x + px, y + py) if relative else (px, py)
            points.append((x, y))
    if len(points) > 1:
        yield points, False


def _pairs(kind: str, numbers: list[float], relative: bool, x: float, y: float) -> Points:
    """The steps of one command: H and V keep the other coordinate."""
    if kind == "H":
        return [(n, 0.0 if relative else y) for n in numbers]
    if kind == "V":
        return [(0.0 if relative else x, n) for n in numbers]
    return list(zip(numbers[::2], numbers[1::2], strict=True))
