"""What the attention that is registered with transformers refuses, instead of ignoring it."""

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils

from evenstep.errors import ConfigError
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import hf_forward, hf_kwargs
from tests.integrations.attended import make
from tests.integrations.models import SHAPE, build
from tests.internals import attention_function, rule_of
from tests.tensors.batches import VOCAB, batch_of

torch.set_num_threads(1)


def arguments(**change: Any) -> dict[str, Any]:
    return hf_kwargs(batch_of([5, 3], "packed")) | change


def test_a_cache_is_refused() -> None:
    model = use_attention(make("Llama"))
    tokens = torch.arange(4)[None]
    past = model(input_ids=tokens, use_cache=True).past_key_values
    with pytest.raises(ConfigError, match=r"8 keys for 4 queries.*use_cache=False"):
        model(input_ids=tokens, past_key_values=past)


def test_padded_rows_of_a_model_that_does_not_call_it_are_refused() -> None:
    model = build("Bloom", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    model.config._attn_implementation = "evenstep"  # as when it is built with it
    with pytest.raises(ConfigError, match="does not run with attn_implementation='evenstep'"):
        hf_forward(model)(model, batch_of([5, 3], "padded"))


def test_a_mask_that_was_made_keeps_its_rule() -> None:
    made = masking_utils.create_bidirectional_mask
    config = make("Llama").config
    config._attn_implementation = "evenstep"
    inputs = torch.zeros(2, 4, 32)
    padding = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    first = made(config=config, inputs_embeds=inputs, attention_mask=padding)
    again = masking_utils.create_causal_mask(
        config=config, inputs_embeds=inputs, attention_mask=first, past_key_values=None
    )
    assert rule_of(again) == rule_of(first)
    assert rule_of(again) == (False, None, True)


def test_a_rule_of_ones_own_is_refused_in_both_directions() -> None:
    config = make("Llama").config
    config._attn_implementation = "evenstep"
    given = {"config": config, "inputs_embeds": torch.zeros(1, 4, 32), "attention_mask": None}
    own = lambda b, h, q, k: q - k < 2  # noqa: E731
    with pytest.raises(ConfigError, match="does not know the attention rule"):
        masking_utils.create_bidirectional_mask(**given, and_mask_function=own)
    with pytest.raises(ConfigError, match="does not know the attention rule"):
        masking_utils.create_causal_mask(**given, past_key_values=None, and_mask_function=own)


def test_virtual_tokens_of_peft_are_refused() -> None:
    for settings, why in (
        (peft.PrefixTuningConfig, "keys for 8 queries|has shape"),
        (peft.PromptTuningConfig, "cu_seq_lens_q ends at 8, but there are 11 tokens"),
    ):
        model = use_attention(make("Llama"))
        tuned = peft.get_peft_model(model, settings(task_type="CAUSAL_LM", num_virtual_tokens=3))
        given = arguments()
        if settings is peft.PromptTuningConfig:
            del given["position_ids"]
        with pytest.raises(ConfigError, match=why):
            tuned(**given)


def test_other_masks_are_refused() -> None:
    model = use_attention(make("Llama"))
    block = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 8, 8, device="cpu")
    for mask in (torch.ones(1, 1, 8, 8, dtype=torch.bool), block):
        with pytest.raises(ConfigError, match="takes a 2-D padding mask or none"):
            model(**arguments(attention_mask=mask))
    holes = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 0]])
    with pytest.raises(ConfigError, match="padding between the tokens"):
        model(input_ids=torch.arange(8)[None], attention_mask=holes)


