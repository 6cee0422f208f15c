"""GroupMean on ranks: every group counts once, or the step is an error on all of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from evenstep import Packed, PlannedStream, Recipe, Topology, World
from evenstep.data import InMemory
from evenstep.errors import InputError
from evenstep.tensors import Collator, Extra, cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Distributed, GroupMean, Runner
from tests.examples import examples
from tests.train.processes import results_of
from tests.train.steps import VOCABULARY, distance, gradient_of, model_of

IDS: dict[str, tuple[Any, torch.dtype]] = {
    "small": (0, torch.int64),
    "negative": (-3, torch.int64),
    "large": (2**62, torch.int64),
    "float": (0.5, torch.float64),
}


def samples_of(groups: list[int], ids: str, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    found = []
    for group in groups:
        length = int(rng.integers(1, 6))
        tokens, mask = rng.integers(0, VOCABULARY, length), rng.random(length) > 0.2
        found.append({"input_ids": tokens, "loss_mask": mask, "group": IDS[ids][0] + group})
    return found


def loss_tokens(sample: dict[str, Any]) -> int:
    return int(sample["loss_mask"][1:].sum())


def run(
    ranks: Collective,
    start: Any,
    samples: list[dict[str, Any]],
    planned: bool,
    ids: str,
    known: bool = False,
) -> tuple[float, torch.Tensor, float]:
    """(loss, gradient, denominator) of one step of all samples."""
    recipe = Recipe(layout=Packed(max_tokens=32), topology=Topology(dp=ranks.size))
    options: dict[str, Any] = {}
    if planned:
        options["groups"] = np.unique([s["group"] for s in samples], return_inverse=True)[1]
    if known:
        options["loss_tokens"] = [loss_tokens(sample) for sample in samples]
    world = World(ranks.rank, ranks.size)
    (step,) = PlannedStream(InMemory(samples), recipe, world=world, **options)
    extra = Extra(aligned="sequence", dtype=IDS[ids][1])
    model = copy.deepcopy(start)
    runner = Runner(
        model=model,
        loss=cross_entropy(),
        normalization=GroupMean(),
        collective=ranks,
        collate=Collator(extras={"group": extra}),
    )
    result = runner.run(step).reduce(ranks)
    assert result.numbers is not None
    return result.loss, gradient_of(model), result.numbers.denominators["groups"]


@examples(40)
@example(groups=[0, 0, 0, 0, 1, 1], seed=0, size=2, planned=False, known=False, ids="small")
@given(
    groups=st.lists(st.integers(0, 3), min_size=2, max_size=8),
    seed=st.integers(0, 99),
    size=st.integers(1, 4),
    planned=st.booleans(),
    known=st.booleans(),
    ids=st.sampled_from(sorted(IDS)),
)
def test_a_group_counts_once_or_the_step_is_an_error_on_all_ranks(
    groups: list[int], seed: int, size: int, planned: bool, known: bool, ids: str
) -> None:
    samples = samples_of(groups, ids, seed)
    if not any(map(loss_tokens, samples)):
        return

    start = model_of()

    def rank(ranks: Collective) -> tuple[float, torch.Tensor, float] | str:
        try:
            return run(ranks, start, samples, planned, ids, known)
        except InputError as error:
            return str(error)

    found = run_ranks(size, rank)
    one = run_ranks(1, lambda ranks: run(ranks, start, samples, True, ids))[0]
    expected = len({s["group"] for s in samples if loss_tokens(s)})
    for each in found:
        assert isinstance(each, str) == isinstance(found[0], str)
        if isinstance(each, str):
            assert not planned, "groups of a plan stay together"
            assert "GroupMean counts a group's tokens per micro-batch" in each
            continue
        assert each[2] == pytest.approx(expected, rel=1e-12)
        assert each[0] == pytest.approx(one[0], rel=1e-9)
        assert distance(each[1], one[1]) < 1e-9


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("planned", [[0, 0, 1, 1], [0, 0, 0, 0]])
def test_groups_of_a_plan_are_those_of_the_extra(planned: list[int], known: bool) -> None:
    """One group on two ranks, or two in one group of the plan, would give another mean."""
    groups = [0, 0, 0, 0] if planned[-1] else [0, 0, 1, 1]
    samples = [{"input_ids": np.arange(5), "group": group} for group in groups]
    options: dict[str, Any] = {"groups": planned, **({"loss_tokens": [4] * 4} if known else {})}

    def rank(ranks: Collective) -> str:
        recipe = Recipe(layout=Packed(max_tokens=20), topology=Topology(dp=ranks.size))
        world = World(ranks.rank, ranks.size)
        (step,) = PlannedStream(InMemory(samples), recipe, world=world, **options)
        collate = Collator(extras={"group": Extra(aligned="sequence", dtype=torch.int64)})
        runner = Runner(
            model=model_of(),
            loss=cross_entropy(),
            normalization=GroupMean(),
            collective=ranks,
            collate=collate,
        )
        with pytest.raises(InputError, match="GroupMean") as error:
            runner.run(step)
        return str(error.value)

    for size in (1, 2) if planned[-1] else (1,):
        fault = "not the same division" if size == 1 else "is on rank 0 and on rank 1"
        for said in run_ranks(size, rank):
            assert fault in said


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("collated", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_groups_that_stay_in_a_step_are_those_of_the_extra(
    size: int, collated: bool, known: bool
) -> None:
    """As many groups in the plan as in the extra, so that the denominator does not tell."""
    groups = [0, 1, 0, 1] * size
    groups = [group + at // 4 * 2 for at, group in enumerate(groups)]
    samples = [{"input_ids": np.arange(5), "group": group} for group in groups]
    collate = Collator(extras={"group": Extra(aligned="sequence", dtype=torch.int64)})
    counts = [4] * len(samples) if known else None

    def rank(ranks: Collective, planned: list[int]) -> str:
        topology, layout = Topology(dp=ranks.size), Packed(max_tokens=20)
        recipe = Recipe(layout=layout, topology=topology, groups="step", balance="none")
        world = World(ranks.rank, ranks.size)
        options: dict[str, Any] = {"groups": planned, "loss_tokens": counts, "shuffle": False}
        (step,) = PlannedStream(InMemory(samples), recipe, world=world, **options)
        runner = Runner(
            model=model_of(),
            loss=cross_entropy(),
            normalization=GroupMean(),
            collective=ranks,
            collate=collate,
        )
        try:
            runner.run(step.collated(collate) if collated else step)
        except InputError as error:
            return str(error)
        return ""

    others = [group // 2 * 2 + (at // 2) % 2 for at, group in enumerate(groups)]
    for said in run_ranks(size, lambda ranks: rank(ranks, others)):
        assert "not the same division into groups" in said
    same = [7 - group for group in groups]
    assert run_ranks(size, lambda ranks: rank(ranks, same)) == [""] * size


def in_process(rank: int, size: int, planned: bool) -> tuple[float, float] | str:
    """A process of the test below. Groups of 3, 3 and 2 cannot be divided into halves."""
    samples = [
        {"input_ids": np.full(4, k % 5), "loss_mask": np.ones(4, np.bool_), "group": k // 3}
        for k in range(8)
    ]
    try:
        loss, _, denominator = run(Distributed(), model_of(), samples, planned, "small")
    except InputError as error:
        return str(error)
    return loss, denominator


def test_processes_refuse_a_group_that_is_on_two_of_them(tmp_path: Path) -> None:
    first, second = results_of(2, in_process, tmp_path / "loose", False)
    assert first == second
    assert "is on rank 0 and on rank 1, but GroupMean counts" in first
    first, second = results_of(2, in_process, tmp_path / "planned", True)
    assert first == second
    assert first[1] == 3.0
