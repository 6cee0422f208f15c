"""Escape and shorten text for SVG and HTML."""

from __future__ import annotations

import html
import re
import unicodedata
from itertools import accumulate

# Characters that XML 1.0 forbids: most control characters, lone surrogates, U+FFFE and U+FFFF.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """Escape any text for use inside an element; forbidden characters become U+FFFD.

    >>> escape("<a>\\x1b")
    '&lt;a&gt;\ufffd'
    """
    return html.escape(_FORBIDDEN.sub("\ufffd", text))


def shortened(text: str, ems: float) -> str:
    """Replace the middle of text that is wider than `ems` by an ellipsis.

    Both ends stay, because they tell file names apart. Widths are estimates on the safe side.

    >>> shortened("tokens-of-everything.npy", 10)
    'tokens…ng.npy'
    """
    if sum(map(_ems, text)) <= ems:
        return text
    half = (ems - _ems("…")) / 2
    return f"{_head(text, half)}…{_head(text[::-1], half)[::-1]}"


def _head(text: str, ems: float) -> str:
    ends = accumulate(map(_ems, text))
    return text[: sum(1 for end in ends if end <= ems)]


def _ems(char: str) -> float:
    broad = char in "mw@%" or char.isupper() or not char.isprintable()
    return 1.1 if broad or unicodedata.east_asian_width(char) in "WFA" else 0.7
