"""NeMo-RL's batches: sharding by its rules on random batches, and where shards differ by design."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.compat.nemo_rl import (
    BatchedDataDict,
    DynamicBatchingArgs,
    PackedTensor,
    PackingAlgorithm,
    SequencePackingArgs,
    SlicedDataDict,
    get_packer,
)
from evenstep.errors import EvenstepError, InputError
from evenstep.tensors import Collator, shard_context

CASES = 500


def batch_of(lengths: Any, width: int) -> BatchedDataDict:
    """Row i holds i + 1 in its tokens, and its number."""
    count = len(lengths)
    ids = torch.zeros(count, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = row + 1
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor(lengths, dtype=torch.long),
            "row": list(range(count)),
        }
    )


def dynamic(budget: int, round_to: int = 1) -> DynamicBatchingArgs:
    return {
        "max_tokens_per_microbatch": budget,
        "sequence_length_round": round_to,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }


def packing(
    budget: int, multiple: int = 1, algorithm: str = "modified_first_fit_decreasing", **more: Any
) -> SequencePackingArgs:
    args = SequencePackingArgs(
        max_tokens_per_microbatch=budget,
        input_key="input_ids",
        input_lengths_key="input_lengths",
        algorithm=algorithm,
        sequence_length_pad_multiple=multiple,
    )
    args.update(more)  # type: ignore[typeddict-item]
    return args


def shards_of(
    batch: BatchedDataDict, *args: Any, **kwargs: Any
) -> tuple[list[SlicedDataDict], list[int]]:
    found = batch.shard_by_batch_size(*args, **kwargs)
    assert isinstance(found, tuple)
    return found


def assert_restored(batch: BatchedDataDict, shards: list[SlicedDataDict], order: list[int]) -> None:
    joined = BatchedDataDict.from_batches(shards)
    assert joined["row"] == order
    joined.reorder_data(order)
    assert joined["row"] == list(range(batch.size))
    assert torch.equal(joined["input_ids"], batch["input_ids"])


# The worked cases --------------------------------------------------------------------------------


def test_dynamic_batching_of_the_document_groups_rows_of_similar_length() -> None:
    """MBS 0 there: rows 2 and 3 at width 7; MBS 1: rows 1, 5, 4 and 0 at width 4."""
    batch = batch_of([2, 4, 7, 6, 3, 4], 7)
    (shard,), order = shards_of(batch, 1, dynamic_batching_args=dynamic(16))
    found = [
        (sorted(micro["row"]), micro["input_ids"].shape[1])
        for micro in shard.make_microbatch_iterator_with_dynamic_shapes()
    ]
    assert found == [([0, 1, 4, 5], 4), ([2, 3], 7)]
    assert shard.get_microbatch_iterator_dynamic_shapes_len() == 2
    assert_restored(batch, [shard], order)


def test_dynamic_batching_cuts_by_the_longest_row_over_the_shards() -> None:
    batch = batch_of([2, 8, 4, 16, 28, 32, 2, 32], 128)
    shards, order = shards_of(batch, 2, dynamic_batching_args=dynamic(32, 4))
    for shard in shards:
        assert shard.micro_batch_indices == [[[0, 2], [2, 3], [3, 4]]]
        assert shard.micro_batch_lengths == [[8, 28, 32]]
    assert_restored(batch, shards, order)


def test_rows_of_a_chunk_are_dealt_in_shares() -> None:
    batch = BatchedDataDict({"x": torch.arange(8)})
    shards: Any = batch.shard_by_batch_size(2, batch_size=4)
    assert [shard["x"].tolist() for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [shard.get_batch(1, batch_size=2)["x"].tolist() for shard in shards] == [[4, 5], [6, 7]]


def test_the_order_is_a_forward_permutation() -> None:
    batch = BatchedDataDict({"x": torch.tensor([30, 0, 20, 10]), "y": [30, 0, 20, 10]})
    batch.reorder_data([3, 0, 2, 1])
    assert batch["x"].tolist() == batch["y"] == [0, 10, 20, 30]


def test_two_rows_on_four_shards_leave_two_empty_with_all_keys() -> None:
    images = PackedTensor([torch.ones(2, 3), torch.ones(1, 3)], dim_to_pack=0)
    batch = BatchedDataDict({**batch_of([3, 4], 5), "pixel_values": images})
    shards: Any = batch.shard_by_batch_size(4, allow_uneven_shards=True)
    assert [shard.size for shard in shards] == [1, 1, 0, 0]
    assert all(shard.keys() == batch.keys() for shard in shards)
    assert shards[3]["pixel_values"].as_tensor() is None


def test_largest_first_orders_the_bins_of_a_shard() -> None:
    lengths = [46, 24, 55, 88, 11, 14, 73, 17]
    by_packer, _ = shards_of(batch_of(lengths, 100), 2, sequence_packing_args=packing(100))
    largest, order = shards_of(
        batch_of(lengths, 100),
        2,
        sequence_packing_args=packing(100, microbatch_order="largest_first"),
    )
    assert [shard.micro_batch_lengths for shard in by_packer] == [[[99, 96]], [[87, 46]]]
    assert [shard.micro_batch_lengths for shard in largest] == [[[99, 96]], [[87, 46]]]
    assert largest[0].get_microbatch_iterator_for_packable_sequences_len() == (2, 99)
    assert_restored(batch_of(lengths, 100), largest, order)
    for name, expected in (("packer", [30, 90, 95, 60]), ("largest_first", [95, 90, 60, 30])):
        args = packing(100, algorithm="concatenative", microbatch_order=name)
        (shard,), order = shards_of(batch_of([30, 90, 95, 60], 100), 1, sequence_packing_args=args)
        assert shard.micro_batch_lengths == [expected]
        assert_restored(batch_of([30, 90, 95, 60], 100), [shard], order)


@pytest.mark.parametrize(
    ("lengths", "multiple", "tokens"),
    [([8, 5, 7], 4, 24), ([12, 3, 8, 1], 1, 24), ([12, 3, 8, 1], 4, 28)],
)
def test_every_length_is_rounded_up_in_a_pack(
    lengths: list[int], multiple: int, tokens: int
) -> None:
    (shard,), _ = shards_of(batch_of(lengths, 12), 1, sequence_packing_args=packing(64, multiple))
    assert shard.micro_batch_lengths == [[tokens]]


def test_a_context_parallel_pack_is_sharded_per_sequence() -> None:
    """The pictures of the document: length 6 alone, then lengths 5, 8, 1 and 3; p is 0."""

    def held(lengths: list[int]) -> list[list[list[int]]]:
        recipe = Recipe(layout=Packed(max_tokens=64), topology=Topology(cp=2), balance="none")
        samples = [{"input_ids": [row + 1] * n} for row, n in enumerate(lengths)]
        batch = Collator()(make_plan(lengths, recipe)[0, 0][0], samples)
        return [shard_context(batch, rank, 2).tokens.tolist() for rank in range(2)]

    assert held([6]) == [[[1, 1, 0, 0]], [[1, 1, 1, 1]]]
    assert held([5, 8, 1, 3]) == [
        [[1, 1, 0, 0, 2, 2, 2, 2, 3, 0, 4, 0]],
        [[1, 1, 1, 0, 2, 2, 2, 2, 0, 0, 4, 4]],
    ]


def test_the_tail_of_a_pack_is_a_sequence_of_its_own() -> None:
    """NeMo-RL extends the last sequence: [0, 3, 8], and rank 0 holds 16-21 of the second row."""
    recipe = Recipe(layout=Packed(max_tokens=8, pad_to=8), balance="none")
    batch = Collator()(
        make_plan([3, 2], recipe)[0, 0][0], [{"input_ids": [1] * 3}, {"input_ids": [2] * 2}]
    )
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    # A target of 4 is an error there; here it takes two packs.
    assert make_plan([3, 2], Recipe(layout=Packed(pad_to=4))).widths.tolist() == [4, 4]
    recipe = Recipe(layout=Packed(pad_to=40), topology=Topology(cp=2), balance="none")
    rows = [{"input_ids": list(range(16))}, {"input_ids": list(range(16, 32))}]
    whole = Collator()(make_plan([16, 16], recipe)[0, 0][0], rows)
    first, second = (shard_context(whole, rank, 2).tokens[0].tolist() for rank in range(2))
    assert first == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 28, 29, 30, 31, 0, 0, 0, 0]
    assert second == [*range(4, 12), *range(20, 28), 0, 0, 0, 0]


# The rules on random batches ---------------------------------------------------------------------


def random_batches(seed: int, even: bool = True) -> list[tuple[list[int], int, int, int]]:
    """(lengths, width, shards, chunk)."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(CASES):
        shards = int(rng.integers(1, 5))
        chunk = int(rng.integers(1, 6)) * (shards if even else 1)
        count = chunk * int(rng.integers(1, 4)) + (0 if even else int(rng.integers(0, chunk)))
        width = int(rng.integers(4, 40))
        found.append((rng.integers(1, width + 1, count).tolist(), width, shards, chunk))
    return found


