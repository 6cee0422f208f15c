"""Print simulated strategies and the settings of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from evenstep.core.text import printable
from evenstep.report.numbers import count, factor, percent, seconds
from evenstep.report.simulation.simulate import PARTS, Simulation
from evenstep.report.simulation.tuning import Setting
from evenstep.screen import console, print_grid

_MOST_SETTINGS = 8
_SHARED = (
    "Shares of the step time, mean over devices. work: on real tokens; host: launching kernels of "
    "small micro-batches; bubble: pipeline stages wait for each other; waiting: for the slowest "
    "rank; exchange: as far as it is not hidden behind computing."
)


def print_simulations(
    found: Mapping[str, Simulation], faults: Mapping[str, str], title: str, about: str
) -> None:
    """One row per strategy; those without a plan follow with their error."""
    least = min((float(each.time.sum()) for each in found.values()), default=0.0)
    rows = []
    for name, each in found.items():
        style = "bold green" if float(each.time.sum()) == least else ""
        rows.append(
            [
                Text(printable(name)),
                Text(seconds(float(each.time.mean())), style),
                Text(count(each.tokens_per_second)),
                Text(factor(each.imbalance)),
                *(Text(percent(each.share(part))) for part in PARTS),
            ]
        )
    screen = console()
    screen.print(Text(printable(title), "bold"))
    print_grid(screen, ["strategy", "step time", "tokens/s", "imbalance", *PARTS], rows)
    screen.print(Text(f"{about}\n{_SHARED}", "dim"))
    for name, fault in faults.items():
        screen.print(Text.assemble((f"{printable(name)}: ", "bold red"), fault))


def print_settings(settings: Sequence[Setting], chosen: Setting, why: str, title: str) -> None:
    """The best settings by number, an arrow at the recommended one."""
    shown = list(settings[:_MOST_SETTINGS])
    shown += [] if chosen in shown else [chosen]
    left = len(settings) - len(shown)
    header = [
        "row", "layout", "max tokens", "samples per step", "dp × cp", "micro- batches",
        "re- compute", "step time", "tokens/s", "GPU- hours", "memory GiB",
    ]  # fmt: skip
    changed = any(each.changed_samples for each in settings)
    words = {"split": "tokens split", "truncate": "tokens cut off", "drop": "tokens dropped"}
    header += [words[chosen.recipe.overflow]] if changed else []
    rows = []
    for number, each in enumerate(shown, 1):
        topology = each.recipe.topology
        cells = [
            f"{'→' if each is chosen else ' '} {number}",
            each.layout, count(each.budget), count(each.samples), f"{topology.dp} × {topology.cp}",
            count(each.waves), "yes" if each.checkpointing else "no", seconds(each.step_seconds),
            count(each.tokens_per_second), f"{each.gpu_hours:,.4g}",
            f"{each.memory.peak / 2**30:.1f}",
            *([percent(each.changed_tokens)] if changed else []),
        ]  # fmt: skip
        rows.append([Text(cell, "bold green" if each is chosen else "") for cell in cells])
    screen = console()
    screen.print(Text(printable(title), "bold"))
    print_grid(screen, header, rows)
    if changed:
        verb = chosen.recipe.overflow
        screen.print(
            Text(f"Settings that {verb} samples come last: they train on other data.", "dim")
        )
    if left > 0:
        screen.print(Text(f"The best of {len(settings)}; --json lists all.", "dim"))
    screen.print()
    screen.print(Text(why))
