"""Print configurations: their values, origins, faults and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.config import Loaded
from evenstep.config.native import difference, leaves
from evenstep.core.glimpse import printable
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
        screen.print(_table(section, loaded.origins, f"{key}." if key else ""), soft_wrap=True)
        if key == "log_probs":
            screen.print(Text("  all else as in training", "dim"))
    _print_list(screen, "Notes", loaded.notes)
    _print_list(screen, "Ignored keys", loaded.ignored)


def _table(section: Mapping[str, Any], origins: Mapping[str, str], prefix: str) -> Table:
    """Path, value and origin; defaults are dim."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for path, value in leaves(section).items():
        origin = origins.get(prefix + path, "default")
        style = "dim" if origin == "default" else ""
        shown = "–" if value is None or value == {} else _shown(value)
        table.add_row(
            Text(f"  {printable(path)}", style),
            Text(shown, style or "bold"),
            Text(printable(origin), "dim"),
        )
    return table


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def _print_list(screen: Console, title: str, items: Sequence[str]) -> None:
    if items:
        screen.print()
        screen.print(Text(title, "bold cyan"))
        for item in items:
            screen.print(Text(f"  {printable(item)}"), soft_wrap=True)
