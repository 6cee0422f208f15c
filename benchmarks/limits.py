"""Limits: packing under a second limit, and evening out a second work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from benchmarks.bench import Bench
from benchmarks.tables import Section, Table, Target, verdict
from evenstep import Limits, Packed, Plan, Recipe, Topology, make_plan
from evenstep.core.bounds import bins_bound, lock_steps, makespans
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.recipe import SecondWork, SyncEvery

BUDGET, RANKS, COLUMN = 8192, 8, "patches"
OF_BOUND, OF_FLOOR, FIRST = 1.04, 1.10, 1.05
SYNCS: tuple[SyncEvery, ...] = ("micro_batch", "step")

Score: TypeAlias = Callable[[FloatArray, FloatArray], FloatArray]
"""(room of each bin, what the item takes), as shares of the limits -> the highest is chosen."""

SCORES: dict[str, Score] = {
    "least room": lambda room, item: -(room - item).sum(axis=1),
    "least norm": lambda room, item: -((room - item) ** 2).sum(axis=1),
    "dot product": lambda room, item: room @ item,
    "tightest limit": lambda room, item: -(room - item).min(axis=1),
}


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Samples with tokens and patches."""

    name: str
    lengths: IntArray
    patches: IntArray
    limit: int

    @property
    def taken(self) -> FloatArray:
        """What each sample takes of the budget and the limit."""
        return np.column_stack((self.lengths, self.patches)).astype(np.float64)

    @property
    def caps(self) -> FloatArray:
        """The budget and the limit."""
        return np.array([BUDGET, self.limit], np.float64)

    @property
    def recipe(self) -> Recipe:
        """One step on all ranks."""
        return Recipe(
            layout=Packed(max_tokens=BUDGET),
            topology=Topology(dp=RANKS),
            limits=Limits(columns={COLUMN: self.limit}),
        )

    def plan(self, recipe: Recipe) -> Plan:
        """The plan of the mix."""
        return make_plan(self.lengths, recipe, columns={COLUMN: self.patches})


def limits(bench: Bench) -> Section:
    """Measure micro-batches under two limits, and the balance of two works."""
    section = Section(
        "Limits and second work",
        notes=[
            f"Tokens (budget {BUDGET:,}) and patches (a limit per micro-batch) on {RANKS} ranks. "
            "The mix: 4,000 samples, log-normal with median 1,000 and σ 0.8; half of them have 500 "
            "to 4,000 patches, limit 4,096. Best fits, written here: samples by their larger "
            f"share, each to the open bin with the best score ({', '.join(SCORES)}). Fewest: the "
            "plan with min_saving=0.99, which takes no more micro-batches than needed.",
            "Second work: the patches are work of their own. Waiting is the time of the slowest "
            "rank, per wave or per step, over the mean. The floor of patches: samples over half of "
            "the limit are in different micro-batches. Mixed waves have ranks with and without "
            "patches.",
        ],
    )
    mixes = [_mix(*shape, seed) for shape in _shapes(bench) for seed in range(bench.pick(2, 1))]
    section.tables += [_packing(bench, section, mixes), _second(bench, section, mixes)]
    return section


def _shapes(bench: Bench) -> list[tuple[int, float, float, float, int]]:
    """(samples, median length, σ, share with patches, limit); the first is the mix."""
    mix = (4000, 1000.0, 0.8, 0.5, 4096)
    others = [
        (1000, 1000.0, 0.8, 0.5, 4096),
        (8000, 1000.0, 0.8, 0.5, 4096),
        (4000, 500.0, 1.0, 0.5, 4096),
        (4000, 1500.0, 0.6, 0.5, 4096),
        (4000, 1000.0, 0.8, 0.25, 4096),
        (4000, 1000.0, 0.8, 0.9, 4096),
        (4000, 1000.0, 0.8, 0.5, 8192),
        (4000, 1000.0, 0.8, 0.5, 65536),
        (4000, 1000.0, 0.8, 0.1, 65536),
    ]
    return bench.pick([mix, *others], [(400, *mix[1:])])


def _mix(samples: int, median: float, sigma: float, share: float, limit: int, seed: int) -> Mix:
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(median), sigma, samples)
    patches = np.where(rng.random(samples) < share, rng.integers(500, 4001, samples), 0)
    name = f"{samples:,}, median {median:g}, σ {sigma:g}, {share:.0%}, limit {limit:,}, seed {seed}"
    return Mix(name, np.clip(lengths, 1, BUDGET).astype(np.int64), patches, limit)


