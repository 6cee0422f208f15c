"""Steps of DDP and fully_shard in two processes: what they exchange, and what they report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep import Packed
from tests.train import on_ranks, stepping
from tests.train.processes import results_of
from tests.train.running import Plan, expected, samples_of, steps_of
from tests.train.steps import Gradient, distance

WORK = samples_of([8, 7, 1, 3, 8, 2, 5, 4, 6], seed=3, masked=0.0)
GIANT = steps_of(Plan("batches", Packed(max_tokens=999)), WORK)
NAMES = ("token mean", "sequence mean", "constant")
SHARDED = ["fsdp", "fsdp+hybrid"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found; one pair of processes runs all parts."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    parts = {
        "bypassed": (WORK.samples,),
        "unused": (WORK.samples,),
        "unexchanged": (WORK.samples,),
        "denominators": (WORK.samples, ["plain", "ddp", *SHARDED], NAMES),
        "norms": (WORK.samples, ["plain", "ddp", *SHARDED]),
        "evaluated": (WORK.samples, ["plain", "ddp", *SHARDED]),
        "poisoned": (WORK.samples, ["plain", "ddp", "fsdp"]),
        "scaled": (WORK.samples, ["plain", "ddp", "fsdp"]),
    }
    return results_of(2, stepping.everything, folder, parts)


def exact(name: str = "token mean") -> Gradient:
    return expected(name, on_ranks.decoder(torch.float64), WORK, GIANT)[1]


def test_a_forward_that_bypasses_ddp_is_refused_and_no_other(ran: list[dict[str, Any]]) -> None:
    check_bypassed([found["bypassed"] for found in ran])


@pytest.mark.slow
def test_a_forward_that_bypasses_compiled_ddp_is_refused(tmp_path: Path) -> None:
    check_bypassed(results_of(2, stepping.bypassed_compiled, tmp_path, WORK.samples))


def check_bypassed(ran: list[dict[str, Any]]) -> None:
    gradient = exact()
    for rank, found in enumerate(ran):
        for key, each in found.items():
            if key.startswith("module"):
                assert "ConfigError: forward did not call the DistributedData" in each.error, key
                assert "(`model(...)`, not `model.module(...)`)" in each.error
                continue
            assert not each.error, f"{key} on rank {rank}: {each.error}"
            assert distance(each.gradient, gradient) < 1e-12, key


def test_only_parameters_that_no_rank_uses_stay_without_a_gradient(
    ran: list[dict[str, Any]],
) -> None:
    for key in ran[0]["unused"]:
        first, second = (found["unused"][key] for found in ran)
        assert not first.error, first.error
        for each in (first, second):
            assert [name.removeprefix("module.") for name in each.missing] == ["never"], key
        assert torch.equal(first.gradient.flat, second.gradient.flat)
        assert first.norm == pytest.approx(first.gradient.norm(), rel=1e-9)


def test_gradients_that_ranks_do_not_exchange_are_an_error(ran: list[dict[str, Any]]) -> None:
    errors = {
        "never, ddp, known=False": "had no gradient in the last micro-batch",
        "by rank, fsdp, known=False": "ranks of fully_shard used different parameters",
        "by rank, fsdp, known=True": "ranks of fully_shard used different parameters",
        "turns, each, moves=1": "ranks of fully_shard used different parameters",
        "turns, separate, moves=1": "ranks of fully_shard used different parameters",
        "frozen": "had no gradient in the last micro-batch",
        "unfrozen": "Wrap the model again after unfreezing",
        "exchanged": "Wrap the model again after unfreezing",
        "ignored": "Wrap the model again after unfreezing",
    }
    for found in ran:
        cases = found["unexchanged"]
        for key, each in cases.items():
            assert errors.get(key, "") in each.error, key
            assert bool(each.error) == (key in errors), f"{key}: {each.error}"
            if "split" in key:
                assert distance(each.gradient, exact()) < 1e-12, key
        kept = [each.gradient for key, each in cases.items() if key.startswith("early")]
        assert len(kept) == 3
        assert max(distance(each, kept[0]) for each in kept) < 1e-12


def test_several_denominators_are_exact_in_every_wrapper(ran: list[dict[str, Any]]) -> None:
    gradient = sum(2.0**-at * exact(name) for at, name in enumerate(NAMES))
    assert isinstance(gradient, Gradient)
    for rank, found in enumerate(ran):
        for key, each in found["denominators"].items():
            assert not each.error, f"{key}: {each.error}"
            assert distance(each.gradient, gradient) < 1e-12, f"{key} on rank {rank}"
            assert each.norm == pytest.approx(gradient.norm(), rel=1e-9), key


def test_the_norm_is_that_of_the_whole_gradient_on_every_rank(ran: list[dict[str, Any]]) -> None:
    norm = exact().norm()
    for found in ran:
        for key, each in found["norms"].items():
            assert each.norm == pytest.approx(norm, rel=1e-9), key


def test_the_model_clears_gradients_after_evaluations_and_scores(
    ran: list[dict[str, Any]],
) -> None:
    gradient = exact()
    for found in ran:
        for key, steps in found["evaluated"].items():
            for each in steps:
                assert not each.error, f"{key}: {each.error}"
                assert distance(each.gradient, gradient) < 1e-12, key


def test_steps_that_are_not_finite_are_named_or_skipped_on_all_ranks(
    ran: list[dict[str, Any]],
) -> None:
    gradient = exact()
    for key in ran[0]["poisoned"]:
        at = key[-1]
        firsts = [found["poisoned"][key][0] for found in ran]
        for each in firsts:
            assert not bool(each.gradient.flat.any())
            assert each.skipped == ("skip" in key), key
            if "raise" in key:
                assert f"the loss of micro-batch {at} of" in each.error, key
                assert "on rank 1 (sample" in each.error
        assert firsts[0].error == firsts[1].error
        for found in ran:
            assert distance(found["poisoned"][key][1].gradient, gradient) < 1e-12, key


def test_scalers_see_the_same_on_all_ranks(ran: list[dict[str, Any]]) -> None:
    gradient = exact()
    for found in ran:
        for key, (good, scales) in found["scaled"].items():
            assert not good.error, f"{key}: {good.error}"
            assert distance(good.gradient, gradient) < 1e-12, key
            assert good.norm == pytest.approx(gradient.norm(), rel=1e-9), key
            assert scales == [2.0**10, 2.0**9], key
