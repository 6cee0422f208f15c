"""Links and anchors of Markdown files, as GitHub makes them."""

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.blocks import ROOT

FILES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
"""All Markdown files of the repository."""


@dataclass(frozen=True)
class Link:
    """The target of a link or a picture."""

    path: str
    anchor: str


def tokens_of(text: str) -> list[Token]:
    """The tokens of a page, with those inside of paragraphs and headings."""
    tokens = MarkdownIt().enable("table").parse(text)
    return [one for each in tokens for one in (each, *(each.children or ()))]


def links_of(text: str) -> list[Link]:
    """The links of a page that stay in the repository.

    >>> links_of("[a](b.md#c), ![d](e.svg), `[no](link)`, [out](https://example.org)")
    [Link(path='b.md', anchor='c'), Link(path='e.svg', anchor='')]
    """
    found = []
    for token in tokens_of(text):
        target = token.attrs.get("href") or token.attrs.get("src")
        if target and not re.match(r"[a-z]+:", str(target)):
            path, _, anchor = str(target).partition("#")
            found.append(Link(path, anchor))
    return found


def anchors_of(text: str) -> set[str]:
    """The anchors of the headings of a page.

    >>> sorted(anchors_of("# One & two\\n## `Plan.save`\\n## A\\n## A"))
    ['a', 'a-1', 'one--two', 'plansave']
    """
    tokens = MarkdownIt().enable("table").parse(text)
    seen: dict[str, int] = {}
    anchors = set()
    for heading, inside in pairwise(tokens):
        if heading.type == "heading_open":
            slug = slug_of("".join(child.content for child in inside.children or ()))
            times = seen.get(slug, 0)
            seen[slug] = times + 1
            anchors.add(f"{slug}-{times}" if times else slug)
    return anchors


@cache
def _anchors(page: Path) -> set[str]:
    return anchors_of(page.read_text("utf-8"))


def slug_of(heading: str) -> str:
    """The anchor of a heading.

    >>> slug_of("Groups, limits, long samples")
    'groups-limits-long-samples'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def faults_of(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    faults = []
    for link in links_of(page.read_text("utf-8")):
        target = (page.parent / link.path).resolve() if link.path else page
        if not target.exists():
            faults.append(f"{link.path} does not exist")
        elif link.anchor and link.anchor not in _anchors(target):
            faults.append(f"{link.path} has no heading #{link.anchor}")
    return faults
