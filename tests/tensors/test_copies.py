"""What is noted when a batch is copied to a device, so that losses do not wait for the device.

On `meta`, tensors have no values: what is known of them was noted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from evenstep.tensors import Batch, Collator, label_log_probs
from tests.forests import micro_of
from tests.internals import labelled_slots, on_host
from tests.tensors.batches import batch_of


def is_noted(labels: Tensor) -> bool:
    try:
        return bool(labelled_slots(labels).is_meta)
    except (NotImplementedError, RuntimeError):  # meta tensors have no values to look at
        return False


def test_labels_that_are_changed_on_the_device_are_looked_at_again() -> None:
    batch = batch_of([3, 4], "packed")
    moved: Batch = batch.to("meta")
    assert len(labelled_slots(moved.labels)) == int((batch.labels != -100).sum()) == 5
    assert is_noted(moved.labels.flatten())
    assert is_noted(replace(moved, extras={}).labels)
    assert not is_noted(moved.labels[:, 1:])
    assert not is_noted(replace(moved, labels=moved.labels.clone()).labels)
    moved.labels.flatten()[2:4].fill_(-100)
    assert not is_noted(moved.labels)


def test_labels_and_keys_of_shared_prefixes_are_noted() -> None:
    ids = [[1, 2, 3, 4], [1, 2, 3, 5]]
    batch = Collator()(micro_of(ids, range(2)), [{"input_ids": each} for each in ids])
    moved = batch.to("meta")
    assert len(labelled_slots(moved.labels)) == 4
    assert len(labelled_slots(moved.unshared.labels)) == 6
    assert batch.keys is not None
    assert moved.keys is not None
    assert on_host(moved.keys.cu_seqlens).tolist() == batch.keys.cu_seqlens.tolist()


def test_boundaries_are_those_that_were_copied() -> None:
    batch = batch_of([3, 4], "packed")
    moved, before = batch.to("meta"), batch.cu_seqlens.tolist()
    batch.cu_seqlens.fill_(0)  # a buffer that is used again
    assert on_host(moved.cu_seqlens).tolist() == before
    moved.cu_seqlens.add_(1)
    with pytest.raises(NotImplementedError):
        on_host(moved.cu_seqlens)


def test_what_is_noted_stays_in_memory_until_the_stream_has_used_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = batch_of([3, 4], "packed").to("meta")
    kept: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _: kept.append(tensor))
    no_stream: Any = None
    moved.record_stream(no_stream)
    for tensor in (moved.tokens, moved.labels, labelled_slots(moved.labels)):
        assert any(each is tensor for each in kept)


def test_labels_of_inference_mode_have_no_version() -> None:
    hidden, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    labels = torch.tensor([1, -100, 4, 0])
    expected = label_log_probs(hidden @ weight.T, labels)
    with torch.inference_mode():
        found = label_log_probs(hidden, labels.clone(), head=weight)
        moved = batch_of([3, 4], "packed").to("meta")
    torch.testing.assert_close(found.clone(), expected, rtol=0, atol=1e-12)
    assert not is_noted(moved.labels)
