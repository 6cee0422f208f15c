"""Canvas: a small SVG drawing in the project's colours, for light and dark mode."""

from __future__ import annotations

from dataclasses import dataclass, field

from evenstep.report.ink import FONT, SHADES, themed
from evenstep.report.markup import escape

_RULES = (
    ".c .paper{fill:$paper}.c text{fill:$ink}.c .note{fill:$muted}.c .mark{fill:$mark}"
    ".c .good{fill:$good}.c .pad{fill:$pad}.c .idle{fill:$idle}.c .line{stroke:$muted}"
    ".c .marked{stroke:$mark}.c .edge{stroke:$paper}.c .bright{fill:$paper}"
) + "".join(f".c .s{shade}{{fill:$s{shade}}}" for shade in range(SHADES))
_FIXED = (
    f".c{{font-family:{FONT}}}.c text{{font-size:13px}}.c .h{{font-size:15px;font-weight:650}}"
    ".c .small{font-size:11px}.c .end{text-anchor:end}.c .middle{text-anchor:middle}"
    ".c .line,.c .marked{fill:none;stroke-width:1.2}.c .marked{stroke-width:1.8}"
    ".c .dashed{stroke-dasharray:4 3}.c .edge{stroke-width:1}"
)


@dataclass(slots=True)
class Canvas:
    """Boxes, lines and text; `svg` is the picture."""

    title: str
    width: int
    height: int
    marks: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A filled rectangle; `kind` is a colour of the style above."""
        self.marks.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'rx="2" class="{kind} edge"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """A line of text whose baseline begins at (x, y)."""
        self.marks.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>')

    def line(self, x: float, y: float, x2: float, y2: float, kind: str = "line") -> None:
        """A straight line."""
        self.marks.append(f'<path d="M{x:.1f} {y:.1f}L{x2:.1f} {y2:.1f}" class="{kind}"/>')

    def arrow(self, x: float, y: float, x2: float) -> None:
        """A horizontal arrow to the right."""
        self.line(x, y, x2, y)
        self.line(x2 - 6, y - 4, x2, y)
        self.line(x2 - 6, y + 4, x2, y)

    @property
    def svg(self) -> str:
        """The whole picture."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="c" role="img" width="{self.width}" '
            f'height="{self.height}" viewBox="0 0 {self.width} {self.height}">'
            f"<title>{escape(self.title)}</title><style>{_FIXED}{themed(_RULES)}</style>"
            f'<rect class="paper" width="{self.width}" height="{self.height}"/>'
            f"{''.join(self.marks)}</svg>\n"
        )
