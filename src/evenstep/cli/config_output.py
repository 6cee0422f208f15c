"""Print configurations: their values, origins, faults and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from evenstep.config import Loaded
from evenstep.config.nested import difference, leaves
from evenstep.core.text import printable
from evenstep.screen import console

_TITLES = {"log_probs": "Log-probabilities", "stream": "Stream", "trainer": "Trainer"}


def print_check(name: str, faults: Sequence[str], notes: Sequence[str]) -> None:
    """Print one line per fault, or that there is none; then the notes."""
    screen = console()
    if faults:
        count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        screen.print(Text.assemble((f"{printable(name)} has {count}:", "bold red")))
    else:
        screen.print(Text.assemble(("ok ", "green"), printable(name)))
    for fault in faults:
        screen.print(Text(f"  {printable(fault)}"), soft_wrap=True)
    _print_list(screen, "Notes", notes)


def print_loaded(loaded: Loaded, name: str) -> None:
    """Print every value with its origin, by section; then the notes and the ignored keys."""
    data = loaded.settings.to_dict()
    recipe = {key: value for key, value in data.items() if key not in _TITLES}
    sections: dict[str, Mapping[str, Any]] = {"": {"layout": recipe["layout"], **recipe}}
    if data["log_probs"] is not None:
        sections["log_probs"] = difference(recipe, data["log_probs"])
    sections |= {key: data[key] for key in ("stream", "trainer")}
    screen = console()
    screen.print(Text(printable(name), "bold"))
    for key, section in sections.items():
        screen.print()
        screen.print(Text(_TITLES.get(key, "Recipe"), "bold cyan"))
        for line in _lines(section, loaded.origins, f"{key}." if key else ""):
            screen.print(line, soft_wrap=True)
        if key == "log_probs":
            screen.print(Text("  all else as in training", "dim"))
    _print_list(screen, "Notes", loaded.notes)
    _print_list(screen, "Ignored keys", loaded.ignored)


def _lines(section: Mapping[str, Any], origins: Mapping[str, str], prefix: str) -> list[Text]:
    """One line per value: path, value, origin; defaults are dim."""
    rows = [
        (printable(path), _shown(value), printable(origins.get(prefix + path, "default")))
        for path, value in leaves(section).items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return [
        Text.assemble(
            (f"  {path:<{widths[0]}}  ", "dim" if origin == "default" else ""),
            (f"{value:<{widths[1]}}  ", "dim" if origin == "default" else "bold"),
            (origin, "dim"),
        )
        for path, value, origin in rows
    ]


def _shown(value: Any) -> str:
    if value is None or value == {}:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def _print_list(screen: Console, title: str, items: Sequence[str]) -> None:
    if items:
        screen.print()
        screen.print(Text(title, "bold cyan"))
        for item in items:
            screen.print(Text(f"  {printable(item)}"), soft_wrap=True)
