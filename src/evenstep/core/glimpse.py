"""Short text of values for error messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence


def glimpse(value: object, most: int = 80) -> str:
    """The `repr` of a value, shortened. The whole `repr` is never built.

    A few lines of YAML can describe a value whose `repr` fills the memory.

    >>> glimpse("x" * 999, 12)
    "'xxxxxxx..."
    """
    limited = reprlib.Repr()
    limited.maxlevel = 3
    limited.maxstring = limited.maxother = limited.maxlong = 2 * most
    try:
        text = limited.repr(value)
    except ValueError:  # Python refuses to convert integers of more than 4,300 digits
        text = f"{type(value).__name__} of very many digits"
    return cut(text, most)


def cut(text: str, most: int = 80) -> str:
    """The text, shortened to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 4]}..."


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b"]), listed(list("abcde"))
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str) -> str:
    r"""The text with control characters escaped, which would affect a terminal.

    >>> printable("a\x1b[31m.txt")
    'a\\x1b[31m.txt'
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