def _packing(bench: Bench, section: Section, mixes: list[Mix]) -> Table:
    table = Table(
        "Micro-batches per rank under two limits",
        {
            "mix": "",
            "plan": "d",
            "fewest": "d",
            **{f"best fit, {name}": "d" for name in SCORES},
            "bound": "d",
            "fewest / bound": ".3f",
            "target": "",
        },
    )
    more, ratios = 0, []
    for at, mix in enumerate(mixes):
        bench.say(f"limits: {mix.name}")
        plan = mix.plan(mix.recipe).num_micro_batches // RANKS
        fewest = mix.plan(replace(mix.recipe, min_saving=0.99)).num_micro_batches // RANKS
        fits = [-(-best_fit(mix.taken / mix.caps, score) // RANKS) for score in SCORES.values()]
        bound = -(-bins_bound(mix.taken, mix.caps) // RANKS)
        more += fewest > min(fits)
        if at < bench.pick(2, 1):  # the mix itself, all seeds
            ratios.append(fewest / bound)
        word = f"≤ best fit: {verdict(fewest <= min(fits))}"
        table.add(mix.name, plan, fewest, *fits, bound, fewest / bound, word)
    section.targets += [
        Target(
            "two limits: never more micro-batches than the best of four best fits",
            f"more in {more} of {len(mixes)}",
            more == 0,
        ),
        Target(
            f"two limits, the mix: within {OF_BOUND - 1:.0%} of the bound",
            f"{max(ratios) - 1:.1%}",
            max(ratios) <= OF_BOUND,
        ),
    ]
    return table


def best_fit(share: FloatArray, score: Score) -> int:
    """How many bins best fit needs for items that take these shares of each limit.

    >>> best_fit(np.array([[0.5, 0.5], [0.5, 0.4], [0.5, 0.0]]), SCORES["least room"])
    2
    """
    room = np.ones((len(share), share.shape[1]))
    bins = 0
    for item in share[np.argsort(-share.max(axis=1), kind="stable")]:
        held = np.flatnonzero((room[:bins] >= item - 1e-12).all(axis=1))
        if len(held):
            chosen = held[np.argmax(score(room[held], item))]
        else:
            chosen, bins = bins, bins + 1
        room[chosen] -= item
    return bins


def _second(bench: Bench, section: Section, mixes: list[Mix]) -> Table:
    table = Table(
        "Two works: waiting with second_work, compared with none",
        {
            "mix": "",
            "sync_every": "",
            "patches without": ".3f",
            "patches": ".3f",
            "floor": ".3f",
            "over the floor": ".3f",
            "tokens, time over without": ".4f",
            "mixed waves without": "d",
            "mixed waves, same_waves": "d",
            "target": "",
        },
    )
    over: list[float] = []
    first: list[float] = []
    mixed = 0
    for mix in mixes:
        for sync in SYNCS:
            bench.say(f"second work: {mix.name}, {sync}")
            recipe = replace(mix.recipe, sync_every=sync)
            work = SecondWork(column=COLUMN)
            without, both = mix.plan(recipe), mix.plan(replace(recipe, second_work=work))
            same = mix.plan(replace(recipe, second_work=replace(work, same_waves=True)))
            floor = _floor(mix, sync)
            waits = [waiting(plan, mix.patches, sync) for plan in (without, both)]
            tokens = waiting(both, mix.lengths, sync) / waiting(without, mix.lengths, sync)
            over.append(waits[1] / floor)
            first.append(tokens)
            mixed += mixed_waves(same, mix.patches)
            met = waits[1] <= OF_FLOOR * floor and tokens <= FIRST
            table.add(
                mix.name,
                sync,
                *waits,
                floor,
                waits[1] / floor,
                tokens,
                mixed_waves(without, mix.patches),
                mixed_waves(same, mix.patches),
                verdict(met),
            )
    section.targets += [
        Target(
            f"second work ≤ {OF_FLOOR}× its floor", f"worst {max(over):.3f}×", max(over) <= OF_FLOOR
        ),
        Target(
            f"second work: the first at most {FIRST - 1:.0%} worse",
            f"worst {max(first):.4f}×",
            max(first) <= FIRST,
        ),
        Target("same_waves: no mixed wave", f"{mixed} mixed", mixed == 0),
    ]
    return table


def by_micro_batch(plan: Plan, values: IntArray) -> FloatArray:
    """`[rank, wave]`: the sum of a per-sample column, for a plan of one step of whole samples."""
    owner = plan.micro_batch_of_segment
    weights = values[plan.segments.sample]
    total = np.bincount(owner, weights=weights, minlength=plan.num_micro_batches)
    return np.asarray(total.reshape(plan.num_ranks, -1), np.float64)


def waiting(plan: Plan, values: IntArray, sync: SyncEvery) -> float:
    """The time of the slowest rank, per wave or per step, over the mean."""
    held = by_micro_batch(plan, values)
    slowest = held.max(axis=0).sum() if sync == "micro_batch" else held.sum(axis=1).max()
    return float(slowest * plan.num_ranks / held.sum())


def mixed_waves(plan: Plan, values: IntArray) -> int:
    """Waves in which some ranks have a sample with this work and others have none."""
    some = by_micro_batch(plan, values) > 0
    return int((some.any(axis=0) & ~some.all(axis=0)).sum())


def _floor(mix: Mix, sync: SyncEvery) -> float:
    """A lower bound on the waiting of the patches."""
    patches = mix.patches[mix.patches > 0]
    cost = patches.astype(np.float64)
    bound = float(makespans(cost[None], RANKS)[0])
    if sync == "micro_batch":
        bound = max(bound, float(lock_steps(patches[None], cost[None], mix.limit, RANKS)[0]))
    return bound * RANKS / float(cost.sum())
