"""The code blocks of a page, and how each is marked."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("", "compat", "guides")
PAGES = [
    ROOT / "README.md",
    *(page for folder in FOLDERS for page in sorted((DOCS / folder).glob("*.md"))),
    DOCS / "reference" / "command-line.md",
    DOCS / "reference" / "configuration.md",
]
"""Every page with code: not the decisions, nor the interface, whose examples are doctests."""

_OPEN = re.compile(r"(?P<indent> *)(?P<fence>```+)(?P<kind>[\w-]*)\s*")
_MARK = re.compile(r"\s*<!-- (?P<key>file|not run): (?P<value>.+?) -->\s*")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    kind: str
    text: str
    line: int
    """Of its first line of code, counted from 1."""
    file: str | None = None
    """Where its text is written to."""
    needs: str | None = None
    """What it needs that is not here; it is then not run."""


def name_of(page: Path) -> str:
    """The path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(text: str) -> list[Block]:
    """All blocks of a page, in order.

    >>> blocks_of("<!-- file: a.txt -->\\n```text\\nhello\\n```")
    [Block(kind='text', text='hello\\n', line=3, file='a.txt', needs=None)]
    """
    lines = text.splitlines()
    found: list[Block] = []
    at = 0
    while at < len(lines):
        opened = _OPEN.fullmatch(lines[at])
        if opened is None:
            assert not lines[at].lstrip().startswith("```"), f"line {at + 1}: {lines[at]}"
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == opened["fence"])
        mark = _MARK.fullmatch(lines[at - 1]) if at else None
        inside = [line.removeprefix(opened["indent"]) for line in lines[at + 1 : end]]
        found.append(
            Block(
                kind=opened["kind"],
                text="".join(f"{line}\n" for line in inside),
                line=at + 2,
                file=mark["value"] if mark and mark["key"] == "file" else None,
                needs=mark["value"] if mark and mark["key"] == "not run" else None,
            )
        )
        at = end + 1
    return found


def page_blocks(page: Path) -> list[Block]:
    """All blocks of a file."""
    return blocks_of(page.read_text("utf-8"))
