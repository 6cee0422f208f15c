"""A value as a message shows it."""

from __future__ import annotations

import reprlib


def glimpse(value: object, most: int = 80) -> str:
    """The `repr` of a value, cut where it is long; never made whole first.

    A YAML file of some lines can describe a value whose `repr` fills the memory.

    >>> glimpse("x" * 999, 12)
    "'xxxxxxx..."
    """
    limited = reprlib.Repr()
    limited.maxlevel = 3
    limited.maxstring = limited.maxother = limited.maxlong = 2 * most
    try:
        text = limited.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        text = f"{type(value).__name__} of very many digits"
    return cut(text, most)


def cut(text: str, most: int = 80) -> str:
    """The text, at most so many characters of it."""
    return text if len(text) <= most else f"{text[: most - 4]}..."


def printable(text: str) -> str:
    r"""The text without what would steer a terminal.

    >>> printable("a\x1b[31m.txt")
    'a\\x1b[31m.txt'
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