def dynamic_by_rule(
    lengths: list[int], width: int, shards: int, budget: int, round_to: int
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """(rows of each shard, [start, end] of each micro-batch, widths) of one chunk."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    rows = [order[i::shards] for i in range(shards)]
    spans, widths = [[0, 0]], [0]
    for turn in range(len(rows[0])):
        longest = max(lengths[mine[turn]] for mine in rows)
        rounded = min(-(-longest // round_to) * round_to, width)
        if (spans[-1][1] - spans[-1][0] + 1) * max(widths[-1], rounded) > budget:
            spans.append([turn, turn])
            widths.append(0)
        spans[-1][1] += 1
        widths[-1] = max(widths[-1], rounded)
    return rows, spans, widths


def test_dynamic_batching_follows_the_rule() -> None:
    rng = np.random.default_rng(0)
    for lengths, width, shards, chunk in random_batches(0):
        round_to, budget = int(rng.integers(1, 9)), width + int(rng.integers(0, 60))
        batch = batch_of(lengths, width)
        found, order = shards_of(
            batch, shards, chunk, dynamic_batching_args=dynamic(budget, round_to)
        )
        for at, start in enumerate(range(0, len(lengths), chunk)):
            part = lengths[start : start + chunk]
            rows, spans, widths = dynamic_by_rule(part, width, shards, budget, round_to)
            for shard, mine in zip(found, rows, strict=True):
                chunk_of_shard = shard.get_batch(at)
                assert chunk_of_shard["row"] == [start + row for row in mine]
                assert chunk_of_shard.micro_batch_indices == [spans]
                assert chunk_of_shard.micro_batch_lengths == [widths]
                for micro in chunk_of_shard.make_microbatch_iterator_with_dynamic_shapes():
                    assert micro["input_ids"].numel() <= budget
                    assert (micro["input_lengths"] <= micro["input_ids"].shape[1]).all()
        # The order is by shard, as the shards are joined; NeMo-RL's is by chunk, which restores
        # only a batch of one chunk.
        assert_restored(batch, found, order)


def test_packing_follows_the_rule() -> None:
    rng = np.random.default_rng(1)
    for lengths, width, shards, chunk in random_batches(1):
        multiple = int(rng.integers(1, 9))
        sizes = [-(-n // multiple) * multiple for n in lengths]
        budget = max(sizes) + int(rng.integers(0, 60))
        algorithm = list(PackingAlgorithm)[int(rng.integers(4))]
        batch = batch_of(lengths, width)
        args = packing(budget, multiple, algorithm.value)
        found, order = shards_of(batch, shards, chunk, sequence_packing_args=args)
        packer = get_packer(algorithm, budget, min_bin_count=shards, bin_count_multiple=shards)
        for at, start in enumerate(range(0, len(lengths), chunk)):
            bins = packer.pack(sizes[start : start + chunk])
            for rank, shard in enumerate(found):
                mine = shard.get_batch(at)
                packs = [p["row"] for p in mine.make_microbatch_iterator_for_packable_sequences()]
                assert packs == [[start + row for row in each] for each in bins[rank::shards]]
                filled = [sum(sizes[row] for row in each) for each in packs]
                assert mine.micro_batch_lengths == [filled]
                assert mine.get_microbatch_iterator_for_packable_sequences_len() == (
                    len(bins) // shards,
                    max(filled),
                )
        assert found[0].packing_metrics is not None
        assert found[0].packing_metrics["num_sequences"] == len(lengths)
        assert_restored(batch, found, order)


@pytest.mark.parametrize("kind", ["dynamic", "packing"])
def test_uneven_batches_have_equally_many_micro_batches(kind: str) -> None:
    """NeMo-RL asserts or fails with an IndexError; here a shard gets empty micro-batches."""
    for lengths, width, shards, chunk in random_batches(2, even=False)[:200]:
        batch = batch_of(lengths, width)
        args: Any = (
            {"dynamic_batching_args": dynamic(2 * width)}
            if kind == "dynamic"
            else {"sequence_packing_args": packing(2 * width)}
        )
        found, order = shards_of(batch, shards, chunk, allow_uneven_shards=True, **args)
        for at in range(-(-len(lengths) // chunk)):
            parts = [shard.get_batch(at) for shard in found]
            counts = {len(part.micro_batch_indices[0]) for part in parts}  # type: ignore[index]
            assert len(counts) == 1
            rows = sorted(row for part in parts for row in part["row"])
            assert rows == list(range(at * chunk, min((at + 1) * chunk, len(lengths))))
            for part in parts:
                packs = list(part.make_microbatch_iterator_for_packable_sequences())
                assert [row for pack in packs for row in pack["row"]] == part["row"]
                assert all(pack["input_lengths"].sum() <= 2 * width for pack in packs)
        assert_restored(batch, found, order)


def test_rows_of_length_0_are_batched_at_the_least_width() -> None:
    (shard,), _ = shards_of(batch_of([0, 0, 5], 8), 1, dynamic_batching_args=dynamic(8, 4))
    assert shard.micro_batch_lengths == [[4, 8]]


def test_an_uneven_chunk_of_plain_shards_is_found_again() -> None:
    batch = BatchedDataDict({"x": torch.arange(7)})
    shards: Any = batch.shard_by_batch_size(2, batch_size=4, allow_uneven_shards=True)
    assert [shard["x"].tolist() for shard in shards] == [[0, 1, 4, 5], [2, 3, 6]]
    assert [shard.get_batch(1)["x"].tolist() for shard in shards] == [[4, 5], [6]]
    five: Any = BatchedDataDict({"x": torch.arange(5)}).shard_by_batch_size(
        2, allow_uneven_shards=True
    )
    assert [shard["x"].tolist() for shard in five] == [[0, 1, 2], [3, 4]]


# Errors ------------------------------------------------------------------------------------------


def test_the_budget_is_hard() -> None:
    batch = batch_of([4, 9, 4, 4], 12)
    with pytest.raises(InputError, match=r"row 1 has length 9, 12 when rounded up .* holds 10"):
        batch.shard_by_batch_size(2, dynamic_batching_args=dynamic(10, 4))
    with pytest.raises(InputError, match="length 12 but a bin holds 10"):
        batch.shard_by_batch_size(2, sequence_packing_args=packing(10, 4))


def test_rounding_stops_at_the_width_of_the_tensor() -> None:
    (shard,), _ = shards_of(batch_of([9, 3], 10), 1, dynamic_batching_args=dynamic(10, 8))
    assert shard.micro_batch_lengths == [[8, 10]]


def test_batches_that_do_not_fit_are_assertion_errors_as_there() -> None:
    batch = batch_of([1] * 10, 4)
    cases: list[tuple[str, Any]] = [
        ("Total batch size .* is not a multiple of batch_size", {"batch_size": 3}),
        ("Batch size .* is not a multiple of shards", {"batch_size": 5}),
        (
            "cannot be passed together",
            {"dynamic_batching_args": dynamic(8), "sequence_packing_args": packing(8)},
        ),
    ]
    for match, options in cases:
        with pytest.raises(AssertionError, match=match) as caught:
            batch.shard_by_batch_size(2, **options)
        assert isinstance(caught.value, EvenstepError)
    uneven = BatchedDataDict({"a": torch.arange(4), "b": [1, 2, 3]})
    with pytest.raises(AssertionError, match="Batch sizes are not the same"):
        uneven.shard_by_batch_size(2)
    with pytest.raises(AssertionError, match="Batch sizes are not the same"):
        uneven.reorder_data([0, 1, 2, 3])


def test_wrong_arguments_are_value_errors() -> None:
    batch = batch_of([3, 4], 8)
    for args in (
        packing(8, microbatch_order="smallest"),
        packing(8, algorithm="best"),
        packing(0),
        packing(8, 0),
    ):
        with pytest.raises(ValueError, match=r"must be|unknown"):
            batch.shard_by_batch_size(1, sequence_packing_args=args)
    with pytest.raises(InputError, match="no permutation"):
        batch.reorder_data([0, 0])


def test_iterators_want_one_chunk() -> None:
    batch = batch_of([3, 4, 2, 2], 8)
    with pytest.raises(AssertionError, match="needs one chunk, got 0"):
        list(batch.make_microbatch_iterator_for_packable_sequences())
    shards, _ = shards_of(batch, 1, 2, sequence_packing_args=packing(8))
    with pytest.raises(AssertionError, match="needs one chunk, got 2"):
        list(shards[0].make_microbatch_iterator_with_dynamic_shapes())
    with pytest.raises(AssertionError, match="get_batch needs batch_size"):
        batch.get_batch(0)


def test_a_tensor_without_the_sequence_dimension_is_named() -> None:
    batch = BatchedDataDict({**batch_of([5, 6], 8), "scores": torch.zeros(2, 3)})
    (shard,), _ = shards_of(batch, 1, dynamic_batching_args=dynamic(16))
    with pytest.raises(InputError, match="scores has 3 entries along dimension 1"):
        list(shard.make_microbatch_iterator_with_dynamic_shapes())


# Parts of a batch --------------------------------------------------------------------------------


def test_parts_of_a_batch() -> None:
    batch = batch_of([1, 2, 3, 4], 6)
    assert batch.chunk(1, 2)["row"] == [2, 3]
    assert BatchedDataDict({"x": [5, 6]}).chunk(1, 2)["x"] == [6]  # refused there
    assert batch.slice(1, 3)["input_lengths"].tolist() == [2, 3]
    assert batch.select_indices([3, 0])["row"] == [3, 0]
    assert batch.select_indices(torch.tensor([2]))["row"] == [2]
    assert [micro["row"] for micro in batch.make_microbatch_iterator(2)] == [[0, 1], [2, 3]]
    assert batch.repeat_interleave(2)["row"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.size == 4
    assert BatchedDataDict().size == 0
    assert isinstance(batch.chunk(0, 4), SlicedDataDict)
    for call in (
        lambda: batch.chunk(0, 3),
        lambda: batch.slice(2, 5),
        lambda: list(batch.make_microbatch_iterator(3)),
    ):
        with pytest.raises(AssertionError):
            call()


def test_joining_pads_the_second_dimension() -> None:
    parts = [
        {"ids": torch.ones(1, 2), "top": torch.ones(1, 2, 3), "name": ["a"]},
        {"ids": torch.ones(2, 3), "top": torch.ones(2, 3, 3), "name": ["b", "c"]},
    ]
    joined = BatchedDataDict.from_batches(parts, pad_value_dict={"ids": 7})
    assert joined["ids"].tolist() == [[1, 1, 7], [1, 1, 1], [1, 1, 1]]
    assert joined["top"].shape == (3, 3, 3)
    assert joined["top"][0, 2].tolist() == [0, 0, 0]
    assert joined["name"] == ["a", "b", "c"]
    with pytest.raises(KeyError, match="'top' is missing from non-empty batches"):
        BatchedDataDict.from_batches([parts[0], {"ids": torch.ones(1, 2), "name": ["d"]}])
    wrong: Any = [{"x": 3.0}]
    with pytest.raises(InputError, match="expected a tensor, a PackedTensor or a list, got"):
        BatchedDataDict.from_batches(wrong)


def test_shards_and_media_travel_between_processes() -> None:
    images = PackedTensor([torch.ones(n, 2) for n in (1, 2, 3, 4)], dim_to_pack=0)
    batch = BatchedDataDict({**batch_of([3, 4, 5, 6], 8), "pixel_values": images})
    shards, _ = shards_of(batch, 2, sequence_packing_args=packing(12))
    sent = pickle.loads(pickle.dumps(shards[1]))
    assert sent.micro_batch_indices == shards[1].micro_batch_indices
    assert len(sent["pixel_values"]) == sent.size
    media = sent["pixel_values"].as_tensor()
    assert media.shape[0] == sum(row + 1 for row in sent["row"])


def test_media_rows_are_kept_apart_and_shared_once() -> None:
    rows = PackedTensor([torch.ones(2, 3), None, torch.zeros(1, 3)], dim_to_pack=0)
    assert len(rows) == 3
    assert rows.logical_segment_counts_by_row() == [1, 0, 1]
    assert rows.slice([1]).as_tensor() is None
    tensor = rows.slice([2, 0]).as_tensor()
    assert tensor is not None
    assert tensor[:, 0].tolist() == [0, 1, 1]
    apart = copy.deepcopy(rows)
    assert apart.tensors[0] is not rows.tensors[0]
    shared = PackedTensor.concat([rows.enable_deduplication()] * 3)
    assert (len(shared), len(shared.tensors)) == (9, 2)
    assert copy.deepcopy(shared).tensors[0] is shared.tensors[0]
    assert PackedTensor.merge_segments([rows, rows]).logical_segment_counts_by_row() == [4]
    nothing: Any = []
    with pytest.raises(InputError, match="needs a tensor or a list"):
        PackedTensor(nothing)
    with pytest.raises(InputError, match="packed along"):
        PackedTensor.concat([rows, PackedTensor(torch.ones(1), dim_to_pack=1)])


def test_media_are_returned_by_key() -> None:
    pixels = PackedTensor([torch.ones(2, 3), torch.ones(1, 3)], dim_to_pack=0)
    kinds = torch.zeros(2, 4, dtype=torch.long)
    batch = BatchedDataDict({"pixel_values": pixels, "token_type_ids": kinds, "row": [0, 1]})
    assert batch.get_multimodal_dict()["pixel_values"] is pixels
    found = batch.get_multimodal_dict(as_tensors=True, pixel_dtype=torch.bfloat16)
    assert found["pixel_values"].dtype == torch.bfloat16
    assert set(found) == {"pixel_values", "token_type_ids"}
    assert batch.to("cpu") is batch
