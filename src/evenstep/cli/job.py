"""The samples and the recipe of a command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenstep.cli.input import Input
from evenstep.cli.samples import Samples, read_samples, samples_of, saved_plan
from evenstep.config import load_recipe
from evenstep.core.plan import Plan
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError, InputError


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Samples and the recipe to plan them with."""

    samples: Samples
    recipe: Recipe

    def within(self, longest: int) -> Job:
        """The same job with samples of at most `longest` tokens: the segments that the recipe's
        overflow makes. Samples stay whole if it is "error" or "alone"."""
        from evenstep.planning.inputs import checked_lengths
        from evenstep.planning.units import segments_of

        overflow = self.recipe.overflow
        lengths = checked_lengths(self.samples.lengths, None)
        if overflow in ("error", "alone") or not (lengths > longest).any():
            return self
        segments, _ = segments_of(lengths, longest, overflow)
        kept = self.samples.take(segments.sample)
        return Job(replace(kept, lengths=segments.length, prefixes=None), self.recipe)

    def plan(
        self,
        recipe: Recipe,
        progress: Callable[[int, int], None] | None = None,
        *,
        share: bool = False,
    ) -> Plan:
        """Plan the samples with a recipe, the job's own or another; `share` their prefixes."""
        from evenstep import make_plan

        made = make_plan(
            self.samples.lengths,
            recipe,
            groups=self.samples.groups,
            columns=self._columns(recipe),
            prefixes=self.samples.prefixes if share else None,
            progress=progress,
        )
        return made if self.samples.ids is None else replace(made, sample_ids=self.samples.ids)

    def plan_epoch(
        self, seed: int, epoch: int, progress: Callable[[int, int], None] | None = None
    ) -> Plan:
        """Plan the samples in the order of a stream with this seed in this epoch."""
        from evenstep import PlannedStream, World
        from evenstep.data import Lengths
        from evenstep.planning.inputs import checked_lengths

        if self.samples.ids is not None:
            raise InputError(
                "the saved plan already has the order of a stream. Remove --seed and --epoch, or "
                "pass the file of lengths."
            )
        stream = PlannedStream(
            Lengths(checked_lengths(self.samples.lengths, None)),
            self.recipe,
            world=World(0, self.recipe.topology.dp),
            seed=seed,
            groups=self.samples.groups,
            columns=self._columns(self.recipe),
            prefixes=self.samples.prefixes,
        )
        return stream.plan_epoch(epoch, progress=progress)

    def _columns(self, recipe: Recipe) -> dict[str, Any]:
        """The columns that a recipe uses; other strategies may use others."""
        return {n: values for n, values in self.samples.columns.items() if n in recipe.columns}


def load_job(
    path: Path,
    config: Path | None,
    overrides: Sequence[str],
    column: str | None,
    groups: str | None,
    model: str | None,
    dialect: str | None,
    prompts: str | None = None,
) -> Job:
    """Read lengths and recipe; a saved plan gives both, and overrides change its recipe."""
    source = Input.at(path)
    saved = saved_plan(source)
    base = None if saved is None else saved.recipe.to_dict()
    if dialect is not None and config is None:
        raise ConfigError(f"--from {dialect} has no effect without --config. Name the file.")
    recipe = load_recipe(config, overrides, base, model, dialect)
    if saved is None:
        return Job(read_samples(source, column, groups, list(recipe.columns), prompts), recipe)
    if column or groups or prompts:
        raise InputError(
            f"{path} is a saved plan with its own lengths and groups. Remove "
            f"{'--column and --groups' if not prompts else '--column, --groups and --prompts'}."
        )
    return Job(samples_of(saved), recipe)
