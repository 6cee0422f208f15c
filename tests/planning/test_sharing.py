"""Plans in which ranks share long sequences."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import (
    Cost,
    Limits,
    Packed,
    Padded,
    Plan,
    Recipe,
    SecondWork,
    Sharing,
    Steps,
    Topology,
    find_prefixes,
    make_plan,
    violations,
)
from evenstep.errors import ConfigError, PlanError
from tests.internals import step_times
from tests.tree_cases import TreeCase, faults_of, random_samples

ATTENTION = Cost(per_token=24576, per_pair=1)
FREE = replace(ATTENTION, per_moved=0.0, per_exchange=0.0)


def recipe(ranks: int = 4, budget: int = 4096, **options: Any) -> Recipe:
    options = {"cost": ATTENTION, "sharing": Sharing(), **options}
    return Recipe(layout=Packed(max_tokens=budget), topology=Topology(dp=ranks), **options)


def check_naively(plan: Plan, lengths: list[int]) -> None:
    """Every token once, parts of a sample in one wave on different ranks, all limits kept."""
    sharing, capacity = plan.recipe.sharing, plan.recipe.layout.max_tokens
    assert sharing is not None
    assert capacity is not None
    seen: dict[int, list[tuple[int, int, int, int, int]]] = {}
    for step in range(plan.num_steps):
        counts = {len(plan[step, rank]) for rank in range(plan.num_ranks)}
        assert len(counts) == 1
        in_step = [n for n, s in zip(lengths, plan.step_of, strict=True) if s == step]
        unit = plan.recipe.topology.alignment
        longest = -(-max(in_step) // unit) * unit
        most_received = sharing.max_received or max(capacity, longest)
        for rank in range(plan.num_ranks):
            for wave, micro in enumerate(plan[step, rank]):
                used, received = 0, 0
                segments, parents = micro.segments, micro.segments.parent
                for at in range(len(segments)):
                    sample, start = int(segments.sample[at]), int(segments.start[at])
                    length = int(segments.length[at])
                    assert length > 0
                    assert start % unit == 0
                    used += -(-length // unit) * unit
                    parent = -1 if parents is None else int(parents[at])
                    assert parent == (-2 if start > 0 else -1)
                    received += start
                    seen.setdefault(sample, []).append((start, start + length, step, wave, rank))
                assert used <= capacity
                assert used <= micro.width
                assert received <= most_received
    for sample, length in enumerate(lengths):
        if plan.step_of[sample] < 0:
            assert sample not in seen
            continue
        parts = sorted(seen[sample])
        assert [a for a, *_ in parts] == [0, *(b for _, b, *_ in parts[:-1])]
        assert parts[-1][1] == length
        assert len({(step, wave) for *_, step, wave, _ in parts}) == 1
        assert len({rank for *_, rank in parts}) == len(parts)
        assert len(parts) <= (sharing.most_ranks or plan.num_ranks)


def time_of(plan: Plan) -> float:
    """The modelled time of the first step, computed one token range at a time."""
    cost, time, ranks_time = plan.recipe.cost, 0.0, np.zeros(plan.num_ranks)
    unit = plan.recipe.topology.alignment

    def first_tokens(x: int) -> float:
        return cost.per_token * x + cost.per_pair * x * x

    for wave in range(len(plan[0, 0])):
        parts: dict[int, list[tuple[int, int, int]]] = {}
        for rank in range(plan.num_ranks):
            segments = plan[0, rank][wave].segments
            for s, a, n in zip(segments.sample, segments.start, segments.length, strict=True):
                parts.setdefault(int(s), []).append((int(a), int(n), rank))
        work, sent = np.zeros(plan.num_ranks), np.zeros(plan.num_ranks)
        received = np.zeros(plan.num_ranks)
        for rank in range(plan.num_ranks):
            micro = plan[0, rank][wave]
            used = sum(-(-int(n) // unit) * unit for n in micro.segments.length)
            work[rank] += cost.per_token * (micro.width - used) + cost.per_micro_batch
        for each in parts.values():
            for at, (a, n, rank) in enumerate(sorted(each)):
                end = a + -(-n // unit) * unit
                work[rank] += first_tokens(end) - first_tokens(a) + cost.per_segment
                received[rank] += a
                sent[rank] += n * (len(each) - 1 - at)
        work += cost.moved * np.maximum(sent, received)
        shares = bool(received.any())
        if shares:
            work += cost.exchange
        if shares or plan.recipe.sync_every == "micro_batch":
            time += work.max()
        else:
            ranks_time += work
    return float(time + ranks_time.max())


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Recipe]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks, n = draw(st.sampled_from([1, 2, 3, 8, 16])), draw(st.integers(1, 80))
    budget = draw(st.sampled_from([64, 100, 1024]))
    spread = draw(st.sampled_from([0.3, 1.0, 2.0]))
    lengths = np.exp(rng.normal(np.log(budget / 8), spread, n)).astype(np.int64)
    most = draw(st.sampled_from([None, 1, 2, ranks]))
    most = None if most is None else min(most, ranks)
    received = draw(st.sampled_from([None, budget // 2, 4 * budget]))
    tp = draw(st.sampled_from([1, 1, 4, 8]))
    topology = Topology(dp=ranks, tp=tp, sequence_parallel=tp > 1)
    steps = draw(st.sampled_from([Steps(), Steps(samples=13), Steps(tokens=budget * ranks)]))
    samples = draw(st.sampled_from([None, 3]))
    cost = Cost(
        per_token=float(rng.choice([1, 1000, 24576])),
        per_pair=float(rng.choice([0, 1, 100])),
        per_segment=float(rng.choice([0, 1000])),
        per_micro_batch=float(rng.choice([0, 10_000])),
        per_moved=draw(st.sampled_from([None, 0.0, 5.0])),
        per_exchange=draw(st.sampled_from([None, 0.0])),
    )
    case = Recipe(
        layout=Packed(max_tokens=budget, samples=samples, round_to=draw(st.sampled_from([1, 4]))),
        topology=topology,
        steps=steps,
        cost=cost,
        sharing=Sharing(most_ranks=most, max_received=received),
        sync_every=draw(st.sampled_from(["micro_batch", "step"])),
        overflow="drop",
    )
    return lengths.clip(1, None).tolist(), case


@settings(deadline=None)
@given(cases())
def test_random_steps_are_valid_and_no_slower_than_unshared(case: tuple[list[int], Recipe]) -> None:
    lengths, shares = case
    plan = make_plan(lengths, shares)
    assert violations(plan) == []
    check_naively(plan, lengths)
    assert plan == make_plan(lengths, shares)
    if plan.num_steps == 1:
        expected, stats = time_of(plan), plan.stats()
        assert stats["time_over_floor"] >= 1 - 1e-9
        table = plan.step_stats()[0]
        assert table["num_shared"] == len(np.unique(plan.segments.sample[plan.segments.start > 0]))
        assert step_times(plan)[0] == pytest.approx(expected)
        if max(lengths) <= (shares.capacity or 0):
            alone = make_plan(lengths, replace(shares, sharing=None))
            assert expected <= step_times(alone)[0] * (1 + 1e-9)


@st.composite
def forests(draw: st.DrawFn) -> TreeCase:
    """Samples with common prefixes, some of them long, which ranks may share."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    samples = random_samples(rng)
    for _ in range(int(rng.integers(1, 4))):
        start = samples[int(rng.integers(len(samples)))]
        samples.insert(
            int(rng.integers(len(samples))),
            start + rng.integers(0, 3, int(rng.integers(10, 90))).tolist(),
        )
    ranks, tp = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 1, 1, 2, 4]))
    longest = max(map(len, samples))
    budget = max(draw(st.sampled_from([longest, 2 * longest, longest // 2])), 2 * tp, 16)
    case = Recipe(
        layout=Packed(max_tokens=budget, samples=draw(st.sampled_from([None, None, 6]))),
        topology=Topology(dp=ranks, tp=tp, sequence_parallel=tp > 1),
        steps=draw(st.sampled_from([Steps(), Steps(samples=13)])),
        cost=Cost(
            per_token=1.0,
            per_pair=float(rng.choice([0, 0.1, 10])),
            per_segment=float(rng.choice([0, 5])),
            per_micro_batch=float(rng.choice([0, 3])),
            per_moved=draw(st.sampled_from([None, 0.0, 5.0])),
            per_exchange=draw(st.sampled_from([None, 0.0])),
        ),
        limits=Limits(gathered=draw(st.sampled_from([None, 3 * longest]))),
        sharing=Sharing(most_ranks=draw(st.sampled_from([None, ranks]))),
        sync_every=draw(st.sampled_from(["micro_batch", "step"])),
        overflow="drop",
    )
    return TreeCase(samples, case, None, {}, find_prefixes(samples))


@settings(deadline=None)
@given(forests())
def test_forests_with_long_samples_are_valid_and_no_slower_than_unshared(case: TreeCase) -> None:
    plan, lengths = case.plan(), [len(tokens) for tokens in case.samples]
    if (plan.step_of >= 0).all():  # the naive checker would drop what one rank does not hold
        kept = replace(case, recipe=replace(case.recipe, overflow="error"))
        assert faults_of(kept, plan) == []
    assert violations(plan) == []
    assert plan == case.plan()
    assert Plan.from_bytes(plan.to_bytes()).fingerprint == plan.fingerprint
    check_parts(plan, lengths)
    stats = plan.stats()
    assert stats["time_over_floor"] >= 1 - 1e-9
    assert stats["shared_tokens_saved"] >= 0
    assert stats["num_shared"] == len(np.unique(plan.segments.sample[plan.segments.is_shared]))
    if plan.num_steps == 1 and max(lengths) <= (case.recipe.capacity or 0):
        alone = replace(case, recipe=replace(case.recipe, sharing=None)).plan()
        assert step_times(plan)[0] <= step_times(alone)[0] * (1 + 1e-9)


def check_parts(plan: Plan, lengths: list[int]) -> None:
    """Parts of a sample are in one wave, on different ranks, and in no tree."""
    where: dict[int, list[tuple[int, int, int, int, int]]] = {}
    for step, ranks in enumerate(plan):
        for rank, micros in enumerate(ranks):
            for wave, micro in enumerate(micros):
                parents = micro.segments.parent
                columns = micro.segments.sample, micro.segments.start, micro.segments.length
                for at, (sample, start, length) in enumerate(zip(*columns, strict=True)):
                    shared = plan.segments.is_shared & (plan.segments.sample == sample)
                    if not shared.any():
                        continue
                    assert parents is None or at not in parents.tolist()
                    parent = -1 if parents is None else int(parents[at])
                    assert parent == (-2 if start > 0 else -1)
                    part = int(start), int(start + length), step, wave, rank
                    where.setdefault(int(sample), []).append(part)
    for sample, parts in where.items():
        parts = sorted(parts)
        assert [a for a, *_ in parts] == [0, *(b for _, b, *_ in parts[:-1])]
        assert parts[-1][1] == lengths[sample]
        assert len({(step, wave) for *_, step, wave, _ in parts}) == 1
        assert len({rank for *_, rank in parts}) == len(parts)


def test_a_step_shares_prefixes_and_a_long_sequence() -> None:
    prompt, answers = list(range(1000)), [[1000 + i] * (100 + i) for i in range(24)]
    samples = [[7] * 6000, *(prompt + answer for answer in answers)]
    lengths = [len(each) for each in samples]
    prefixes = find_prefixes(samples)
    plan = make_plan(lengths, recipe(cost=FREE, budget=8192), prefixes=prefixes)
    assert violations(plan) == []
    assert plan.segments.is_shared.any()
    assert plan.segments.shares_slots
    stats, times = plan.stats(), step_times(plan)[0]
    assert stats["num_shared"] == 1
    assert stats["shared_tokens_saved"] > 0
    for sharing, known in ((None, prefixes), (Sharing(), None)):
        other = make_plan(lengths, recipe(cost=FREE, budget=8192, sharing=sharing), prefixes=known)
        assert times < 0.9 * step_times(other)[0]


def test_a_long_sequence_is_divided_where_ranks_come_out_level() -> None:
    plan = make_plan([4000, 300, 200, 100], recipe(cost=FREE))
    loads = plan.costs
    assert violations(plan) == []
    assert loads.max() / loads.mean() < 1.002
    # Later parts see more, so they are shorter.
    parts = plan.segments.length[plan.segments.sample == 0]
    by_start = parts[np.argsort(plan.segments.start[plan.segments.sample == 0])]
    assert by_start[1] > by_start[2]


@pytest.mark.parametrize(("ranks", "samples"), [(8, 1), (64, 1), (64, 3), (256, 12)])
def test_few_samples_are_divided_over_many_ranks(ranks: int, samples: int) -> None:
    lengths = [4000 * (sample + 1) for sample in range(samples)]
    cost = Cost.named("llama-3-8b").with_exchange("llama-3-8b")
    shares = recipe(ranks=ranks, budget=65536, cost=cost)
    plan = make_plan(lengths, shares)
    check_naively(plan, lengths)
    # The last part of a sample receives the keys of almost all of its tokens.
    even = shares.cost.of_lengths(np.array(lengths)).sum() / ranks + shares.cost.moved * lengths[-1]
    assert step_times(plan)[0] - shares.cost.exchange < even


def test_parts_of_equal_loads_are_the_same_without_compilation() -> None:
    program = (
        "import numpy as np\n"
        "from evenstep import Cost, Packed, Recipe, Sharing, Topology, make_plan\n"
        "cost = Cost(per_token=1.0, per_moved=0.05, per_exchange=0.0)\n"
        "for seed in range(12):\n"
        "    lengths = np.random.default_rng(seed).lognormal(2.5, 1.2, 60).astype(int) + 1\n"
        "    recipe = Recipe(layout=Packed(max_tokens=512), topology=Topology(dp=32), cost=cost,\n"
        "                    sharing=Sharing())\n"
        "    print(make_plan(lengths, recipe).fingerprint)\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            env={**os.environ, "NUMBA_DISABLE_JIT": flag},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flag in ("0", "1")
    ]
    assert len(outputs[0].splitlines()) == 12
    assert outputs[0] == outputs[1]


def test_samples_longer_than_the_budget_are_divided() -> None:
    lengths = [9000, 5000, 700, 30]
    with pytest.raises(PlanError, match="sample 0 has 9000 tokens"):
        make_plan(lengths, recipe(sharing=None))
    plan = make_plan(lengths, recipe())
    check_naively(plan, lengths)
    assert violations(plan) == []
    assert plan.stats()["num_shared"] >= 2
    with pytest.raises(PlanError, match="sample 0 has 17000 tokens but ranks that share it hold"):
        make_plan([17000], recipe())


def test_steps_with_samples_longer_than_the_budget_are_even() -> None:
    cost = Cost(per_token=24576, per_pair=1)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        lengths = rng.lognormal(np.log(10_000), 1, 512).astype(int).clip(1, 65_536)
        lengths = np.append(lengths, rng.integers(65_536, 131_072, 2))
        plan = make_plan(lengths, recipe(ranks=32, budget=65_536, cost=cost))
        assert step_times(plan)[0] <= 1.04 * cost.of_lengths(lengths).sum() / 32


@pytest.mark.parametrize("moved", [0.0, 5.0, 1000.0])
def test_a_sample_that_fills_all_ranks_runs_however_dear_its_keys_are(moved: float) -> None:
    for lengths in ([34], [34, 3, 20], [30, 33, 34, 1]):
        cost = Cost(per_token=1.0, per_segment=5.0, per_moved=moved)
        plan = make_plan(lengths, recipe(ranks=2, budget=17, cost=cost))
        assert violations(plan) == []
        check_naively(plan, lengths)


def test_even_steps_share_nothing() -> None:
    plan = make_plan([500] * 64, recipe())
    assert not plan.segments.is_shared.any()
    assert plan.stats()["tokens_received"] == 0


@pytest.mark.parametrize("sync_every", ["micro_batch", "step"])
def test_padded_widths_count_in_waves_that_share(sync_every: Any) -> None:
    for seed in range(10):
        lengths = np.random.default_rng(seed).lognormal(np.log(32), 0.3, 100).astype(int)
        shares = Recipe(
            layout=Packed(max_tokens=256, round_to=8),
            topology=Topology(dp=16),
            cost=Cost(per_token=1.0, per_pair=0.01, per_moved=0.0, per_exchange=0.0),
            sharing=Sharing(),
            sync_every=sync_every,
        )
        alone = make_plan(lengths, replace(shares, sharing=None))
        assert step_times(make_plan(lengths, shares))[0] <= step_times(alone)[0] * (1 + 1e-9)


def test_dear_exchanges_leave_the_step_unshared() -> None:
    lengths = [4000, 300, 200, 100]
    dear = make_plan(lengths, recipe(cost=replace(ATTENTION, per_exchange=1e12)))
    assert not dear.segments.is_shared.any()
    assert make_plan(lengths, recipe()).segments.is_shared.any()


def test_limits_on_ranks_and_tokens_hold() -> None:
    lengths = [4000, 3900, 300, 200, 100]
    two = make_plan(lengths, recipe(ranks=8, cost=FREE, sharing=Sharing(most_ranks=2)))
    assert np.bincount(two.segments.sample).max() == 2
    few = make_plan(lengths, recipe(ranks=8, cost=FREE, sharing=Sharing(max_received=1500)))
    assert 0 < few.exchanged[1].max() <= 1500
    for plan in (two, few):
        check_naively(plan, lengths)
        assert violations(plan) == []


def test_groups_of_a_step_are_shared_and_those_of_a_micro_batch_refused() -> None:
    lengths, groups = [4000, 300, 200, 100, 120, 90], [0, 1, 1, 2, 2, 3]
    with pytest.raises(ConfigError, match="Set groups='step', or leave out sharing"):
        make_plan(lengths, recipe(), groups=groups)
    plan = make_plan(lengths, recipe(cost=FREE, groups="step"), groups=groups)
    assert violations(plan) == []
    assert plan.segments.is_shared.any()


def test_columns_count_in_full_for_every_part() -> None:
    lengths = [4000, 300, 200, 100]
    limited = recipe(cost=FREE, limits=Limits(columns={"images": 5}))
    plan = make_plan(lengths, limited, columns={"images": [5, 5, 5, 5]})
    assert violations(plan) == []
    assert np.diff(plan.segment_offsets).max() == 1


def test_a_plan_is_saved_and_read() -> None:
    plan = make_plan([4000, 300, 200, 100], recipe(sharing=Sharing(most_ranks=3)))
    again = Plan.from_bytes(plan.to_bytes())
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert again.recipe.sharing == Sharing(most_ranks=3)
    assert "sharing" not in recipe(sharing=None).to_dict()


REFUSED: dict[str, dict[str, Any]] = {
    "a padded layout": {"layout": Padded(max_tokens=4096)},
    "rows of a fixed width": {"layout": Packed(pad_to=4096)},
    "without a budget": {"layout": Packed(samples=4)},
    "topology.cp=2": {"topology": Topology(dp=2, cp=2)},
    "topology.pp=2": {"topology": Topology(dp=2, pp=2)},
    "a packer by name": {"layout": Packed(max_tokens=4096, packer="optimal")},
    "balance='lpt'": {"balance": "lpt"},
    "equal_sizes": {"equal_sizes": True},
    "second_work": {"second_work": SecondWork(column="images")},
    "limits.cost": {"limits": Limits(cost=1e12)},
    "steps.micro_batches": {"steps": Steps(micro_batches=2)},
    "overflow='split'": {"overflow": "split"},
    "most_ranks must be at most topology.dp, 4": {"sharing": Sharing(most_ranks=5)},
    "max_received must be at least one aligned block, 8": {
        "topology": Topology(dp=2, tp=8, sequence_parallel=True),
        "sharing": Sharing(max_received=7),
    },
    "sharing must be Sharing or None": {"sharing": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_combined_is_refused_at_the_recipe(message: str) -> None:
    valid: dict[str, Any] = {
        "layout": Packed(max_tokens=4096),
        "topology": Topology(dp=4),
        "sharing": Sharing(),
    }
    Recipe(**valid)
    with pytest.raises(ConfigError, match=message):
        Recipe(**{**valid, **REFUSED[message]})


@pytest.mark.parametrize("field", ["most_ranks", "max_received"])
def test_numbers_of_sharing_are_whole(field: str) -> None:
    with pytest.raises(ConfigError, match=f"sharing.{field} must be an integer"):
        Sharing(**{field: 0})
