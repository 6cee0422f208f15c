"""From samples to batches: labels, positions, boundaries, extras and errors."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, Padded, Plan, Recipe, Steps, Topology, make_plan
from evenstep.data import write_token_file
from evenstep.errors import ConfigError, EvenstepError, InputError
from evenstep.tensors import Batch, Collator, Extra, RaggedTensor
from evenstep.testing import Case, cases
from tests.examples import examples
from tests.internals import IGNORE_INDEX, LOSS_MASKS, loss_tokens_of


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def samples_of(lengths: Any) -> list[dict[str, Any]]:
    """Sample i holds the tokens 1000 i + 1, 1000 i + 2, ..."""
    return [{"input_ids": 1000 * i + 1 + torch.arange(int(n))} for i, n in enumerate(lengths)]


def one_batch(samples: list[Any], collator: Collator | None = None, **layout: Any) -> Batch:
    lengths = [len(sample["input_ids"]) for sample in samples]
    plan = make_plan(lengths, Recipe(layout=Packed(**{"max_tokens": 64, **layout})))
    return (collator or Collator())(plan[0, 0][0], samples)


def batches(plan: Plan, samples: list[dict[str, Any]], collator: Collator) -> list[Batch]:
    return [
        collator(micro, samples)
        for step in range(plan.num_steps)
        for rank in range(plan.num_ranks)
        for micro in plan[step, rank]
    ]


class TestSystems:
    def test_veomni_packs_and_pads_with_the_tail_as_one_tile(self) -> None:
        samples = [
            {"input_ids": ids(11, 12, 13), "labels": ids(2, 3, 4)},
            {"input_ids": ids(21, 22), "labels": ids(1, 2)},
        ]
        batch = one_batch(samples, pad_to=8)
        assert batch.tokens.tolist() == [[11, 12, 13, 21, 22, 0, 0, 0]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
        assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.max_seqlen == 3
        assert batch.labels.tolist() == [[3, 4, -100, 2, -100, -100, -100, -100]]
        # A model that shifts labels drops the first one anyway.
        assert batch.unshifted_labels.tolist() == [[-100, 3, 4, -100, 2, -100, -100, -100]]

    def test_veomnis_third_example_does_not_contradict_itself_here(self) -> None:
        batch = one_batch(samples_of([4, 1]), pad_to=8)
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2]]
        assert batch.cu_seqlens.tolist() == [0, 4, 5, 8]
        assert batch.token_mask.tolist() == [[True] * 5 + [False] * 3]

    def test_fast_llm_masks_spans_of_documents(self) -> None:
        samples = [
            {"input_ids": ids(100, 101, 102), "loss_masking_spans": [(1, 2)]},
            {"input_ids": ids(103, 104, 105)},
            {"input_ids": ids(106, 107, 108), "loss_masking_spans": [(0, 2)]},
        ]
        batch = one_batch(samples)
        targets = [-100, 102, -100, 104, 105, -100, -100, 108, -100]
        assert batch.labels.tolist() == [targets]
        assert batch.loss_weights.sum() == 4
        assert batch.cu_seqlens.tolist() == [0, 3, 6, 9]

    def test_nemo_aligns_each_sequence_and_pads_the_whole(self) -> None:
        recipe = Recipe(
            layout=Packed(max_tokens=64), topology=Topology(tp=4, sequence_parallel=True)
        )
        plan = make_plan([8, 5, 7], recipe)
        batch = Collator()(plan[0, 0][0], samples_of([8, 5, 7]))
        assert batch.tokens.shape == (1, 24)
        assert batch.cu_seqlens.tolist() == [0, 8, 16, 24]
        assert batch.seqlens.tolist() == [8, 5, 7]
        assert one_batch(samples_of([3, 2]), pad_to=8).cu_seqlens.tolist() == [0, 3, 5, 8]


def test_a_one_token_sequence_is_real_and_predicts_nothing() -> None:
    batch = one_batch(samples_of([1, 1, 1]), pad_to=4)
    assert batch.token_mask.tolist() == [[True, True, True, False]]
    assert batch.labels.tolist() == [[IGNORE_INDEX] * 4]
    assert batch.loss_weights.sum() == 0


def test_labels_further_ahead_stay_inside_their_segment() -> None:
    batch = one_batch(samples_of([4, 2]))
    assert (batch.labels_at(1) == batch.labels).all()
    assert batch.labels_at(2).tolist() == [[3, 4, -100, -100, -100, -100]]
    assert batch.labels_at(9).eq(-100).all()
    assert batch.labels_at(0).tolist() == batch.tokens.tolist()
    with pytest.raises(EvenstepError):
        batch.labels_at(-1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64])
def test_a_loss_mask_hides_labels_and_not_tokens(dtype: Any) -> None:
    mask = torch.tensor([0, 0, 1, 1]).to(dtype)
    batch = one_batch([{"input_ids": ids(5, 6, 7, 8), "loss_mask": mask}])
    assert batch.tokens.tolist() == [[5, 6, 7, 8]]
    assert batch.labels.tolist() == [[-100, 7, 8, -100]]
    assert batch.loss_weights.tolist() == [[0, 1, 1, 0]]


TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + ' .' }}"
    "{% endgeneration %}{{ ' ' }}{% else %}{{ message['content'] + ' ' }}{% endif %}{% endfor %}"
)


def test_what_a_chat_template_returns_is_a_sample() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["[UNK]", "[", "]", "user", "assistant", "hi", "hello", "you", "."]
    model = tokenizers.models.WordLevel({w: k for k, w in enumerate(words)}, unk_token="[UNK]")
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=TEMPLATE)
    chat = [{"role": "user", "content": "hi you"}, {"role": "assistant", "content": "hello you"}]
    sample = tokenizer.apply_chat_template(
        [*chat, *chat], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    batch = one_batch([dict(sample), {"input_ids": [5, 6]}])
    answer = [words.index(word) for word in ("hello", "you", ".")]
    labels = batch.labels[batch.labels != -100].tolist()
    assert labels == [*answer, *answer, 6]
    assert int(batch.loss_weights.sum()) == len(labels)


def test_all_given_masks_hide_tokens() -> None:
    sample = {
        "input_ids": ids(5, 6, 7, 8, 9),
        "assistant_masks": [0, 1, 1, 1, 0],
        "loss_mask": [1, 1, 0, 1, 1],
        "labels": ids(5, 6, 7, 80, 9),
    }
    assert one_batch([sample]).labels.tolist() == [[6, -100, 80, -100, -100]]
    with pytest.raises(InputError, match=r"sample 0 has 0.5 in its 'assistant_masks'; expected 0"):
        one_batch([{"input_ids": ids(5, 6), "assistant_masks": [0.5, 1]}])


@pytest.mark.parametrize("name", LOSS_MASKS)
def test_loss_masks_have_the_names_of_other_systems(name: str) -> None:
    tokens, mask = ids(5, 6, 7, 8, 9), [0, 0, 1, 0, 1]
    samples = [{"input_ids": tokens, name: mask}, {"input_ids": ids(1, 2)}]
    assert one_batch(samples).labels.tolist() == [[-100, 7, -100, 9, -100, 2, -100]]
    for hidden in (0, torch.tensor(0.0), np.False_):  # one number for all tokens
        found = one_batch([{"input_ids": tokens, name: hidden}, {"input_ids": ids(1, 2), name: 1}])
        assert found.labels.tolist() == [[-100] * 5 + [2, -100]]
    for start, end in ((0, 2), (2, 5), (0, 5)):
        expected = sum(mask[start + 1 : end + 1])
        assert loss_tokens_of(samples[0], start, end, 5) == expected
    spans = {**samples[0], "loss_masking_spans": [(1, 3)]}
    assert loss_tokens_of(spans, 0, 5, 5) == int(one_batch([spans]).loss_tokens.sum()) == 1


def test_samples_with_and_without_labels_share_a_batch() -> None:
    samples = [{"input_ids": ids(1, 2), "labels": ids(-100, 2)}, {"input_ids": ids(3, 4)}]
    assert one_batch(samples).labels.tolist() == [[2, -100, 4, -100]]


NOTHING = {"reward": 0, "patches": torch.empty(0, 2)}
EXTRAS = {
    "advantages": Extra(aligned="token", pad=-1.0),
    "reward": Extra(aligned="sequence"),
    "patches": Extra(aligned="ragged", dtype=torch.int64, shape=(2,)),
}


def with_extras(lengths: Any) -> list[dict[str, Any]]:
    samples = samples_of(lengths)
    for i, sample in enumerate(samples):
        sample["advantages"] = sample["input_ids"].float() / 10
        sample["reward"] = float(i)
        sample["patches"] = torch.full((i % 3, 2), i)
    return samples


def test_extras_are_laid_out_as_declared() -> None:
    batch = one_batch(with_extras([2, 1]), Collator(extras=EXTRAS), pad_to=4)
    torch.testing.assert_close(batch.extras["advantages"], torch.tensor([[0.1, 0.2, 100.1, -1.0]]))
    assert batch.extras["reward"].tolist() == [0.0, 1.0]  # type: ignore[union-attr]
    patches = batch.extras["patches"]
    assert isinstance(patches, RaggedTensor)
    assert (patches.values.tolist(), patches.offsets.tolist()) == ([[1, 1]], [0, 0, 1])


@examples(300)
@given(cases(), st.booleans())
def test_every_slot_of_every_batch_is_what_the_plan_says(case: Case, labelled: bool) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        return
    samples = with_extras(plan.lengths)
    if labelled:
        for sample in samples:
            sample["labels"] = sample["input_ids"] + 7
    seen: dict[int, list[int]] = {i: [] for i in range(len(plan.lengths))}
    for batch in batches(plan, samples, Collator(extras=EXTRAS, pad_token=-5)):
        tokens, mask = batch.tokens.reshape(-1), batch.token_mask.reshape(-1)
        assert (tokens[~mask] == -5).all()
        bounds = batch.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == tokens.numel()
        assert batch.max_seqlen == max(np.diff(bounds))
        assert batch.is_empty == (not mask.any())
        real = 0
        for tile, (begin, end) in enumerate(pairwise(bounds)):
            count = int(batch.seqlens[tile])
            part = slice(begin, begin + count)
            assert batch.position_ids.reshape(-1)[begin:end].tolist() == list(range(end - begin))
            assert (batch.segment_ids.reshape(-1)[begin:end] == tile).all()
            labels = batch.labels.reshape(-1)[begin:end].tolist()
            number = int(batch.sample_ids[tile])
            assert (number < 0) == (count == 0)
            if number < 0:
                assert int(batch.loss_tokens[tile]) == 0
                assert set(labels) == {IGNORE_INDEX}
                continue
            start = int(batch.starts[tile])
            own = samples[number]["input_ids"][start : start + count]
            assert (tokens[part] == own).all()
            seen[number] += own.tolist()
            shift = 7 if labelled else 0
            last = int(plan.ends(np.array([number]))[0])
            following = samples[number]["input_ids"][start + 1 : min(start + count + 1, last)]
            padding = [IGNORE_INDEX] * (end - begin - len(following))
            assert labels == (following + shift).tolist() + padding
            assert int(batch.loss_tokens[tile]) == last - 1
            if batch.continuation is not None:
                assert int(batch.continuation.counts[tile]) == int(start + count < last)
            advantages = batch.extras["advantages"]
            assert isinstance(advantages, torch.Tensor)
            torch.testing.assert_close(advantages.reshape(-1)[part], own.float() / 10)
            reward = batch.extras["reward"]
            assert isinstance(reward, torch.Tensor)
            assert reward[real] == number
            real += 1
        assert (batch.labels_at(1) == batch.labels).all()
        weights = batch.loss_weights.reshape(-1)
        assert (weights == (batch.labels.reshape(-1) != IGNORE_INDEX)).all()
    for i, tokens_seen in seen.items():
        kept = plan.segments.length[plan.segments.sample == i].sum()
        assert sorted(tokens_seen) == samples[i]["input_ids"][:kept].tolist()


@pytest.mark.parametrize(
    "layout",
    [
        Padded(max_tokens=32, round_to=16),
        Packed(max_tokens=32, round_to=16),
        Packed(rows=2, pad_to=16),
        Packed(samples=2, round_to=16),
    ],
)
def test_widths_come_in_the_multiples_that_low_precision_needs(layout: Any) -> None:
    lengths = [5, 9, 3, 12]
    plan = make_plan(lengths, Recipe(layout=layout, steps=Steps(samples=2)))
    for batch in batches(plan, samples_of(lengths), Collator()):
        assert batch.width % 16 == 0
        assert batch.cu_seqlens[-1] == batch.rows * batch.width


def test_samples_are_not_modified() -> None:
    samples = [
        {
            "input_ids": ids(1, 2, 3),
            "labels": ids(1, 2, 3),
            "loss_mask": torch.tensor([1, 0, 1]),
            "loss_masking_spans": [(0, 1)],
        },
        {"input_ids": ids(4, 5), "labels": ids(4, 5)},
    ]
    before = [{k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for s in samples]
    batch = one_batch(samples)
    batch.tokens.fill_(9)
    batch.labels.fill_(9)
    for sample, kept in zip(samples, before, strict=True):
        for key, value in kept.items():
            same = (sample[key] == value).all() if torch.is_tensor(value) else sample[key] == value
            assert same, key


def test_arrays_lists_and_narrow_integers_are_accepted() -> None:
    samples = [
        {"input_ids": np.array([1, 2], np.int32)},
        {"input_ids": [3, 4, 5]},
        {"input_ids": ids(6).to(torch.int16)},
    ]
    assert sorted(one_batch(samples).tokens.flatten().tolist()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "array",
    [
        np.array([40000, 65535], np.uint16),
        np.array([65535, 40000])[::-1],
        np.array([40000, 65535], ">i4"),
    ],
    ids=["uint16", "reversed", "big-endian"],
)
def test_arrays_of_any_integers_order_and_bytes_are_accepted(array: Any) -> None:
    assert one_batch([{"input_ids": array}]).tokens.tolist() == [[40000, 65535]]


def test_extras_of_several_dtypes_are_not_rounded_on_the_way() -> None:
    collator = Collator(extras={"x": Extra(aligned="sequence", dtype=torch.int64)})
    samples = [{"input_ids": ids(1), "x": x} for x in (np.float32(2.0), 2**24 + 1)]
    found: Any = one_batch(samples, collator).extras["x"]
    assert found.tolist() == [2, 2**24 + 1]


@pytest.mark.parametrize("aligned", ["token", "sequence", "ragged"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.7, torch.int64), (1.7, torch.int32), (70000, torch.int16), (-1, torch.uint8),
        (math.nan, torch.int32), (0.3, torch.bool), (2**24 + 1, torch.float32),
    ],
)  # fmt: skip
def test_extras_that_their_dtype_cannot_hold_are_refused(
    aligned: Any, value: float, dtype: torch.dtype
) -> None:
    collator = Collator(extras={"x": Extra(aligned=aligned, dtype=dtype)})
    right, wrong = (each if aligned == "sequence" else [each] for each in (1, value))
    samples = [{"input_ids": ids(1), "x": right}, {"input_ids": ids(1), "x": wrong}]
    with pytest.raises(InputError, match=rf"sample 1 has .* in 'x', which {dtype} cannot hold"):
        one_batch(samples, collator)
    batch = one_batch([samples[0], samples[0]], collator)
    assert batch.extras["x"] is not None


def test_the_output_of_a_tokenizer_is_accepted() -> None:
    samples = [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [3, 4, 5]}]
    plain = [{"input_ids": sample["input_ids"]} for sample in samples]
    assert one_batch(samples).tokens.tolist() == one_batch(plain).tokens.tolist()
    assert one_batch(samples).labels.tolist() == one_batch(plain).labels.tolist()


def test_a_declared_attention_mask_is_an_ordinary_extra() -> None:
    collator = Collator(extras={"attention_mask": Extra(aligned="token")})
    batch = one_batch([{"input_ids": [1, 2], "attention_mask": [1, 0]}], collator)
    assert batch.extras["attention_mask"].tolist() == [[1.0, 0.0]]  # type: ignore[union-attr]


def test_an_empty_micro_batch_is_all_padding() -> None:
    plan = make_plan([3], Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2)))
    batch = Collator(extras=EXTRAS)(plan[0, 1][0], with_extras([3]))
    assert batch.is_empty
    assert batch.loss_weights.sum() == 0
    assert batch.tokens.shape == (1, 1)
    assert batch.extras["advantages"].shape == (1, 1)  # type: ignore[union-attr]


def test_samples_may_be_a_mapping_by_number() -> None:
    lengths = [3, 4, 5]
    plan = make_plan(lengths, Recipe(layout=Packed(max_tokens=5)))
    samples = dict(enumerate(samples_of(lengths)))
    for micro in plan[0, 0]:
        own = {int(i): samples[int(i)] for i in micro.segments.sample}
        assert Collator()(micro, own).tokens.shape == (1, micro.width)


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        (
            {"input_ids": torch.tensor([1.0, 2, 3])},
            r"sample 1 has 'input_ids' of type torch.float32",
        ),
        ({"input_ids": ids(1, 2)}, "sample 1 was planned with 3 tokens, but its 'input_ids' has 2"),
        ({"input_ids": torch.tensor(3)}, "sample 1 was planned with 3 tokens, .* shape"),
        ({"labels": ids(1, 2, 3)}, "sample 1 has no 'input_ids'"),
        (
            {"input_ids": ids(1, 2, 3), "labels": ids(1, 2)},
            "sample 1 was planned with 3 tokens, but its 'labels' has 2",
        ),
        (
            {"input_ids": ids(1, 2, 3), "rewards": 1},
            r"sample 1 has the undeclared key 'rewards'; expected advantages.*"
            r"Runner\(collate=Collator\(extras=\.\.\.\)\)",
        ),
        (
            {"input_ids": ids(1, 2, 3), "attention_mask": [1, 1, 0]},
            "sample 1 has 0 in its 'attention_mask', .* Remove padding",
        ),
        (
            {"input_ids": ids(1, 2, 3), **NOTHING, "advantages": torch.zeros(4)},
            "sample 1 was planned with 3 tokens, but its 'advantages' has 4",
        ),
        (
            {"input_ids": ids(1, 2, 3), "loss_masking_spans": [(2, 5)]},
            r"sample 1 has the loss_masking_span \(2, 5\), but only 3 tokens",
        ),
        (
            {"input_ids": ids(1, 2, 3), "loss_mask": [1, 0.25, 0]},
            "sample 1 has 0.25 in its 'loss_mask'; expected 0 or 1. To weight tokens",
        ),
        ({"input_ids": ids(1, 2, 3), "loss_mask": [2, 1, 0]}, "sample 1 has 2 in its 'loss_mask'"),
        (
            {"input_ids": ids(1, 2, 3), "loss_mask": torch.tensor([1, torch.nan, 0])},
            "sample 1 has nan in its 'loss_mask'",
        ),
        ({"input_ids": ids(1, 2, 3)}, "sample 1 has no 'advantages'"),
    ],
)
def test_samples_that_do_not_fit_the_plan_are_refused_by_name(
    sample: dict[str, Any], fault: str
) -> None:
    plan = make_plan([2, 3], Recipe(layout=Packed(max_tokens=8)))
    first = {"input_ids": ids(1, 2), **NOTHING, "advantages": torch.zeros(2)}
    with pytest.raises(InputError, match=fault):
        Collator(extras=EXTRAS)(plan[0, 0][0], [first, sample])


def test_extras_of_another_shape_than_declared_are_refused() -> None:
    samples = [{"input_ids": ids(1), "reward": torch.zeros(n)} for n in (1, 2)]
    collator = Collator(extras={"reward": Extra(aligned="sequence")})
    with pytest.raises(InputError, match=r"sample 0 has entries of shape \(1,\) in 'reward'"):
        one_batch(samples, collator)


def test_pin_memory_must_be_a_bool() -> None:
    word: Any = "no"
    with pytest.raises(ConfigError, match="pin_memory must be true or false, got 'no'"):
        Collator(pin_memory=word)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int32, np.int64])
def test_samples_of_a_mapped_file_are_collated_without_a_warning(
    tmp_path: Path, dtype: type[np.integer[Any]]
) -> None:
    samples = [{"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]}, {"input_ids": [6, 7]}]
    samples[1]["loss_mask"] = [1, 1]
    file = write_token_file(
        tmp_path / "tokens", samples, dtype=dtype, columns={"loss_mask": np.uint8}
    )
    plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=8)))
    batch = Collator()(plan[0, 0][0], [file[0], file[1]])
    assert batch.tokens.tolist() == [[3, 4, 5, 6, 7]]
    assert batch.labels.tolist() == [[4, 5, -100, 7, -100]]
