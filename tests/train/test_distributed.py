"""torch.distributed processes have the gradient of one process with one giant batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evenstep import Packed, Padded
from evenstep.tensors import cross_entropy
from evenstep.train import run_step
from tests.train import on_ranks
from tests.train.on_ranks import Case, Outcome
from tests.train.processes import results_of
from tests.train.running import Plan, expected, samples_of, scores_alone, steps_of
from tests.train.steps import LIMIT, NORMALIZATIONS, Gradient, distance, gradient_of

WORK = samples_of([8, 7, 1, 3, 8, 2, 5, 4, 6], seed=3)
PACKED = Packed(max_tokens=LIMIT)
EXCHANGES = {"plain": 0, "ddp": 1, "fsdp": 2}
GIANT = Plan("batches", Packed(max_tokens=999))


def giant(name: str = "token mean", dtype: torch.dtype = torch.float64) -> tuple[float, Gradient]:
    """(loss, gradient) of one process that runs all samples as one batch."""
    model = on_ranks.decoder(dtype)
    batches = steps_of(GIANT, WORK)[0]
    assert len(batches) == 1
    result = run_step(
        batches, model, cross_entropy(), normalization=NORMALIZATIONS[name], mode="deferred"
    )
    return result.loss, gradient_of(model)


def check(found: list[dict[str, Outcome]], cases: dict[str, Case]) -> None:
    for key, case in cases.items():
        exact = 1e-12 if case.dtype == torch.float64 else 1e-6
        loss, gradient = giant(case.name, case.dtype)
        for rank, outcomes in enumerate(found):
            outcome = outcomes[key]
            assert not outcome.error, f"{key} on rank {rank}: {outcome.error}"
            assert outcome.loss == pytest.approx(loss, rel=exact), key
            assert distance(outcome.gradient, gradient) < exact, f"{key} on rank {rank}"


def test_the_giant_batch_is_the_definition() -> None:
    for name in NORMALIZATIONS:
        model = on_ranks.decoder(torch.float64)
        loss, gradient = expected(name, model, WORK, steps_of(GIANT, WORK))
        found = giant(name)
        assert found[0] == pytest.approx(loss, rel=1e-12)
        assert distance(found[1], gradient) < 1e-12


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_framework_has_the_gradient_of_one_giant_batch(size: int, tmp_path: Path) -> None:
    cases = {}
    for wrap in ("plain", "ddp", "fsdp", "ddp+checkpoint", "fsdp+checkpoint"):
        for known in (True,) if "checkpoint" in wrap else (True, False):
            plan = Plan("planned", PACKED, dp=size)
            cases[f"{wrap}, known={known}"] = Case(wrap, plan, known=known)
    for wrap in ("plain", "ddp", "fsdp"):
        plan = Plan("collated", Padded(max_tokens=LIMIT), dp=size)
        cases[f"{wrap}, single precision"] = Case(wrap, plan, dtype=torch.float32)
        for name in list(NORMALIZATIONS)[:: size - 1]:
            known = name < "m"  # some of each
            plan = Plan("batches", Packed(samples=1), dp=size, seed=5)
            cases[f"{wrap}, {name}"] = Case(wrap, plan, name, known=known)
        plan = Plan("pooled", PACKED, dp=size, micro_batches=9)
        cases[f"{wrap}, pooled"] = Case(wrap, plan)
    found = results_of(size, on_ranks.outcomes, tmp_path / "ranks", cases, WORK.samples)
    check(found, cases)
    for outcomes in found:
        for key, case in cases.items():
            # Gradients are exchanged in the last backward only: all at once by DDP, those of the
            # block and of the rest by fully_shard.
            assert outcomes[key].micro_batches > 1
            assert outcomes[key].exchanges == EXCHANGES[case.wrap.split("+")[0]]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_context_parallel_ranks_train_for_real(size: int, tmp_path: Path) -> None:
    cases = {}
    for wrap in ("plain", "ddp", "fsdp", "ddp+checkpoint"):
        plan = Plan("planned", PACKED, dp=size // 2, cp=2)
        cases[f"{wrap}, known"] = Case(wrap, plan, known=True)
        cases[f"{wrap}, deferred"] = Case(wrap, plan, "sequence mean")
        padded = replace(plan, layout=Padded(max_tokens=2 * LIMIT))
        cases[f"{wrap}, padded"] = Case(wrap, padded, "group mean")
        cases[f"{wrap}, single precision"] = Case(wrap, plan, dtype=torch.float32)
    found = results_of(size, on_ranks.outcomes, tmp_path / "ranks", cases, WORK.samples, (2,))
    check(found, cases)


@pytest.mark.slow
def test_compiled_models_have_the_same_gradient(tmp_path: Path) -> None:
    plan = Plan("planned", PACKED, dp=2)
    cases = {wrap: Case(wrap, plan) for wrap in ("ddp+compile", "fsdp+compile")}
    check(results_of(2, on_ranks.outcomes, tmp_path / "ranks", cases, WORK.samples), cases)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sparse_gradients_are_exact_and_stay_sparse(size: int, tmp_path: Path) -> None:
    _, exact = giant()
    for found in results_of(size, on_ranks.sparse_steps, tmp_path / "ranks", WORK.samples):
        for gradient, sparse in found.values():
            assert sparse
            assert distance(gradient, 2 * exact) < 1e-12


def test_a_runner_without_a_collective_is_an_error_on_several_ranks(tmp_path: Path) -> None:
    for shared, own in results_of(2, on_ranks.without_collective, tmp_path / "ranks", WORK.samples):
        assert "shared by 2 ranks" in shared
        assert "collective=Distributed()" in shared
        assert own == ""


def test_later_steps_without_a_loss_token_are_errors_without_a_reduce(tmp_path: Path) -> None:
    samples = samples_of([4, 4, 4, 4, 4, 4, 4, 4], masked=0.0).samples
    for sample in samples[1:]:
        sample["loss_mask"] = sample["loss_mask"] & False  # one rank has all loss tokens
    wraps = ["plain", "ddp", "fsdp"]
    for by_kind in results_of(2, on_ranks.unreduced_steps, tmp_path / "ranks", wraps, samples):
        assert len(by_kind) == 14
        for case, (before, without, after) in by_kind.items():
            assert (before, after) == ("", ""), case
            assert "counts in the loss, on any rank. In one of its samples" in without, case


# Fed steps --------------------------------------------------------------------------------


def test_ranks_of_unequal_numbers_are_fed(tmp_path: Path) -> None:
    # DDP rebuilds its buckets in the first forward of the second step.
    wraps = ["plain", "ddp", "fsdp", "ddp + buffer, twice", "fsdp, twice"]
    shares = [[0, 1, 2, 3, 4, 5, 6, 7], [8]]
    found = results_of(2, on_ranks.fed, tmp_path / "ranks", wraps, WORK.samples, shares)
    loss, gradient = giant()
    for rank, by_wrap in enumerate(found):
        for wrap, (outcome, ages) in by_wrap.items():
            assert outcome.loss == pytest.approx(loss, rel=1e-12)
            assert distance(outcome.gradient, gradient) < 1e-12
            assert outcome.exchanges == EXCHANGES[wrap.split()[0].strip(",")]
            assert len(ages) == len(shares[rank])
            assert min(ages) >= 0
    counts = {wrap: [by_wrap[wrap][0].micro_batches for by_wrap in found] for wrap in wraps}
    assert counts["fsdp"][0] == counts["fsdp"][1]  # lock-step
    for wrap, more in (("plain", 0), ("ddp", 1)):  # DDP exchanges in an empty one
        assert counts[wrap][1] == 1 + more
        assert counts[wrap][0] > 2 + more


def test_ranks_do_not_wait_for_the_producers_of_others(tmp_path: Path) -> None:
    wraps = ["plain", "ddp"]
    found = results_of(
        2, on_ranks.fed_one_after_the_other, tmp_path / "ranks", wraps, WORK.samples, str(tmp_path)
    )
    loss, gradient = giant()
    for by_wrap in found:
        for wrap, outcome in by_wrap.items():
            assert outcome.loss == pytest.approx(loss, rel=1e-12)
            assert distance(outcome.gradient, gradient) < 1e-12
            assert outcome.exchanges == EXCHANGES[wrap]


def test_context_parallel_ranks_are_fed_in_pairs_and_shard_empty_micro_batches(
    tmp_path: Path,
) -> None:
    shares = [[0, 1, 2, 3, 4, 5, 6, 7, 8], []]
    found = results_of(4, on_ranks.fed, tmp_path / "ranks", ["plain"], WORK.samples, shares, 2)
    for by_wrap in found:
        assert distance(by_wrap["plain"][0].gradient, giant()[1]) < 1e-12


# Scoring --------------------------------------------------------------------------------------


def test_ranks_score_together_whatever_wraps_the_model(tmp_path: Path) -> None:
    found = results_of(
        2, on_ranks.scores, tmp_path / "ranks", ["plain", "ddp", "fsdp"], WORK.samples
    )
    model = on_ranks.decoder(torch.float64)
    alone = [scores_alone(model, sample["input_ids"]) for sample in WORK.samples]
    for by_wrap in found:
        for scores in by_wrap.values():
            for one, other in zip(scores, alone, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# Out of memory --------------------------------------------------------------------------------


def test_a_micro_batch_that_is_too_large_is_split_on_all_ranks_together(tmp_path: Path) -> None:
    cases = {}
    for wrap in ("plain", "ddp", "plain+checkpoint"):
        for where in ("forward", "backward"):
            for known in (True, False):
                case = Case(
                    wrap, Plan("planned", Packed(max_tokens=2 * LIMIT), dp=2), known=known,
                    on_memory="split", most=LIMIT, where=where,
                )  # fmt: skip
                cases[f"{wrap}, {where}, known={known}"] = case
    found = results_of(2, on_ranks.outcomes, tmp_path / "ranks", cases, WORK.samples)
    check(found, cases)
    fewest = len(steps_of(Plan("planned", Packed(max_tokens=2 * LIMIT), dp=2), WORK)[0])
    for outcomes in found:
        assert all(outcome.micro_batches > fewest for outcome in outcomes.values())


def test_a_segment_that_does_not_fit_alone_is_an_error_on_every_rank(tmp_path: Path) -> None:
    split = Case("ddp", Plan("planned", PACKED, dp=2), on_memory="split", most=LIMIT - 1)
    fsdp = Case("fsdp", Plan("planned", PACKED, dp=2), on_memory="split")
    everyone = Case("plain", Plan("planned", PACKED, dp=2), most=0)
    cases = {"split": split, "fsdp": fsdp, "raise": everyone}
    found = results_of(2, on_ranks.outcomes, tmp_path / "ranks", cases, WORK.samples)
    for rank, outcomes in enumerate(found):
        assert "MicroBatchError: micro-batch" in outcomes["split"].error
        assert "with a single segment, which cannot be divided" in outcomes["split"].error
        assert (
            "ConfigError: on_memory='split' does not support fully_shard" in outcomes["fsdp"].error
        )
        assert f"of step 0 on rank {rank} (1 x " in outcomes["raise"].error


def test_every_way_to_wrap_is_exact_or_refused_and_adds_to_earlier_gradients(
    tmp_path: Path,
) -> None:
    loss, gradient = giant()
    refused = {
        "static": "Set static_graph=False",
        "half": "between 4 ranks, but the collective has 2",
        "uneven": "different divide factors",
        "ignored": "its gradient is not exchanged",
    }
    for rank, outcomes in enumerate(results_of(4, on_ranks.wrappings, tmp_path, WORK.samples)):
        for name, outcome in outcomes.items():
            if name in refused:
                assert refused[name] in outcome.error, name
                continue
            assert not outcome.error, f"{name} on rank {rank}: {outcome.error}"
            assert outcome.loss == pytest.approx(loss, rel=1e-12), name
            assert distance(outcome.gradient, gradient + 0.5) < 1e-12, f"{name} on rank {rank}"
