"""All pages of the reference, by their paths in `docs/reference`."""

from __future__ import annotations

from pathlib import Path

from docs.generate import api, command_line, configuration

FOLDER = Path(__file__).resolve().parents[1] / "reference"
NOTE = "<!-- Written by `make reference`. Change docstrings and help texts instead. -->\n"


def texts() -> dict[str, str]:
    """The text of each page."""
    pages = {
        "command-line.md": command_line.page(),
        "configuration.md": configuration.page(),
        **{f"api/{name}": text for name, text in api.pages().items()},
    }
    return {name: f"{text}\n{NOTE}" for name, text in pages.items()}
