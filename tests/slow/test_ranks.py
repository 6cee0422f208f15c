"""Packed steps of real architectures are exact under DDP and FSDP2 on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow.measure import is_exact
from tests.slow.ranks import WRAPPERS, errors_on_ranks
from tests.train.processes import results_of

pytestmark = pytest.mark.slow

IMPLEMENTATIONS = ("sdpa", "evenstep")
NO_SDPA = {"gpt_oss"}


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral", "qwen3_moe", "qwen2_5_vl"]
)
def test_packed_steps_on_two_ranks_are_exact(name: str, tmp_path: Path) -> None:
    for errors in results_of(2, errors_on_ranks, tmp_path, [name], IMPLEMENTATIONS, limit=300.0):
        rounding = errors.pop(name)
        runs = len(WRAPPERS) * (1 if name in NO_SDPA else 2)
        assert len(errors) == runs
        assert all(is_exact({"single": error}, rounding) for error in errors.values()), errors
