"""VeOmni's dynamic batching and collators: its documented examples, its rules, and what is ours."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenstep.compat.veomni import (
    DataCollateInfo,
    DynamicBatchingSizeDataset,
    DynamicBatchSizeDataLoader,
    MainCollator,
    TextBatchingStrategy,
    build_dataloader,
    get_length_by_attention_mask_fn,
    get_length_by_input_ids_fn,
    get_length_by_labels_fn,
    get_length_fn_by_count_mode,
)
from evenstep.errors import ConfigError, InputError
from evenstep.testing import assert_exact_resume
from tests.internals import collator, loader

A, B, C, D, E, F, G, H, K, J = range(1, 11)
DOCUMENT = ([A, B, C, D], [E, F], [G, H, K], [J])


def features(*ids: list[int]) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.tensor(i), "labels": torch.tensor(i)} for i in ids]


def sample(length: int, name: int, effective: int | None = None) -> dict[str, Any]:
    labels = [name] * length
    if effective is not None:
        labels = [name] * effective + [-100] * (length - effective)
    found = {"input_ids": [name] * length, "attention_mask": [1] * length, "labels": labels}
    return {key: torch.tensor(value) for key, value in found.items()}


def names(batch: list[dict[str, Any]]) -> list[int]:
    return [int(one["input_ids"][0]) for one in batch]


def parallel(monkeypatch: pytest.MonkeyPatch, size: int, rank: int, enabled: bool = True) -> None:
    state = SimpleNamespace(sp_enabled=enabled, sp_size=size, sp_rank=rank, dp_size=1, dp_rank=0)
    for module in (collator, loader):
        monkeypatch.setattr(module, "get_parallel_state", lambda: state)


class TestDocument:
    def test_a_budget_of_ten_packs_all_four_samples(self) -> None:
        sizes = {"micro_batch_size": 2, "global_batch_size": 2, "max_seq_len": 5, "train_steps": 1}
        data = [{**one, "attention_mask": torch.ones(len(one["input_ids"]))}
                for one in features(*DOCUMENT)]  # fmt: skip
        ((row,),) = build_dataloader(dataset=data, **sizes, shuffle=False, dyn_bsz_buffer_size=4)  # type: ignore[arg-type]
        assert row["input_ids"].tolist() == [[A, B, C, D, E, F, G, H, K, J]]
        assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 0]]
        assert "tail_padding_length" not in row

    def test_without_dynamic_batching_two_samples_form_a_micro_batch_in_order(self) -> None:
        steps = build_dataloader(
            dataset=features(*DOCUMENT), micro_batch_size=2, global_batch_size=4, max_seq_len=5,
            train_steps=1, dyn_bsz=False, shuffle=False,
        )  # fmt: skip
        ((first, second),) = steps
        assert first["input_ids"].tolist() == [[A, B, C, D, E, F]]
        assert first["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
        assert second["input_ids"].tolist() == [[G, H, K, J]]
        assert second["position_ids"].tolist() == [[0, 1, 2, 0]]

    @pytest.mark.parametrize(
        ("ids", "width", "positions", "cu_seqlens"),
        [
            ([[A, B, C, D], [E, F]], 8, [0, 1, 2, 3, 0, 1, 0, 1], [0, 4, 6, 8]),
            (
                [[A, B, C], [D, E], [F, G]],
                10,
                [0, 1, 2, 0, 1, 0, 1, 0, 1, 2],
                [0, 3, 5, 7, 10],
            ),
            # The document's third example contradicts itself: E is a sequence of its own.
            ([[A, B, C, D], [E]], 8, [0, 1, 2, 3, 0, 0, 1, 2], [0, 4, 5, 8]),
        ],
    )
    def test_padded_rows(
        self, ids: list[list[int]], width: int, positions: list[int], cu_seqlens: list[int]
    ) -> None:
        row = MainCollator(pad_to_length=width)(features(*ids))
        tokens = [i for one in ids for i in one]
        tail = width - len(tokens)
        assert row["input_ids"].tolist() == [tokens + [0] * tail]
        assert row["position_ids"].tolist() == [positions]
        assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == cu_seqlens
        assert row["linear_attn_cu_seq_lens_q"].tolist() == cu_seqlens
        assert row["labels"][0, -tail:].tolist() == [-100] * tail
        assert row["tail_padding_length"].item() == tail
        assert row["tail_padding_length"].dtype == row["cu_seq_lens_q"].dtype == torch.int32
        longest = max(np.diff(cu_seqlens))
        assert row["max_length_q"] == row["max_length_k"] == longest

    def test_the_padded_length_is_that_of_the_budget(self) -> None:
        data = [sample(n, n) for n in (4, 1, 3, 2)]
        steps = build_dataloader(
            dataset=data, micro_batch_size=2, global_batch_size=2, max_seq_len=4, train_steps=3,
            pad_to_length=True, dyn_bsz_buffer_size=2,
        )  # fmt: skip
        assert all(row["input_ids"].shape == (1, 8) for step in steps for row in step)

    def test_padding_without_a_token_budget_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="pad_to_length needs dyn_bsz"):
            build_dataloader(
                dataset=[], micro_batch_size=1, global_batch_size=1, max_seq_len=4, train_steps=1,
                dyn_bsz=False, pad_to_length=True,
            )  # fmt: skip

    @pytest.mark.parametrize("change", [{"dyn_bsz": False}, {"dyn_bsz_runtime": "worker"}])
    def test_a_warm_up_without_effect_is_a_warning(self, change: Any) -> None:
        with pytest.warns(UserWarning, match="bsz_warmup_ratio has no effect"):
            build_dataloader(
                dataset=[sample(1, 1)], micro_batch_size=1, global_batch_size=1, max_seq_len=4,
                train_steps=9, bsz_warmup_ratio=0.5, **change,
            )  # fmt: skip


class TestCollator:
    LABELLED = (
        {"input_ids": torch.tensor([11, 12, 13]), "labels": torch.tensor([2, 3, 4])},
        {"input_ids": torch.tensor([21, 22]), "labels": torch.tensor([1, 2])},
    )

    def test_two_samples_in_a_row_of_eight(self) -> None:
        row = MainCollator(pad_to_length=8)(self.LABELLED)
        assert row["input_ids"].tolist() == [[11, 12, 13, 21, 22, 0, 0, 0]]
        assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]  # ours: they count up
        assert row["labels"].tolist() == [[2, 3, 4, -100, 2, -100, -100, -100]]
        assert row["attention_mask"].tolist() == [[1] * 8]
        assert row["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]
        assert (row["max_length_q"], row["tail_padding_length"].item()) == (3, 3)

    @pytest.mark.parametrize(
        ("rank", "ids", "labels", "positions"),
        [
            (0, [11, 12, 13, 21], [3, 4, -100, 2], [0, 1, 2, 0]),
            (1, [22, 0, 0, 0], [-100] * 4, [1, 0, 1, 2]),
        ],
    )
    def test_two_sequence_parallel_ranks(
        self, monkeypatch: Any, rank: int, ids: Any, labels: Any, positions: Any
    ) -> None:
        parallel(monkeypatch, 2, rank)
        row = MainCollator(pad_to_length=8)(self.LABELLED)
        assert row["input_ids"].tolist() == [ids]
        assert row["labels"].tolist() == [labels]
        assert row["position_ids"].tolist() == [positions]
        assert row["attention_mask"].shape == (1, 8)
        assert row["cu_seq_lens_q"].tolist() == [0, 3, 5, 8]

    def test_a_row_pads_itself_for_sequence_parallel_ranks(self, monkeypatch: Any) -> None:
        parts = []
        for rank in range(4):
            parallel(monkeypatch, 4, rank)
            parts.append(MainCollator()(self.LABELLED))
        joined = torch.cat([part["input_ids"] for part in parts], 1)
        assert joined.tolist() == [[11, 12, 13, 21, 22, 0, 0, 0]]
        labels = torch.cat([part["labels"] for part in parts], 1)
        assert labels.tolist() == [[3, 4, -100, 2, -100, -100, -100, -100]]
        assert parts[0]["tail_padding_length"].item() == 3

    def test_features_are_not_changed(self) -> None:
        given = [dict(one) for one in self.LABELLED]
        before = copy.deepcopy(given)
        MainCollator(pad_to_length=8)(given)
        for one, other in zip(given, before, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in other)

    @pytest.mark.parametrize("enabled", [False, True])
    def test_labels_of_classes_are_one_per_sample(self, monkeypatch: Any, enabled: bool) -> None:
        parallel(monkeypatch, 1, 0, enabled)
        given = [{**one, "labels": torch.tensor([n])} for n, one in enumerate(self.LABELLED, 1)]
        row = MainCollator(seq_classification=True)(given)
        assert row["labels"].tolist() == [[1, 2]]
        assert row["cu_seq_lens_q"].tolist() == [0, 3, 5]

    def test_a_real_sequence_of_one_token_is_not_padding(self) -> None:
        row = MainCollator(pad_to_length=4)(features([5], [6]))
        assert row["cu_seq_lens_q"].tolist() == [0, 1, 2, 4]
        assert row["tail_padding_length"].item() == 2

    def test_a_feature_may_hold_several_sequences(self) -> None:
        packed = {
            "input_ids": torch.tensor([1, 2, 3, 4]),
            "labels": torch.tensor([1, 2, 3, 4]),
            "position_ids": torch.tensor([0, 1, 0, 1]),
        }
        row = MainCollator()([packed])
        assert row["cu_seq_lens_q"].tolist() == [0, 2, 4]
        assert row["labels"].tolist() == [[1, 2, -100, 4]]

    def test_images_and_their_positions(self, monkeypatch: Any) -> None:
        given = [
            {
                "input_ids": torch.arange(n),
                "labels": torch.arange(n),
                "position_ids": torch.arange(n).expand(3, n),
                "image_mask": torch.arange(n) == 1,
                "pixel_values": torch.full((n, 2), float(n)),
                "image_grid_thw": torch.tensor([[1, n, 1]]),
                "image_sizes": torch.zeros(1, n),
                "id": torch.tensor(n),
            }
            for n in (3, 2)
        ]
        row = MainCollator(pad_to_length=8)(given)
        assert row["position_ids"].shape == (1, 3, 8)
        assert row["position_ids"][0, 2].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
        assert row["image_mask"].tolist() == [[False, True, False, False, True, *[False] * 3]]
        assert row["pixel_values"].shape == (5, 2)
        assert row["image_grid_thw"].tolist() == [[1, 3, 1], [1, 2, 1]]
        assert isinstance(row["image_sizes"], list)  # of different shapes
        assert row["id"].tolist() == [3, 2]
        parallel(monkeypatch, 2, 1)
        pads: dict[str, int] = {}
        shard = MainCollator(metadata_collate_func=lambda batch, found: pads.update(found))(given)
        assert shard["pixel_values"].tolist() == [[2.0, 2.0], *[[0.0, 0.0]] * 3]  # 4 of 8
        assert pads == {"pixel_values": 3, "pixel_values_videos": 0}
        assert shard["position_ids"].shape == (1, 3, 3)

    def test_further_keys_can_be_declared(self) -> None:
        info = {"weights": (-1, False, 7, 1), "tags": {"pack_dim": 0}}
        given = [
            {"input_ids": torch.ones(n), "weights": torch.ones(n), "tags": torch.ones(1)}
            for n in (1, 2)
        ]
        given = [{**one, "input_ids": one["input_ids"].long()} for one in given]
        row = MainCollator(data_collate_info=info, pad_to_length=4)(given)
        assert row["weights"].tolist() == [[1, 1, 1, 7]]
        assert row["tags"].tolist() == [1, 1]
        assert MainCollator(data_collate_info={"x": DataCollateInfo(0)}).collate_infos["x"] == (
            0, False, None, 1,
        )  # fmt: skip

    def test_more_tokens_than_the_padded_length_are_refused(self) -> None:
        with pytest.raises(InputError, match="5 tokens, more than pad_to_length=4"):
            MainCollator(pad_to_length=4)(self.LABELLED)
        with pytest.raises(InputError, match="features with 'input_ids'"):
            MainCollator()([])


def test_samples_are_counted_by_tokens_or_by_labels() -> None:
    one = sample(5, 7, effective=3)
    assert get_length_by_attention_mask_fn(one) == get_length_by_input_ids_fn(one) == 5
    assert get_length_by_labels_fn(one) == 3
    assert get_length_fn_by_count_mode("effective")(one) == 3
    assert get_length_by_labels_fn({"input_ids": np.arange(4)}) == 4
    assert get_length_by_labels_fn([one, one]) == 6
    others: list[Any] = [None, "raw", {}]
    assert [get_length_by_labels_fn(x) for x in others] == [0, 1, 1]
    with pytest.raises(ConfigError, match="Unknown dyn_bsz count_mode 'labels'"):
        get_length_fn_by_count_mode("labels")


# The rules of the buffer ------------------------------------------------------------------------


def by_rule(
    items: list[tuple[int, int]], budget: int, threshold: int, cap: int | None
) -> list[list[int]]:
    """Micro-batches of (counted, physical) lengths, by index."""
    waiting, found = list[int](), []

    def take() -> list[int]:
        batch, counted, physical = [waiting[0]], *items[waiting[0]]
        for i in waiting[1:]:
            if counted >= budget:
                break
            more, all_of_it = items[i]
            if counted + more <= budget and (cap is None or physical + all_of_it <= cap):
                batch.append(i)
                counted, physical = counted + more, physical + all_of_it
        waiting[:] = [i for i in waiting if i not in batch]
        return batch

    for i in range(len(items)):
        waiting.append(i)
        enough = sum(items[j][0] for j in waiting) >= budget or (
            cap is not None and sum(items[j][1] for j in waiting) >= cap
        )
        if len(waiting) >= threshold and enough:
            found.append(take())
    while waiting:
        found.append(take())
    return found


def check_buffers(cases: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(cases):
        budget, threshold = draw.randint(1, 30), draw.randint(1, 8)
        physical = [draw.randint(1, 30) for _ in range(draw.randint(1, 25))]
        effective = draw.random() < 0.5
        items = [(draw.randint(0, p) if effective else p, p) for p in physical]
        cap = draw.randint(budget, 2 * budget) if effective else None
        data = [sample(p, n + 1, c) for n, (c, p) in enumerate(items)]
        dataset = DynamicBatchingSizeDataset(
            data, budget, threshold, list, save_by_idx=False, physical_token_cap=cap,
            get_length_fn=get_length_fn_by_count_mode("effective" if effective else "total"),
            force_generate_long_sequence=True,
        )  # fmt: skip
        found = [[i - 1 for i in names(batch)] for batch in dataset]
        assert found == by_rule(items, budget, threshold, cap)
        for batch in found:  # ours: the cap also holds after a sample without labels
            tokens = sum(physical[i] for i in batch)
            assert len(batch) == 1 or cap is None or tokens <= cap


def test_hundreds_of_random_buffers_follow_the_rules() -> None:
    check_buffers(300, seed=1)


@pytest.mark.slow
def test_thousands_of_random_buffers_follow_the_rules() -> None:
    check_buffers(5000, seed=2)


class TestDataset:
    def make(self, lengths: Any = range(1, 51), **options: Any) -> DynamicBatchingSizeDataset:
        data = [sample(n, n) for n in lengths]
        return DynamicBatchingSizeDataset(data, 32, 10, list, save_by_idx=False, **options)

    def test_growing_lengths_at_budget_32(self) -> None:
        dataset = self.make()
        with pytest.warns(UserWarning, match="dropping samples over micro_batch_seq_length=32"):
            found = [names(batch) for batch in dataset]
        assert found[:5] == [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12], [13, 14], [15, 16]]
        assert dataset.dropped == 18
        assert sorted(i for batch in found for i in batch) == list(range(1, 33))

    def test_a_long_sample_can_be_a_micro_batch_of_its_own(self) -> None:
        dataset = self.make([40, 1, 2], force_generate_long_sequence=True)
        assert [names(batch) for batch in dataset] == [[40], [1, 2]]

    def test_labels_can_fill_the_budget_within_a_physical_cap(self) -> None:
        data = [sample(6, 1, 2), sample(6, 2, 2), sample(2, 3, 2)]
        counted: Any = {"get_length_fn": get_length_by_labels_fn, "save_by_idx": False}
        dataset = DynamicBatchingSizeDataset(data, 4, 1, list, physical_token_cap=8, **counted)
        assert [names(batch) for batch in dataset] == [[1], [2, 3]]
        data = [sample(3, n, 2) for n in (1, 2, 3)]
        dataset = DynamicBatchingSizeDataset(data, 4, 1, list, physical_token_cap=6, **counted)
        assert [names(batch) for batch in dataset] == [[1, 2], [3]]

    def test_it_resumes_exactly_from_samples(self) -> None:
        assert_exact_resume(lambda: self.make(range(1, 30)), key=names)

    def test_it_resumes_exactly_by_index_and_with_the_state_of_its_dataset(self) -> None:
        def make() -> DynamicBatchingSizeDataset:
            return DynamicBatchingSizeDataset(Indexed(), 32, 5, list)

        assert_exact_resume(make, key=names)
        assert make().state_dict()["save_by_idx"]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_stateful_loader_resumes_exactly(self, workers: int) -> None:
        def make() -> Any:
            dataset = DynamicBatchingSizeDataset(Indexed(), 32, 5, list)
            return StatefulDataLoader(dataset, batch_size=2, num_workers=workers, collate_fn=list)

        whole = [[names(batch) for batch in item] for item in make()]
        first = make()
        taken = []
        for item in first:
            taken.append([names(batch) for batch in item])
            if len(taken) == 2:
                state = first.state_dict()
                break
        second = make()
        second.load_state_dict(state)
        assert taken + [[names(batch) for batch in item] for item in second] == whole

    def test_what_it_cannot_do_is_refused(self) -> None:
        with pytest.raises(ValueError, match="does not have get_item method"):
            DynamicBatchingSizeDataset([], 32, 10, list)
        empty = {"attention_mask": torch.zeros(0), "input_ids": torch.zeros(0)}
        with pytest.raises(InputError, match="a sample has 0 tokens"):
            list(DynamicBatchingSizeDataset([empty], 32, 1, list, save_by_idx=False))
        state = self.make(range(1, 20)).state_dict()
        with pytest.raises(InputError, match="taken with save_by_idx=False"):
            DynamicBatchingSizeDataset(Indexed(), 32, 5, list).load_state_dict(state)
        with pytest.raises(InputError, match="so the data has changed"):
            self.make().load_state_dict({**state, "buffer_token_count": 3})


class Indexed(IterableDataset):  # type: ignore[misc]
    """As VeOmni's: resumes by itself and names its samples; an item is two samples."""

    def __init__(self) -> None:
        self.output_index_for_resume, self.at, self.resumed = False, 0, False

    def get_item(self, index: int) -> Any:
        return [sample(1 + index * 7 % 19, index + 1), sample(2, index + 101)]

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self.at, self.resumed = (self.at if self.resumed else number), False
        while self.at < 40:
            index, self.at = self.at, self.at + workers
            item = self.get_item(index)
            yield (item, index) if self.output_index_for_resume else item

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumed = state["at"], True


