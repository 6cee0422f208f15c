"""NeMo-RL's loss wrappers: packed logits give the losses and gradients of single sequences."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.compat.nemo_rl import (
    SequencePackingFusionLossWrapper,
    SequencePackingLossWrapper,
)
from evenstep.integrations.megatron import packed_seq_params
from evenstep.tensors import Collator
from tests.compat.nemo_losses import (
    VOCAB,
    loss_fn,
    offsets,
    on_context_ranks,
    one_by_one,
    packed_logits,
    prepare,
    random_data,
)
from tests.examples import examples
from tests.train.processes import results_of


@examples(60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.sampled_from([1, 4]),
    st.integers(0, 6),
    st.booleans(),
    st.integers(0, 99),
)
def test_losses_and_gradients_are_those_of_single_sequences(
    lengths: list[int], multiple: int, tail: int, as_tensor: bool, seed: int
) -> None:
    """Also with padded boundaries, and with a last sequence that holds the tail of the pack."""
    data = random_data(lengths, 9, seed)
    made = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lengths), 9, VOCAB, generator=made, dtype=torch.float64)
    alone, together = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected, every = one_by_one(alone, data, lengths)
    expected.backward() if every else None

    real = offsets(lengths)
    padded = offsets([-(-length // multiple) * multiple for length in lengths])
    padded[-1] += tail
    bounds = (torch.tensor(real), torch.tensor(padded)) if as_tensor else (real, padded)
    wrapper = SequencePackingLossWrapper(loss_fn, prepare, *bounds)
    loss, metrics = wrapper(
        packed_logits(together, lengths, padded), data, torch.tensor(3.0), torch.tensor(11.0)
    )
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.zeros_like(logits) if alone.grad is None else alone.grad
    torch.testing.assert_close(together.grad, gradient, rtol=1e-12, atol=1e-12)
    if every:
        assert metrics["tokens"] == pytest.approx(sum(float(each["tokens"]) for each in every))
        assert metrics["sequences"] == len(every)
        assert metrics["probs_ratio_min"] == min(float(e["probs_ratio_min"]) for e in every)
        largest = max(each["probs_ratio_clamped_max"] for each in every)
        assert metrics["probs_ratio_clamped_max"] == largest
    else:
        assert metrics == {}


def test_a_batch_s_own_boundaries_are_taken_with_the_tail_as_a_sequence() -> None:
    lengths = [5, 3, 6]
    recipe = Recipe(
        layout=Packed(max_tokens=40, pad_to=40), topology=Topology(cp=2), balance="none"
    )
    data = random_data(lengths, 6, 0)
    samples = [{"input_ids": data["input_ids"][row, :n]} for row, n in enumerate(lengths)]
    fields = packed_seq_params(Collator()(make_plan(lengths, recipe)[0, 0][0], samples))
    assert fields["cu_seqlens_q"].tolist() == [0, 5, 8, 14, 14]
    assert fields["cu_seqlens_q_padded"].tolist() == [0, 8, 12, 20, 40]
    logits = torch.randn(3, 6, VOCAB, dtype=torch.float64)
    wrapper = SequencePackingLossWrapper(
        loss_fn, prepare, fields["cu_seqlens_q"], fields["cu_seqlens_q_padded"]
    )
    packed = packed_logits(logits, lengths, fields["cu_seqlens_q_padded"].tolist())
    loss, metrics = wrapper(packed, data, torch.tensor(3.0), torch.tensor(11.0))
    expected, _ = one_by_one(logits, data, lengths)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert metrics["sequences"] == 3


def prepare_packed(
    logits: Tensor, data: Any, loss_fn: Any, cu_seqlens_q: Any, cu_seqlens_q_padded: Any, **_: Any
) -> tuple[dict[str, Any], Any]:
    """Log-probs of all sequences at once, unpacked to the rows of `data`; 0 in the padding."""
    log_probs = torch.zeros(data["input_ids"][:, 1:].shape, dtype=logits.dtype)
    for row, (start, end) in enumerate(pairwise(cu_seqlens_q)):
        first, length = cu_seqlens_q_padded[row], end - start
        own = logits[0, first : first + length - 1].log_softmax(-1)
        targets = data["input_ids"][row, 1:length]
        log_probs[row, : length - 1] = own.gather(1, targets[:, None])[:, 0]
    return {"log_probs": log_probs}, data


def token_loss(
    log_probs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    loss = -(log_probs * mask).sum() / global_valid_toks
    return loss, {"loss": loss.item()}


def test_the_fused_wrapper_gives_the_same_loss_and_gradient() -> None:
    lengths, padded = [5, 1, 6], [0, 8, 12, 20]
    data = random_data(lengths, 6, 1)
    logits = torch.randn(3, 6, VOCAB, dtype=torch.float64)
    found = []
    for kind, prepared in (
        (SequencePackingLossWrapper, prepare),
        (SequencePackingFusionLossWrapper, prepare_packed),
    ):
        leaf = logits.clone().requires_grad_()
        wrapper = kind(token_loss, prepared, offsets(lengths), padded)
        loss, metrics = wrapper(
            packed_logits(leaf, lengths, padded), data, torch.tensor(3.0), torch.tensor(11.0)
        )
        loss.backward()
        found.append((loss, leaf.grad, metrics["loss"]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_context_parallel_ranks_give_the_same_loss_and_gradient(tmp_path: Path) -> None:
    lengths, seed = [7, 3, 8, 1], 5
    data = random_data(lengths, max(lengths), seed)
    made = torch.Generator().manual_seed(seed)
    leaf = torch.randn(len(lengths), max(lengths), VOCAB, generator=made, dtype=torch.float64)
    leaf.requires_grad_()
    expected, every = one_by_one(leaf, data, lengths)
    expected.backward()
    for loss, gradient, metrics in results_of(2, on_context_ranks, tmp_path, lengths, seed):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-12)
        assert metrics["sequences"] == len(every)
