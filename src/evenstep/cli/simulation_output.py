"""Print simulated strategies and the settings of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from evenstep.cli.output import print_whole
from evenstep.core.glimpse import printable
from evenstep.report.numbers import count, factor, percent, seconds
from evenstep.report.simulation.simulate import PARTS, Simulation
from evenstep.report.simulation.tuning import Setting
from evenstep.screen import console

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
    table = _table(title, f"{about}\n{_SHARED}")
    table.add_column("strategy", no_wrap=True)
    for name in ("step time", "tokens/s", "imbalance", *PARTS):
        table.add_column("\n".join(name.split()), justify="right")
    least = min((float(each.time.sum()) for each in found.values()), default=0.0)
    for name, each in found.items():
        time = float(each.time.sum())
        style = "bold green" if time == least else ""
        table.add_row(
            Text(printable(name)),
            Text(seconds(float(each.time.mean())), style),
            count(each.tokens_per_second),
            factor(each.imbalance),
            *(percent(each.share(part)) for part in PARTS),
        )
    screen = console()
    print_whole(screen, table)
    for name, fault in faults.items():
        screen.print(Text.assemble((f"{printable(name)}: ", "bold red"), fault))


def print_settings(settings: Sequence[Setting], chosen: Setting, why: str, title: str) -> None:
    """The best settings, and the recommended one."""
    shown = list(settings[:_MOST_SETTINGS])
    shown += [] if chosen in shown else [chosen]
    left = len(settings) - len(shown)
    table = _table(title, f"The best of {len(settings)}; --json lists all." if left > 0 else "")
    header = (
        "layout", "max tokens", "samples per step", "dp × cp", "micro- batches", "re- compute",
        "step time", "tokens/s", "GPU- hours", "memory GiB",
    )  # fmt: skip
    for name in header:
        justify = "left" if name == "layout" else "right"
        table.add_column("\n".join(name.split()), justify=justify)  # type: ignore[arg-type]
    for each in shown:
        topology = each.recipe.topology
        cells = (
            each.layout, count(each.budget), count(each.samples), f"{topology.dp} × {topology.cp}",
            count(each.waves), "yes" if each.checkpointing else "no", seconds(each.step_seconds),
            count(each.tokens_per_second), f"{each.gpu_hours:,.4g}",
            f"{each.memory.peak / 2**30:.1f}",
        )  # fmt: skip
        table.add_row(*(Text(cell, "bold green" if each is chosen else "") for cell in cells))
    screen = console()
    print_whole(screen, table)
    screen.print()
    screen.print(Text(why))


def _table(title: str, caption: str) -> Table:
    return Table(
        title=Text(printable(title), "bold"),
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold cyan",
    )
