"""Tokens that the small decoder samples are those of its whole forward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, Recipe, make_plan
from evenstep.demo import Decoder, DecoderShape, sample_tokens
from evenstep.errors import InputError
from evenstep.tensors import Collator
from tests.examples import examples

VOCABULARY = 7
PROMPTS = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6), min_size=1, max_size=6
)


def decoder(window: int | None = None) -> Decoder:
    torch.manual_seed(1)
    shape = DecoderShape(vocab=VOCABULARY, hidden=16, layers=2, heads=2, ffn=16, window=window)
    model: Decoder = Decoder(shape).double()
    return model


def next_token(model: Decoder, ids: list[int]) -> int:
    """The likeliest token after `ids`, by a forward of all of them."""
    plan = make_plan([len(ids)], Recipe(layout=Packed(max_tokens=99)))
    with torch.no_grad():
        return int(model(Collator()(plan[0, 0][0], [{"input_ids": ids}]))[0, -1].argmax())


@examples(30)
@given(prompts=PROMPTS, window=st.sampled_from([None, 2, 5]))
def test_without_noise_every_token_is_the_likeliest(
    prompts: list[list[int]], window: int | None
) -> None:
    model = decoder(window)
    found = sample_tokens(
        model, prompts, [0] * len(prompts), max_tokens=12, stop=0, temperature=0.0
    )
    for prompt, answer in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in answer:
            assert token == next_token(model, ids)
            ids.append(token)
        assert answer[-1] == 0 or len(answer) == 12
        assert 0 not in answer[:-1]


@examples(30)
@given(prompts=PROMPTS, size=st.integers(1, 4))
def test_a_row_depends_on_its_prompt_and_seed_alone(prompts: list[list[int]], size: int) -> None:
    model, seeds = decoder(), [5 * number for number in range(len(prompts))]
    whole = sample_tokens(model, prompts, seeds, max_tokens=20, stop=0)
    for rank in range(size):
        part = slice(rank, None, size)
        assert (
            sample_tokens(model, prompts[part], seeds[part], max_tokens=20, stop=0) == whole[part]
        )


def test_tokens_are_drawn_with_the_probabilities_of_the_model() -> None:
    model, count = decoder(), 4000
    first = sample_tokens(model, [[1, 2, 3]] * count, range(count), max_tokens=1, stop=0)
    found = torch.bincount(torch.tensor(first)[:, 0], minlength=VOCABULARY) / count
    plan = make_plan([3], Recipe(layout=Packed(max_tokens=3)))
    with torch.no_grad():
        logits = model(Collator()(plan[0, 0][0], [{"input_ids": [1, 2, 3]}]))[0, -1]
    assert (found - logits.softmax(-1)).abs().max() < 0.03


def test_prompts_need_tokens_and_a_seed_each() -> None:
    with pytest.raises(InputError, match="got 1 seeds for 2 prompts"):
        sample_tokens(decoder(), [[1], [2]], [0], max_tokens=2, stop=0)
    with pytest.raises(InputError, match="at least one token in each"):
        sample_tokens(decoder(), [[]], [0], max_tokens=2, stop=0)
    assert sample_tokens(decoder(), [], [], max_tokens=2, stop=0) == []
