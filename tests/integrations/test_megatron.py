"""The fields of Megatron's PackedSeqParams."""

import torch

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.integrations.megatron import packed_seq_params
from evenstep.tensors import Collator
from tests.tensors.batches import batch_of


def test_real_and_padded_boundaries_are_both_given() -> None:
    recipe = Recipe(layout=Packed(max_tokens=12, pad_to=12), topology=Topology(cp=2))
    params = packed_seq_params(batch_of([3, 2], recipe))
    assert params["qkv_format"] == "thd"
    for side in ("q", "kv"):
        assert params[f"cu_seqlens_{side}"].tolist() == [0, 3, 5, 5]
        assert params[f"cu_seqlens_{side}_padded"].tolist() == [0, 4, 8, 12]
        assert params[f"max_seqlen_{side}"] == 4
        assert params[f"cu_seqlens_{side}"].dtype == torch.int32


def test_an_empty_micro_batch_counts_its_padding_as_real() -> None:
    plan = make_plan([3], Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2)))
    for rank in (0, 1):
        batch = Collator()(plan[0, rank][0], [{"input_ids": [1, 2, 3]}])
        params = packed_seq_params(batch)
        assert params["cu_seqlens_q"][-1] > 0
        assert params["cu_seqlens_q_padded"][-1] == batch.rows * batch.width
