"""The repr of a batch on every device."""

from __future__ import annotations

import pytest
import torch

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.tensors import Batch, Collator
from tests.tensors.batches import RECIPES, batch_of
from tests.tensors.works import make_work


def test_a_batch_prints_its_sizes_and_fill_in_one_line() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8, pad_to=8))
    assert repr(batch_of([3, 4], recipe)) == (
        "Batch(1 row of 8 slots, 2 segments, 7 tokens, fill 87.5%, cpu)"
    )
    work = make_work([3], Recipe(layout=Packed(max_tokens=8)))
    shown = repr(work.batches[0])
    assert shown.startswith("Batch(1 row of 3 slots, 1 segment, 3 tokens, fill 100%, cpu, extras ")
    assert "reward" in shown


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_batches_of_every_layout_print_in_one_line(recipe: str) -> None:
    shown = repr(batch_of([5, 24, 3, 8, 1], recipe))
    assert shown.startswith("Batch(")
    assert "fill" in shown
    assert "\n" not in shown
    assert len(shown) < 120


def test_an_empty_batch_says_so() -> None:
    plan = make_plan([2], Recipe(layout=Packed(max_tokens=4), topology=Topology(dp=2)))
    (micro,) = plan[0, 1]
    assert repr(Collator()(micro, {})) == "Batch(1 row of 1 slot, empty, cpu)"


def test_a_batch_without_values_prints_its_shape() -> None:
    batch: Batch = batch_of([3, 4], "packed").to("meta")
    assert repr(batch) == "Batch(1 row of 7 slots, meta)"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_batch_on_a_gpu_prints_the_same() -> None:
    shown = repr(batch_of([3, 4], "packed").to("cuda"))
    assert shown == "Batch(1 row of 7 slots, 2 segments, 7 tokens, fill 100%, cuda:0)"
