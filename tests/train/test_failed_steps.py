"""A failed step leaves nothing behind: the next step has the gradient of a step alone."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.train import failing
from tests.train.failing import KINDS, Failing
from tests.train.processes import results_of
from tests.train.running import samples_of
from tests.train.steps import distance

WORK = samples_of([8, 7, 1, 3, 8, 2, 5, 4, 6], seed=3)
PLAIN = ("plain", "ddp", "views", "buckets", "unused")
SHARDED = ("fsdp", "fsdp+kept", "fsdp+mixed", "fsdp+hybrid", "fsdp+flat")
ERRORS = {"memory": "MicroBatchError", "interrupt": "KeyboardInterrupt"}


def check(cases: dict[str, dict[str, Failing]], folder: Path) -> None:
    ran = results_of(2, failing.failed, folder, cases, WORK.samples)
    for rank, found in enumerate(ran):
        for wrap, those in cases.items():
            for key, case in those.items():
                each, where = found[wrap][key], f"{wrap}, {key}, rank {rank}"
                assert ERRORS.get(case.kind, "ArithmeticError") in each.error, where
                assert each.untouched, where
                assert distance(each.gradient, each.expected) < 1e-12, where


def test_a_step_that_failed_leaves_nothing_in_any_wrapper(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Failing]] = {}
    for number, wrap in enumerate((*PLAIN, *SHARDED)):
        kinds = ("loss", "backward", KINDS[number % 6])
        cases[wrap] = {
            kind: Failing(kind, known=at == 1, older=at > 0) for at, kind in enumerate(kinds)
        }
    check(cases, tmp_path)


@pytest.mark.slow
def test_a_step_may_fail_anywhere(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Failing]] = {}
    for wrap in (*PLAIN, *SHARDED, "views+buckets", "ddp+checkpoint", "fsdp+checkpoint"):
        cases[wrap] = {
            f"{kind} at {at}": Failing(kind, (at, at), known=bool(at % 2), older=at < 2)
            for kind, at in product(KINDS, range(3))
        }
    for wrap, kind in product(("plain", "ddp", "views"), KINDS):
        # Without communication inside a micro-batch, ranks may fail in different ones.
        cases[wrap][f"{kind} apart"] = Failing(kind, (0, 1))
    check(cases, tmp_path)


@pytest.mark.slow
def test_compiled_models_fail_without_a_trace(tmp_path: Path) -> None:
    wraps = ("plain+compile", "ddp+compile", "fsdp+compile")
    check({wrap: {k: Failing(k) for k in ("loss", "backward")} for wrap in wraps}, tmp_path)
