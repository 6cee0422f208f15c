"""Text inside SVG and HTML."""

from __future__ import annotations

import html
import re

# What XML 1.0 has no place for: most control characters, halves of pairs, U+FFFE and U+FFFF.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """Any text as the content of an element, such as a file's name with bytes that are no text.

    >>> escape("<a>\\x1b")
    '&lt;a&gt;\ufffd'
    """
    return html.escape(_FORBIDDEN.sub("\ufffd", text))