class TestStrategy:
    def test_the_budget_warms_up(self) -> None:
        strategy = TextBatchingStrategy(
            10, buffer_size=1, bsz_warmup_steps=4, bsz_warmup_init_mbtoken=2
        )
        for n in range(60):
            strategy.put_item(sample(1, n + 1))
        sizes = [len(strategy.get_micro_batch(step)) for step in range(6)]
        assert sizes == [2, 4, 6, 8, 10, 10]
        assert strategy.buffer.all_token_cnt == 20
        assert not strategy.empty()

    @given(st.integers(1, 300), st.integers(0, 9), st.integers(1, 200), st.integers(0, 12))
    def test_the_current_budget_grows_in_a_line(
        self, full: int, steps: int, first: int, step: int
    ) -> None:
        strategy = TextBatchingStrategy(
            full, buffer_size=1, bsz_warmup_steps=steps, bsz_warmup_init_mbtoken=first
        )
        begin = min(first, full) if steps else full
        assert strategy.get_cur_token_micro_bsz() == begin
        strategy.put_item(sample(1, 1))
        strategy.get_micro_batch(step)
        grown = begin + (full - begin) * step // steps if step < steps else full
        assert strategy.get_cur_token_micro_bsz() == grown

    def test_one_token_samples_are_kept(self) -> None:
        strategy = TextBatchingStrategy(4, buffer_size=1)
        strategy.put_item(sample(1, 5))
        assert names(strategy.get_micro_batch(0)) == [5]
        with pytest.raises(InputError, match="no tokens"):
            strategy.put_item({"input_ids": []})

    def test_a_long_sample_is_emitted_alone(self) -> None:
        strategy = TextBatchingStrategy(4, buffer_size=1)
        for length in (6, 1):
            strategy.put_item(sample(length, length))
        assert [names(strategy.get_micro_batch(0)) for _ in range(2)] == [[6], [1]]

    def test_the_physical_cap_makes_it_ready_and_limits_it(self) -> None:
        strategy = TextBatchingStrategy(
            4, buffer_size=1, get_length_fn=get_length_by_labels_fn, physical_token_cap=8,
            get_physical_length_fn=get_length_by_attention_mask_fn,
        )  # fmt: skip
        for one in (sample(6, 1, 1), sample(6, 2, 1), sample(2, 3, 1)):
            strategy.put_item(one)
        assert strategy.is_ready_for_micro_batch()  # 14 tokens, but 3 labels
        assert names(strategy.get_micro_batch(0)) == [1, 3]
        assert (strategy.buffer.all_token_cnt, strategy.buffer.all_physical_token_cnt) == (1, 6)


