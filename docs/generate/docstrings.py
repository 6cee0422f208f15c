"""Docstrings -> Markdown.

Four shapes besides plain paragraphs: examples (`>>>`), indented code, lists, and tables of
`name  meaning`.
"""

from __future__ import annotations

import ast
import re
from textwrap import dedent

_ROW = re.compile(r"(?P<name>[\w.*`{},=\"]+)(?P<gap> +)(?P<text>\S.*)")


def markdown(text: str) -> str:
    """A docstring, without its indentation, as Markdown.

    >>> markdown("Adds.\\n\\na  one\\nb  two").splitlines()
    ['Adds.', '', '| name | meaning |', '| --- | --- |', '| `a` | one |', '| `b` | two |']
    """
    shown: list[str] = []
    code: list[str] = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if _is_code(part):
            code.append(part)
            continue
        shown += _code(code)
        code = []
        shown.append(_paragraph(part))
    return "\n\n".join([*shown, *_code(code)])


def rows_of(part: str) -> dict[str, str]:
    """The table that a paragraph is, by name; empty if it is none.

    A row is a name, two spaces or more, and its meaning, which may go on in indented lines. One
    space is enough where the meaning begins in the column of the others.

    >>> rows_of("a   the first,\\n    not the last\\nbb  the second")
    {'a': 'the first, not the last', 'bb': 'the second'}
    >>> rows_of("a sentence of\\nwords"), rows_of("one")
    ({}, {})
    """
    lines = part.splitlines()
    found = [_ROW.fullmatch(line) for line in lines]
    columns = {row.start("text") for row in found if row is not None and len(row["gap"]) > 1}
    rows: dict[str, str] = {}
    name = ""
    for line, row in zip(lines, found, strict=True):
        if row is not None and row.start("text") in columns:
            name = row["name"]
            rows[name] = row["text"]
        elif name and line.startswith("    "):
            rows[name] += f" {line.strip()}"
        else:
            return {}
    return rows


def tables_of(text: str) -> dict[str, str]:
    """All rows of all tables of a docstring.

    >>> tables_of("Settings.\\n\\nout   a folder\\nkeep  how many")
    {'out': 'a folder', 'keep': 'how many'}
    """
    found: dict[str, str] = {}
    for part in re.split(r"\n\s*\n", text):
        found |= rows_of(part)
    return found


def table(rows: dict[str, str]) -> str:
    """Names and meanings as a Markdown table."""
    lines = [f"| `{name.strip('`')}` | {cell(meaning)} |" for name, meaning in rows.items()]
    return "\n".join(["| name | meaning |", "| --- | --- |", *lines])


def cell(text: str) -> str:
    """Text for one cell of a table.

    >>> cell("int | None")
    'int \\\\| None'
    """
    return " ".join(text.split()).replace("|", "\\|")


def fenced(kind: str, text: str) -> str:
    """A block of code."""
    return f"```{kind}\n{text.rstrip()}\n```"


def _paragraph(part: str) -> str:
    if part.startswith(">>>"):
        return fenced("pycon", part)
    rows = rows_of(part)
    return table(rows) if rows else part


def _is_code(part: str) -> bool:
    """Whether a paragraph is code: indented, or, if the docstring has nothing else, calls.

    >>> _is_code("    f(1)"), _is_code("f(1)"), _is_code("Calls f (once)."), _is_code(">>> f(1)")
    (True, True, False, False)
    """
    return part.startswith("    ") or ("(" in part and _parses(part))


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _code(parts: list[str]) -> list[str]:
    if not parts:
        return []
    text = dedent("\n\n".join(parts))
    return [fenced("python" if _parses(text) else "text", text)]
