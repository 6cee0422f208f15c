"""Packed steps of real architectures are exact under DDP and FSDP2 on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow.measure import LIMIT, is_exact
from tests.slow.ranks import ARCHITECTURES, IMPLEMENTATIONS, WRAPPERS, errors_on_ranks
from tests.train.processes import results_of

pytestmark = pytest.mark.slow

NO_SDPA = {"gpt_oss"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_steps_on_two_ranks_are_exact(name: str, tmp_path: Path) -> None:
    for found in results_of(2, errors_on_ranks, tmp_path, name, IMPLEMENTATIONS):
        errors = found["errors"]
        assert len(errors) == len(WRAPPERS) * (1 if name in NO_SDPA else len(IMPLEMENTATIONS))
        for error in errors.values():
            assert is_exact(error, found["rounding"]), errors
            assert error["single norm"] <= max(LIMIT, found["rounding norm"]), errors