def test_boundaries_that_do_not_fit_are_refused() -> None:
    model = use_attention(make("Llama"))
    short = torch.tensor([0, 5, 7], dtype=torch.int32)
    with pytest.raises(ConfigError, match="cu_seq_lens_q ends at 7, but there are 8 tokens"):
        model(**arguments(cu_seq_lens_q=short, cu_seq_lens_k=short))
    with pytest.raises(ConfigError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        model(**arguments(cu_seq_lens_k=torch.tensor([0, 4, 8], dtype=torch.int32)))
    back = torch.tensor([0, 5, 3, 8], dtype=torch.int32)
    with pytest.raises(ConfigError, match="must not decrease"):
        model(**arguments(cu_seq_lens_q=back, cu_seq_lens_k=back))
    static = hf_kwargs(batch_of([5, 3], "packed static"))
    across = torch.tensor([0, 30, 72], dtype=torch.int32)
    with pytest.raises(ConfigError, match="every row must begin a segment"):
        model(**static | {"cu_seq_lens_q": across, "cu_seq_lens_k": across})


def test_keywords_that_are_not_understood_are_refused() -> None:
    model = use_attention(make("Llama"))
    with pytest.raises(ConfigError, match=r"LlamaAttention passes 'my_bias', .*leave out"):
        model(**arguments(my_bias=torch.zeros(1)))
    q = k = v = torch.zeros(1, 2, 4, 8)
    for name, why in (
        ("position_bias", "adds a position bias"),
        ("indices", "selects keys"),
        ("output_attentions", "asks for attention weights"),
    ):
        with pytest.raises(ConfigError, match=why):
            attention_function(nn.Linear(2, 2), q, k, v, None, **{name: torch.zeros(1)})
    ignored = {"num_items_in_batch": torch.tensor(3), "output_attentions": False, "seq_idx": None}
    out, weights = attention_function(nn.Linear(2, 2), q, k, v, None, **ignored)
    assert out.shape == (1, 4, 2, 8)
    assert weights is None


def test_position_biases_of_t5_are_refused() -> None:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
    )
    model = transformers.T5EncoderModel(config).eval()
    model.set_attn_implementation("evenstep")
    with pytest.raises(ConfigError, match="adds a position bias"):
        model(input_ids=torch.arange(4)[None])


def test_chunked_attention_is_refused() -> None:
    model = build("Llama4Text", "eager", **SHAPE | {"attention_chunk_size": 4})
    with pytest.raises(ConfigError, match="does not support chunked attention"):
        use_attention(model)


def config_for(**options: Any) -> Any:
    config = transformers.LlamaConfig(**SHAPE | options)
    config._attn_implementation = "evenstep"
    return config


def test_blocks_that_see_both_ways_are_refused_where_there_are_any() -> None:
    states = torch.zeros(1, 6, 32)
    options = {"config": config_for(), "inputs_embeds": states, "attention_mask": None}
    options |= {"past_key_values": None}
    text = torch.full((1, 6), -1)
    mask = masking_utils.create_causal_mask(**options, block_sequence_ids=text)
    assert mask.all()
    image = torch.tensor([[-1, 0, 0, 0, -1, -1]])
    with pytest.raises(ConfigError, match="image blocks that see both ways"):
        masking_utils.create_causal_mask(**options, block_sequence_ids=image)


def test_unknown_rules_are_refused() -> None:
    options = {"config": config_for(), "inputs_embeds": torch.zeros(1, 6, 32)}
    options |= {"attention_mask": None, "past_key_values": None}

    def first_half(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < 3

    with pytest.raises(ConfigError, match=r"does not know the attention rule .*first_half"):
        masking_utils.create_causal_mask(**options, and_mask_function=first_half)


def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    states = torch.zeros(1, 6, 32)
    options = {"inputs_embeds": states, "attention_mask": None, "past_key_values": None}
    mask = masking_utils.create_sliding_window_causal_mask(
        config=config_for(sliding_window=2), **options
    )
    full = masking_utils.create_causal_mask(config=config_for(), **options)
    q = k = v = torch.randn(1, 2, 6, 8)
    layer = nn.Linear(2, 2)
    for given, window in ((mask, 3), (full, 3)):
        with pytest.raises(ConfigError, match="a layer passes sliding_window=3"):
            attention_function(layer, q, k, v, given, sliding_window=window)
    same = [attention_function(layer, q, k, v, mask, sliding_window=w)[0] for w in (2, None)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], attention_function(layer, q, k, v, full)[0])
