"""Columns: values of samples are checked before they are laid out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from evenstep import Packed, Recipe, make_plan
from evenstep.errors import InputError
from evenstep.tensors import Collator, Extra
from tests.internals import Columns


def columns_of(*more: dict[str, Any], overflow: Any = "error", budget: int = 64) -> Columns:
    """Samples of three tokens each, in one micro-batch."""
    samples = [{"input_ids": torch.arange(3), **each} for each in more]
    recipe = Recipe(layout=Packed(max_tokens=budget), overflow=overflow)
    micro = make_plan([3] * len(samples), recipe)[0, 0][0]
    return Columns(micro, [samples[i] for i in micro.segments.sample.tolist()])


def mask(value: Any) -> dict[str, Any]:
    return {"attention_mask": value}


@pytest.mark.parametrize(
    "ones",
    [
        [1, 1, 1],
        (True, True, True),
        np.ones(3, np.int8),
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3),
    ],
)
def test_an_attention_mask_of_ones_is_accepted(ones: Any) -> None:
    columns_of(mask(ones), {}, mask([1, 1, 1])).check_attention_masks()
    columns_of({}).check_attention_masks()


def test_the_attention_mask_of_a_split_sample_covers_the_whole_sample() -> None:
    columns_of(mask([1, 1, 1]), overflow="split", budget=2).check_attention_masks()


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([1, 1, 0], "sample 1 has 0 in its 'attention_mask'.* Remove padding.* 'loss_mask'"),
        (torch.tensor([False, True, True]), "sample 1 has 0 in its 'attention_mask'"),
        (torch.tensor([0.0, -1e9, 0.0]), "sample 1 has 0 in its 'attention_mask'"),
        ([1, 2, 1], "sample 1 has 2 in its 'attention_mask'"),
        ([1, 1], "sample 1 was planned with 3 tokens, but its 'attention_mask' has 2"),
        ([[1, 1, 1]], r"sample 1 was planned with 3 tokens, .* shape \[1, 3\]"),
        (1, r"sample 1 was planned with 3 tokens, .* shape \[\]"),
        (None, "sample 1 has None as its 'attention_mask'"),
    ],
)
def test_an_attention_mask_that_hides_tokens_is_refused_by_name(value: Any, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        columns_of(mask([1, 1, 1]), mask(value)).check_attention_masks()
    with pytest.raises(InputError, match=fault):
        columns_of({}, mask(value)).check_attention_masks()


@pytest.mark.parametrize("key", ["loss_mask", "labels", "loss_masking_spans"])
def test_a_key_that_holds_none_is_refused_by_name(key: str) -> None:
    with pytest.raises(InputError, match=f"sample 1 has None as its '{key}'.* Omit the key"):
        columns_of({}, {key: None}).targets({"input_ids", key})


@pytest.mark.parametrize("overflow", ["error", "split"])
def test_tokens_and_extras_that_hold_none_are_refused_by_name(overflow: Any) -> None:
    plan = make_plan([3], Recipe(layout=Packed(max_tokens=3), overflow=overflow))
    if overflow == "split":
        plan = make_plan([3], Recipe(layout=Packed(max_tokens=2), overflow=overflow))
    collator = Collator(extras={"advantages": Extra(aligned="token")})
    good = {"input_ids": [1, 2, 3], "advantages": [0.0, 0.0, 0.0]}
    for key in good:
        with pytest.raises(InputError, match=f"sample 0 has None as its '{key}'"):
            collator(plan[0, 0][0], [{**good, key: None}])


@pytest.mark.parametrize(
    ("value", "shown"), [(["a", "b", "c"], r"\['a', 'b', 'c'\]"), ([1, None, 0], r"\[1, None, 0\]")]
)
def test_a_column_of_no_numbers_is_refused_by_name(value: Any, shown: str) -> None:
    with pytest.raises(InputError, match=f"sample 1 has {shown} as its 'loss_mask'"):
        columns_of({}, {"loss_mask": value}).targets({"loss_mask"})


def test_a_column_of_ragged_lists_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"sample 1 has \[\[1\], \[2, 3\]\] as its 'labels'"):
        columns_of({}, {"labels": [[1], [2, 3]]}).targets({"labels"})
