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

    waves            most micro-batches per rank and step
    num_samples      samples of the corpus that are trained on
    corpus           real tokens of the corpus that are trained on
    changed_samples  share of the corpus's samples that are split, truncated or dropped
    changed_tokens   share of the corpus's tokens that are in split samples, or are lost
    """

    recipe: Recipe
    checkpointing: bool
    scattered: bool
    """Whether every micro-batch scatters its gradients (`Runner.reduce_every`)."""
    simulation: Simulation
    memory: Memory
    waves: int
    num_samples: int
    corpus: int
    changed_samples: float = 0.0
    changed_tokens: float = 0.0

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
        """Device-hours for all tokens that are trained on, once."""
        return self.corpus / self.tokens_per_second * self.simulation.devices / 3600

    @property
    def updates(self) -> int:
        """Optimizer steps of one epoch."""
        return -(-self.num_samples // max(1, self.samples))

    @property
    def change(self) -> str:
        """What the setting does to the data, as the rest of a sentence; empty if nothing."""
        if not self.changed_samples:
            return ""
        samples, tokens = percent(self.changed_samples), percent(self.changed_tokens)
        if self.recipe.overflow == "split":
            return f"splits {samples} of the samples, which hold {tokens} of the tokens"
        return f"{self.recipe.overflow}s {samples} of the samples and loses {tokens} of the tokens"

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "layout": self.layout,
            "max_tokens": self.budget,
            "samples_per_step": self.samples,
            "dp": self.recipe.topology.dp,
            "cp": self.recipe.topology.cp,
            "checkpointing": self.checkpointing,
            "reduce_every": "micro_batch" if self.scattered else "step",
            "micro_batches_per_rank": self.waves,
            "gpu_hours": self.gpu_hours,
            "updates_per_epoch": self.updates,
            "overflow": self.recipe.overflow,
            "changed_samples_share": self.changed_samples,
            "changed_tokens_share": self.changed_tokens,
            "memory_bytes": self.memory.to_dict(),
            **self.simulation.to_dict(),
            "recipe": self.recipe.to_dict(),
        }


def ranked(settings: Sequence[Setting]) -> list[Setting]:
    """The settings by what they change of the data, then by GPU-hours.

    A setting that splits, truncates or drops samples trains on other data, so that its GPU-hours
    do not compare with those of a setting that does not.
    """
    return sorted(settings, key=lambda setting: (setting.changed_tokens, setting.gpu_hours))


def _alike(settings: Sequence[Setting]) -> list[Setting]:
    """The settings that change the least of the data, those with the fewest GPU-hours first."""
    first, *rest = ranked(settings)
    return [first, *(each for each in rest if each.changed_tokens == first.changed_tokens)]


def recommended(settings: Sequence[Setting]) -> Setting:
    """Of the settings within 2 % of the fastest: fewest samples per step, then the simplest.

    Only settings that change the least of the data are considered. Smaller steps update the weights
    more often for the same tokens. Simpler is less context parallelism, then no recomputing.
    """
    alike = _alike(settings)
    near = [setting for setting in alike if setting.gpu_hours <= NEAR * alike[0].gpu_hours]
    return min(near, key=_preference)


def _preference(setting: Setting) -> tuple[int, int, bool, bool, float]:
    simple = (setting.checkpointing, setting.scattered)
    return setting.samples, setting.recipe.topology.cp, *simple, setting.gpu_hours


def reason(chosen: Setting, settings: Sequence[Setting], memory: float) -> str:
    """Why a setting is recommended, and what takes the rest of its time."""
    alike, topology = _alike(settings), chosen.recipe.topology
    fastest = alike[0]
    fit, unlike = f"{times(len(alike), 'setting')} that fit", len(alike) < len(settings)
    if unlike:
        fit += (
            " and change as little" if chosen.change else f" and {chosen.recipe.overflow} nothing"
        )
    speed = f"needs the fewest GPU-hours of {fit}"
    if len(alike) == 1:
        speed = "is the only setting"
    if len(alike) == 1 and unlike:
        little = "changes so little" if chosen.change else f"{chosen.recipe.overflow}s nothing"
        speed = f"is the only one of {times(len(settings), 'setting')} that {little}"
    if chosen is not fastest:
        over = percent(chosen.gpu_hours / fastest.gpu_hours - 1)
        gain = _gain(chosen, fastest)
        speed = f"needs {over} more GPU-hours than the fastest of {fit}, with {gain}"
    recomputing = ", recomputing activations" if chosen.checkpointing else ""
    recomputing += ", reduce_every micro_batch" if chosen.scattered else ""
    return (
        f"Recommended: {chosen.layout} micro-batches of {count(chosen.budget)} slots, "
        f"{times(chosen.samples, 'sample')} per step ({times(chosen.updates, 'update')} per "
        f"epoch), dp {topology.dp}, cp {topology.cp}"
        f"{recomputing}. It {speed}, and takes {percent(chosen.memory.peak / memory)} of the "
        f"memory of a GPU. {_changed(chosen, settings)}{_loss(chosen.simulation)}"
    )


def _changed(chosen: Setting, settings: Sequence[Setting]) -> str:
    """What the setting does to the data, or what a faster one would do; empty if nothing."""
    if chosen.change:
        return f"It {chosen.change}. "
    faster = min(settings, key=lambda setting: setting.gpu_hours)
    if not faster.change or faster.gpu_hours >= chosen.gpu_hours:
        return ""
    less = percent(1 - faster.gpu_hours / chosen.gpu_hours)
    return (
        f"{_difference(faster, chosen)} would take {less} fewer GPU-hours, but that "
        f"{faster.change}. "
    )


def _difference(setting: Setting, other: Setting) -> str:
    """All in which a setting differs from another."""
    topology, before = setting.recipe.topology, other.recipe.topology
    parts = {
        f"{setting.layout} micro-batches": setting.layout != other.layout,
        f"{count(setting.budget)} slots": setting.budget != other.budget,
        f"{times(setting.samples, 'sample')} per step": setting.samples != other.samples,
        f"dp {topology.dp}": topology.dp != before.dp,
        f"cp {topology.cp}": topology.cp != before.cp,
        f"{'' if setting.checkpointing else 'not '}recomputing activations": (
            setting.checkpointing != other.checkpointing
        ),
        f"reduce_every {'micro_batch' if setting.scattered else 'step'}": (
            setting.scattered != other.scattered
        ),
    }
    *most, last = [part for part, differs in parts.items() if differs]
    return f"{', '.join(most)} and {last}" if most else last


def _gain(chosen: Setting, fastest: Setting) -> str:
    if chosen.samples < fastest.samples:
        return "fewer samples per step"
    if chosen.recipe.topology.cp < fastest.recipe.topology.cp:
        return "less context parallelism"
    return "no recomputing" if fastest.checkpointing else "gradients summed before they are sent"


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
