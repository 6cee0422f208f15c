"""The settings that `tune` tries: layouts, budgets, samples per step, context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenstep.config import overridden, recipe_from
from evenstep.core.cost import Gpu
from evenstep.core.models import ModelSize
from evenstep.core.ragged import IntArray, rounded_up
from evenstep.core.recipe import Recipe, Topology
from evenstep.core.text import whole_number
from evenstep.errors import ConfigError, PlanError
from evenstep.report.simulation.device import cluster_of
from evenstep.report.simulation.memory import USABLE, memory_of
from evenstep.report.simulation.simulate import simulate
from evenstep.report.simulation.tuning import Setting, ranked

_SMALLEST, _LARGEST = 4096, 1 << 20  # slots per device
_UNIT = 1024  # budgets are multiples of it
_PER_RANK = (2, 8, 32)  # samples per step and device
_CONTEXT = (1, 2, 4, 8)
_SAVING = 0.01  # of a step's time, that more micro-batches must save; plans in a sixth of the time
_FIRST, _KEPT = 2, 12  # steps that every setting gets, and settings that get all steps
SWEPT = ("layout.kind", "layout.max_tokens", "steps.samples", "topology.cp", "topology.dp")


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """What is tuned: lengths, a model, a GPU, how many, and what the user fixed with --set.

    steps  steps that the best settings are planned for
    """

    lengths: IntArray
    size: ModelSize
    gpu: Gpu
    ranks: int
    steps: int
    fixed: dict[str, Any]

    @classmethod
    def of(
        cls, lengths: IntArray, size: ModelSize, gpu: Gpu, ranks: int, steps: int,
        overrides: Sequence[str],
    ) -> Sweep:  # fmt: skip
        """Check the overrides; those of swept keys fix them."""
        whole_number("--ranks", ranks, most=2**20)
        whole_number("--steps", steps)
        for override in overrides:
            key = override.partition("=")[0].strip()
            if key in ("sync_every", "steps.tokens", "steps.micro_batches") or key[:4] == "cost":
                raise ConfigError(
                    f"tune sets {key} itself: the model's time, ranks that synchronise at every "
                    f"micro-batch, and steps of samples. Remove --set {key}."
                )
        return cls(lengths, size, gpu, ranks, steps, overridden({}, overrides))

    def settings(self, progress: Callable[[int, int], None]) -> list[Setting]:
        """All settings that fit, over a few steps; the best of them over all steps."""
        candidates = list(self._candidates())
        total = len(candidates) + min(_KEPT, len(candidates))
        found: list[tuple[Recipe, Setting]] = []
        faults: list[str] = []
        for number, recipe in enumerate(candidates):
            progress(number, total)
            try:
                setting = self._measured(recipe, min(_FIRST, self.steps))
            except (ConfigError, PlanError) as error:
                faults.append(str(error))
                continue
            if setting is not None:
                found.append((recipe, setting))
        if not found:
            raise PlanError(faults[0] if faults else self._too_large())
        recipes = {id(setting): recipe for recipe, setting in found}
        first = ranked([setting for _, setting in found])
        best = []
        for number, setting in enumerate(first[:_KEPT]):
            progress(len(candidates) + number, total)
            whole = self._measured(recipes[id(setting)], self.steps)
            best += [] if whole is None else [whole]
        return ranked([*best, *first[_KEPT:]])

    # Candidates ----------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Recipe]:
        for topology in self._topologies():
            for samples in self._samples(topology):
                for kind in self._chosen("layout", "kind", ("packed", "padded")):
                    for budget in self._budgets(topology, samples):
                        yield self._recipe(topology, samples, kind, budget)

    def _chosen(self, part: str, name: str, choices: Sequence[Any]) -> list[Any]:
        """The user's value, or all choices."""
        given = self.fixed.get(part)
        return [given[name]] if isinstance(given, dict) and name in given else list(choices)

    def _topologies(self) -> list[Topology]:
        given = dict(self.fixed.get("topology") or {})
        given.pop("cp", None)
        asked = given.pop("dp", None)
        base = recipe_from({"layout": {"max_tokens": _UNIT}, "topology": given}).topology
        shared = base.tp * base.pp
        found = []
        # A state cannot be computed for parts of a sequence at once: no context parallelism.
        for cp in self._chosen("topology", "cp", (1,) if self.size.stateful else _CONTEXT):
            size = whole_number("topology.cp", cp) * shared
            near = cp * base.tp <= self.gpu.per_node or cp == 1
            if self.ranks % size == 0 and near and asked in (None, self.ranks // size):
                found.append(replace(base, dp=self.ranks // size, cp=cp))
        if not found:
            raise ConfigError(
                f"{self.ranks} ranks cannot be divided into dp × cp × tp × pp as given. Change "
                f"--ranks or --set topology."
            )
        return found

    def _samples(self, topology: Topology) -> list[int]:
        devices = self.ranks // (topology.tp * topology.pp)
        choices = sorted({min(len(self.lengths), each * devices) for each in _PER_RANK})
        return self._chosen("steps", "samples", choices)

    def _budgets(self, topology: Topology, samples: int) -> list[int]:
        """Budgets that hold the longest sample, up to what one step can fill."""
        cp = topology.cp
        longest = rounded_up(int(self.lengths.max()), max(topology.alignment, _UNIT * cp))
        shorter = self.fixed.get("overflow", "error") != "error"  # budgets below the longest
        most = float(self.lengths.mean()) * samples / topology.dp
        budget, found = _SMALLEST * cp, {longest} if longest > _SMALLEST * cp else set()
        while budget <= _LARGEST * cp:
            if budget >= longest or shorter:
                found.add(budget)
                if budget >= most:
                    break
            budget *= 2
        return self._chosen("layout", "max_tokens", sorted(found))

    def _recipe(self, topology: Topology, samples: int, kind: str, budget: int) -> Recipe:
        data: dict[str, Any] = {
            **self.fixed,
            "topology": {name: getattr(topology, name) for name in Topology.__slots__},
            "steps": {"samples": samples},
            "layout": {
                **(self.fixed.get("layout") or {}), "kind": kind, "max_tokens": budget
            },
        }  # fmt: skip
        if data.get("balance", "refined") == "refined":
            data.setdefault("min_saving", _SAVING)
        return recipe_from(data)

    # Measuring -----------------------------------------------------------------------------------

    def _measured(self, recipe: Recipe, steps: int) -> Setting | None:
        """The setting over so many steps, with gradients summed before they are scattered and
        without recomputing if that fits; None if none fits."""
        for checkpointing in (False, True):
            if self._least_peak(recipe, checkpointing) > self._room:
                continue
            for scattered in (False, True):
                setting = self._simulated(recipe, steps, checkpointing, scattered)
                if setting.memory.peak <= self._room:
                    return setting
                if setting.waves == 1 or recipe.topology.dp * recipe.topology.cp == 1:
                    break  # nothing to save
        return None

    def _simulated(
        self, recipe: Recipe, steps: int, checkpointing: bool, scattered: bool
    ) -> Setting:
        from evenstep import make_plan

        cluster = cluster_of(self.size, self.gpu, recipe.topology, checkpointing=checkpointing)
        cluster = replace(cluster, scattered=scattered)
        recipe = replace(recipe, cost=cluster.cost)
        plan = make_plan(self._draw((recipe.steps.samples or 1) * steps), recipe)
        waves = int(np.diff(plan.cell_offsets).max(initial=1))
        slots = max(int(plan.slots.max(initial=1)), self._alone(recipe))
        kept, whole = self._kept(recipe), int(self.lengths.sum())
        touched = float((kept != self.lengths).mean())
        lost = 1 - float(kept.sum()) / whole
        if recipe.overflow == "split" and recipe.longest_segment is not None:
            split = self.lengths > recipe.longest_segment
            touched, lost = float(split.mean()), float(self.lengths[split].sum()) / whole
        return Setting(
            recipe=recipe,
            checkpointing=checkpointing,
            scattered=scattered,
            simulation=simulate(plan, cluster),
            memory=memory_of(
                self.size, recipe.topology, slots=slots, micro_batches=waves,
                checkpointing=checkpointing, scattered=scattered,
            ),
            waves=waves,
            num_samples=int((kept > 0).sum()),
            corpus=int(kept.sum()),
            changed_samples=touched,
            changed_tokens=lost,
        )  # fmt: skip

    def _kept(self, recipe: Recipe) -> IntArray:
        """How much of each sample of the corpus is trained on."""
        longest = recipe.longest_segment
        if longest is None or recipe.overflow not in ("truncate", "drop"):
            return self.lengths
        if recipe.overflow == "truncate":
            return np.minimum(self.lengths, longest)
        return np.where(self.lengths > longest, 0, self.lengths)

    def _alone(self, recipe: Recipe) -> int:
        """The slots of the longest sample if it runs alone, whatever the budget; else 0."""
        longest = rounded_up(int(self.lengths.max()), recipe.width_unit)
        return longest if recipe.overflow == "alone" else 0

    @property
    def _room(self) -> float:
        return USABLE * self.gpu.memory

    def _least_peak(self, recipe: Recipe, checkpointing: bool) -> float:
        """The memory of a micro-batch that holds the longest sample or a rank's whole step."""
        share = self.lengths.mean() * (recipe.steps.samples or 1) / recipe.topology.dp
        slots = min(recipe.layout.budget or 0, max(int(self.lengths.max()), int(share)))
        slots = max(slots, self._alone(recipe))
        return memory_of(
            self.size, recipe.topology, slots=slots, micro_batches=1, checkpointing=checkpointing
        ).peak

    def _draw(self, count: int) -> IntArray:
        """The first `count` lengths of the corpus in a seeded order, over and over."""
        order = np.random.default_rng(0).permutation(len(self.lengths))
        return self.lengths[np.resize(order, count)]

    def _too_large(self) -> str:
        topology = self._topologies()[-1]
        least = self._budgets(topology, self._samples(topology)[0])[0]
        need = memory_of(self.size, topology, slots=least, micro_batches=1, checkpointing=True)
        return (
            f"no setting fits into {self.gpu.memory / 2**30:.0f} GiB: with cp {topology.cp} and "
            f"recomputed activations, micro-batches of {least} slots need "
            f"{need.peak / 2**30:.0f} GiB. Use more ranks or another GPU, set topology.tp, or "
            f"overflow=split, which cuts long samples."
        )