class TestLoader:
    def make(self, **options: Any) -> DynamicBatchSizeDataLoader:
        data = [sample(1 + n * 7 % 9, n + 1) for n in range(20)]
        strategy = TextBatchingStrategy(12, buffer_size=4)
        return DynamicBatchSizeDataLoader(data, strategy, num_micro_batch=2, **options)

    def test_it_reads_the_data_again_until_all_steps_are_done(self) -> None:
        found = list(self.make(length=15))
        assert len(found) == 15
        assert all(len(step) == 2 for step in found)
        seen = [i for step in found for batch in step for i in names(batch)]
        assert len(set(seen)) == 20
        assert len(seen) > 40
        assert len(self.make()) == 20

    def test_it_resumes_exactly(self) -> None:
        def key(step: Any) -> Any:
            return [names(batch) for batch in step]

        assert_exact_resume(lambda: self.make(length=12), key=key)

    def test_an_empty_loader_is_refused(self) -> None:
        empty = DynamicBatchSizeDataLoader([], TextBatchingStrategy(4), length=3)
        with pytest.raises(InputError, match="the dataloader is empty"):
            list(empty)


@pytest.mark.parametrize("runtime", ["main", "worker"])
@pytest.mark.parametrize("sp", [1, 2])
def test_a_loader_is_built_for_either_process(monkeypatch: Any, runtime: Any, sp: int) -> None:
    parallel(monkeypatch, sp, 0, sp > 1)
    data = [sample(3 + n * 7 % 14, n + 1, 1 + n % 3) for n in range(60)]
    sizes: Any = {
        "micro_batch_size": 2, "global_batch_size": 8, "max_seq_len": 16, "train_steps": 4,
    }  # fmt: skip
    built = build_dataloader(
        dataset=data, **sizes, dyn_bsz_runtime=runtime, dyn_bsz_count_mode="effective",
        dyn_bsz_buffer_size=2, pad_to_length=True,
    )  # fmt: skip
    steps = list(built)
    assert steps
    assert all(len(step) == 4 for step in steps)
    for step in steps:
        for row in step:
            assert row["input_ids"].shape == (1, 48 // sp)  # 2 x 16 x 1.5
    if runtime == "main":
        assert len(steps) == 4
        assert built.batching_strategy.physical_token_cap == 48
    else:
        assert isinstance(built, DataLoader)


@pytest.mark.parametrize(
    ("change", "size"),
    [({}, 1), ({"dyn_bsz_runtime": "worker"}, 4), ({"dyn_bsz": False}, 8)],
)
def test_a_loader_takes_all_arguments_of_veomni(change: dict[str, Any], size: int) -> None:
    sizes: Any = {"micro_batch_size": 2, "global_batch_size": 8, "max_seq_len": 16}
    options: Any = {
        "num_workers": 0, "persistent_workers": True, "prefetch_factor": 2, "in_order": False,
        "drop_last": False, "pin_memory": False, "worker_num_threads": 1, "save_steps": 10,
        "multiprocessing_context": None, "build_collate_fn": False, "collate_fn_kwargs": None,
    }  # fmt: skip
    data = [sample(4, n) for n in range(61)]
    built = build_dataloader(
        "native", dataset=data, **sizes, **options, **change, dataloader_batch_size=size,
        train_steps=3, dyn_bsz_buffer_size=1, shuffle=False,
    )  # fmt: skip
    steps = list(built)
    taken = [i for step in steps for batch in step for i in names(batch)]
    if change:
        assert sorted(taken) == list(range(61))  # drop_last is false
    else:
        assert [len(step) for step in steps] == [4, 4, 4]
    with pytest.raises(ConfigError, match=f"dataloader_batch_size must be {size} with these"):
        build_dataloader(dataset=data, **sizes, **change, dataloader_batch_size=3, train_steps=3)


def test_the_last_step_may_be_incomplete() -> None:
    data = [sample(1, n) for n in range(11)]
    sizes: Any = {"micro_batch_size": 2, "global_batch_size": 4, "max_seq_len": 8, "train_steps": 9}
    for drop_last, count in ((True, 8), (False, 11)):
        steps = build_dataloader(
            dataset=data, **sizes, dyn_bsz=False, drop_last=drop_last, build_collate_fn=False
        )
        assert sum(len(batch) for step in steps for batch in step) == count


def test_workers_persist_and_the_collator_takes_arguments() -> None:
    data = [sample(2, n + 1) for n in range(8)]
    built = build_dataloader(
        dataset=data, micro_batch_size=2, global_batch_size=4, max_seq_len=8, train_steps=1,
        dyn_bsz=False, num_workers=1, persistent_workers=True, prefetch_factor=3,
        worker_num_threads=1, collate_fn_kwargs={"pad_to_length": 16},
    )  # fmt: skip
    assert (built.persistent_workers, built.prefetch_factor) == (True, 3)
    assert all(row["input_ids"].shape == (1, 16) for step in built for row in step)


def test_the_threads_of_workers_are_set_beside_the_callers_function() -> None:
    called: list[int] = []
    built = build_dataloader(
        dataset=[sample(2, 1)], micro_batch_size=1, global_batch_size=1, max_seq_len=8,
        train_steps=1, dyn_bsz=False, worker_num_threads=torch.get_num_threads(),
        worker_init_fn=called.append,
    )  # fmt: skip
    built.worker_init_fn(3)
    assert called == [3]


@pytest.mark.parametrize("idle", [{"pad_to_length": True}, {"collate_fn_kwargs": {"sp_size": 2}}])
@pytest.mark.parametrize("collate", [{"collate_fn": list}, {"build_collate_fn": False}])
def test_options_of_a_collator_that_is_not_used_are_refused(idle: Any, collate: Any) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(idle))} is for the MainCollator, which"):
        build_dataloader(
            dataset=[], micro_batch_size=1, global_batch_size=1, max_seq_len=8, train_steps=1,
            **idle, **collate,
        )  # fmt: skip


def test_impossible_loaders_are_refused() -> None:
    sizes: Any = {"micro_batch_size": 2, "max_seq_len": 16, "train_steps": 4, "dataset": []}
    with pytest.raises(ConfigError, match="global_batch_size=3 is not a multiple"):
        build_dataloader(global_batch_size=3, **sizes)
    with pytest.raises(ValueError, match=r"dyn_bsz_physical_overflow_ratio must be >= 1\.0"):
        build_dataloader(
            global_batch_size=2, dyn_bsz_count_mode="effective",
            dyn_bsz_physical_overflow_ratio=0.5, **sizes,
        )  # fmt: skip
