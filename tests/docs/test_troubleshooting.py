"""Every message that docs/troubleshooting.md quotes is one that the code can give."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.M)


@cache
def texts() -> list[str]:
    """The text of every string in the sources; what is filled in is left out."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    pieces = [piece.strip(" .") for piece in message.split("…")]
    pieces = [piece for piece in pieces if piece]
    assert pieces
    assert any(all(piece in text for piece in pieces) for text in texts()), message
