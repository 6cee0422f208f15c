"""Setting: one row of a sweep over budgets, steps, layouts and rank splits; which to recommend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.core.recipe import Recipe
from evenstep.report.numbers import count, percent, seconds, times
from evenstep.report.simulation.memory import Memory
from evenstep.report.simulation.simulate import Simulation

NEAR = 1.02
"""Settings within 2 % of the fastest count as equally fast."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setting:
    """A recipe with its simulated time and estimated memory.

    corpus   real tokens of the whole corpus
    waves    most micro-batches per rank and step
    """

    recipe: Recipe
    checkpointing: bool
    simulation: Simulation
    memory: Memory
    waves: int
    corpus: int

    @property
    def layout(self) -> str:
        """Packed or padded."""
        return str(self.recipe.layout.kind)

    @property
    def budget(self) -> int:
        """The most slots of a micro-batch."""
        return self.recipe.layout.budget or 0

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.recipe.steps.samples or 0

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return float(self.simulation.time.mean())

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second of all devices."""
        return self.simulation.tokens_per_second

    @property
    def gpu_hours(self) -> float:
        """Device-hours for all tokens of the corpus, once."""
        return self.corpus / self.tokens_per_second * self.simulation.devices / 3600

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "layout": self.layout,
            "max_tokens": self.budget,
            "samples_per_step": self.samples,
            "dp": self.recipe.topology.dp,
            "cp": self.recipe.topology.cp,
            "checkpointing": self.checkpointing,
            "micro_batches_per_rank": self.waves,
            "gpu_hours": self.gpu_hours,
            "memory_bytes": self.memory.to_dict(),
            **self.simulation.to_dict(),
            "recipe": self.recipe.to_dict(),
        }


def ranked(settings: Sequence[Setting]) -> list[Setting]:
    """The settings, those with the fewest GPU-hours first."""
    return sorted(settings, key=lambda setting: setting.gpu_hours)


def recommended(settings: Sequence[Setting]) -> Setting:
    """Of the settings within 2 % of the fastest: fewest samples per step, then the simplest.

    Smaller steps update the weights more often for the same tokens. Simpler is less context
    parallelism, then no recomputing.
    """
    best = ranked(settings)[0].gpu_hours
    near = [setting for setting in settings if setting.gpu_hours <= NEAR * best]
    return min(near, key=_preference)


def _preference(setting: Setting) -> tuple[int, int, bool, float]:
    topology = setting.recipe.topology
    return setting.samples, topology.cp, setting.checkpointing, setting.gpu_hours


def reason(chosen: Setting, settings: Sequence[Setting], memory: float) -> str:
    """Why a setting is recommended, and what takes the rest of its time."""
    fastest, topology = ranked(settings)[0], chosen.recipe.topology
    fit = f"{times(len(settings), 'setting')} that fit"
    speed = f"needs the fewest GPU-hours of {fit}"
    if len(settings) == 1:
        speed = "is the only setting"
    if chosen is not fastest:
        over = percent(chosen.gpu_hours / fastest.gpu_hours - 1)
        gain = _gain(chosen, fastest)
        speed = f"needs {over} more GPU-hours than the fastest of {fit}, with {gain}"
    recomputing = ", recomputing activations" if chosen.checkpointing else ""
    return (
        f"Recommended: {chosen.layout} micro-batches of {count(chosen.budget)} slots, "
        f"{times(chosen.samples, 'sample')} per step, dp {topology.dp}, cp {topology.cp}"
        f"{recomputing}. It {speed}, and takes {percent(chosen.memory.peak / memory)} of the "
        f"memory of a GPU. {_loss(chosen.simulation)}"
    )


def _gain(chosen: Setting, fastest: Setting) -> str:
    if chosen.samples < fastest.samples:
        return "fewer samples per step"
    if chosen.recipe.topology.cp < fastest.recipe.topology.cp:
        return "less context parallelism"
    return "no recomputing"


def _loss(simulation: Simulation) -> str:
    """The largest part of a step that is not work on real tokens."""
    names = {
        "padding": "padding",
        "host": "launching kernels, because micro-batches are small",
        "bubble": "pipeline bubbles",
        "waiting": "waiting for the slowest rank",
        "exchange": "exchange of parameters and gradients",
        "update": "the optimizer's update",
    }
    part = max(names, key=simulation.share)
    mean = float(simulation.time.mean())
    return (
        f"Of {seconds(mean)} per step, {percent(simulation.share('work'))} is work on real tokens; "
        f"the largest loss is {names[part]}, {percent(simulation.share(part))}."
    )
