"""Floors of steps in which samples share prefixes, and what their stats say."""

import numpy as np
import pytest

from evenstep import Cost, Packed, Prefixes, Recipe, Steps, Topology, find_prefixes, make_plan
from evenstep.errors import EvenstepError
from tests.core.exhaustive import partitions
from tests.internals import Floors, StepFloor, step_times
from tests.tree_cases import random_case, random_samples

MORE = 1 + 1e-9


def test_no_plan_of_a_forest_is_faster_than_its_floor() -> None:
    for seed in range(100):
        case = random_case(seed, 20)
        try:
            plan = case.plan()
        except EvenstepError:
            continue
        floors = Floors(plan).of_steps()
        times = step_times(plan).tolist()
        for step, (floor, time) in enumerate(zip(floors, times, strict=True)):
            waves = len(plan[step, 0])
            assert floor.time <= time * MORE, seed
            assert floor.per_rank <= waves, seed
        stats = plan.stats()
        assert stats["time_over_floor"] >= 1 / MORE
        assert stats["shared_tokens_repeated"] >= 0


def least_times(samples: list[list[int]], cost: Cost, budget: int, ranks: int) -> list[float]:
    """[least time once per step, least time in waves] of all ways to put samples into packs."""
    least = [np.inf, np.inf]
    for way in partitions(len(samples)):
        loads = []
        for pack in range(int(way.max()) + 1):
            # Tokens with equal ones before them and one equal after them run once, as (tokens up to
            # that one); the last token of each sample runs for itself.
            nodes, own = set[tuple[int, ...]](), 0
            for at in np.flatnonzero(way == pack).tolist():
                nodes |= {tuple(samples[at][: end + 1]) for end in range(1, len(samples[at]))}
            slots = len(nodes)
            price = sum(cost.per_token + cost.per_pair * (2 * len(node) - 3) for node in nodes)
            for at in np.flatnonzero(way == pack).tolist():
                last = len(samples[at])
                own += 1
                price += cost.per_token + cost.per_pair * (2 * last - 1) + cost.per_segment
            loads.append((slots + own, price + cost.per_micro_batch))
        if all(slots <= budget for slots, _ in loads):
            prices = sorted((price for _, price in loads), reverse=True)
            least[1] = min(least[1], sum(prices[::ranks]))
            by_rank = partitions(len(prices))
            by_rank = by_rank[by_rank.max(axis=1) < ranks]
            ranked = np.stack([(by_rank == rank) @ np.array(prices) for rank in range(ranks)])
            least[0] = min(least[0], float(ranked.max(axis=0).min()))
    return least


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_floor_holds_for_all_packs_of_a_few_samples(ranks: int) -> None:
    rng, costs = np.random.default_rng(ranks), [Cost(), Cost(per_token=1, per_pair=0.2)]
    for _ in range(40):
        samples = random_samples(rng, 6)
        budget = max(map(len, samples)) + int(rng.integers(0, 20))
        cost = costs[int(rng.integers(2))]
        least = least_times(samples, cost, budget, ranks)
        for sync_every, time in zip(("step", "micro_batch"), least, strict=True):
            recipe = Recipe(
                layout=Packed(max_tokens=budget),
                topology=Topology(dp=ranks),
                cost=cost,
                sync_every=sync_every,  # type: ignore[arg-type]
            )
            lengths = [len(tokens) for tokens in samples]
            plan = make_plan(lengths, recipe, prefixes=find_prefixes(samples))
            assert Floors(plan).of_steps()[0].time <= time * MORE


def test_units_behind_prefixes_cost_what_they_add() -> None:
    recipe = Recipe(layout=Packed(max_tokens=16), cost=Cost(per_token=1, per_pair=1))
    floor = StepFloor(recipe, np.array([4, 2]), behind=np.array([0, 3]))
    assert floor.times(np.array([1]))[0][0] == 4 + 16 + 2 + (25 - 9)


def test_stats_say_what_sharing_saves_and_what_is_repeated() -> None:
    prompt, answers = 100, np.full(64, 50)
    recipe = Recipe(layout=Packed(max_tokens=1000), topology=Topology(dp=4))
    prefixes = Prefixes.of_groups(np.zeros(64, np.int64), np.full(64, prompt))
    stats = make_plan(prompt + answers, recipe, prefixes=prefixes).stats()
    assert stats["shared_tokens_possible"] == 63 * 99
    assert stats["shared_tokens_saved"] == 60 * 99  # once on each of four ranks
    assert stats["shared_tokens_repeated"] == 3 * 99
    assert stats["num_samples"] == stats["num_segments"] == 64
    assert stats["num_truncated"] == stats["num_split"] == 0
    assert "8 % of the tokens are shared prefixes" in str(stats["bottleneck"])
    assert "shared_tokens_saved" not in make_plan(prompt + answers, recipe).stats()


def test_steps_count_what_they_share_themselves() -> None:
    recipe = Recipe(layout=Packed(max_tokens=1000), steps=Steps(samples=2))
    prefixes = Prefixes.of_groups([0, 1, 0, 0], np.full(4, 10))
    plan = make_plan(np.full(4, 20), recipe, prefixes=prefixes)
    assert [step["shared_tokens_possible"] for step in plan.step_stats()] == [0, 9]


def test_a_bottleneck_of_samples_that_share_names_no_remedy_that_is_refused() -> None:
    recipe = Recipe(layout=Packed(max_tokens=500), topology=Topology(dp=2))
    prefixes = Prefixes.of_groups([0, 0, 1], [10, 10, 5])
    bottleneck = str(make_plan([20, 20, 400], recipe, prefixes=prefixes).stats()["bottleneck"])
    assert bottleneck.startswith("sample 2 with 400 tokens costs")
    assert "context parallelism" not in bottleneck
    assert "Set sharing=Sharing(), so that ranks share it, or take more samples" in bottleneck
