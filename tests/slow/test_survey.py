"""The survey itself: configs, errors, verdicts and the page."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from tests.slow.kinds import Kind, kind_of, kinds
from tests.slow.measure import error_of, is_exact, norm_error, samples_of
from tests.slow.report import page
from tests.slow.survey import survey
from tests.slow.test_models import problems
from tests.slow.tiny_configs import tiny_config
from tests.slow.unbuilt import UNBUILT


def config_of(name: str, window: int = 8) -> Any:
    return tiny_config(kind_of(name).model_class.config_class, window)


def test_every_class_of_both_mappings_is_there_once() -> None:
    names = [kind.name for kind in kinds()]

    assert len(names) == len(set(names)) > 250
    assert {"LlamaForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration"} <= set(names)
    assert set(UNBUILT) <= {kind.types[0] for kind in kinds()}


def test_tiny_configs_have_every_kind_of_layer() -> None:
    assert set(config_of("gemma3_text").layer_types) == {"sliding_attention", "full_attention"}
    assert set(config_of("llama4_text").layer_types) == {"chunked_attention", "full_attention"}
    mixed = config_of("mimo_v2_flash")
    assert set(mixed.layer_types) == {"sliding_attention", "full_attention"}
    assert set(mixed.mlp_layer_types) == {"dense", "sparse"}
    assert config_of("gemma3n_text").num_kv_shared_layers == 2


def test_windows_are_shorter_than_samples_unless_they_are_given() -> None:
    longest = max(len(sample["input_ids"]) for sample in samples_of())
    for name in ("qwen2", "gpt_oss", "gemma2"):
        assert config_of(name).sliding_window < longest < config_of(name, 4096).sliding_window


def test_nothing_is_dropped_at_random() -> None:
    config = config_of("gpt2")

    assert (config.attn_pdrop, config.embd_pdrop, config.resid_pdrop) == (0.0, 0.0, 0.0)


def test_tokens_of_images_are_not_those_of_text() -> None:
    config = config_of("qwen2_5_vl")
    text = {int(token) for sample in samples_of() for token in sample["input_ids"]}

    assert config.image_token_id < config.text_config.vocab_size
    assert not {config.image_token_id, config.video_token_id} & text


def test_an_error_is_relative_to_the_largest_entry_of_a_parameter() -> None:
    expected = {"large": torch.tensor([10.0, 2.0]), "small": torch.tensor([1.0, 0.0])}
    found = {"large": torch.tensor([10.0, 2.1]), "small": torch.tensor([1.0, 0.3])}

    assert error_of(found, expected) == pytest.approx(0.3)
    assert norm_error(found, expected) == pytest.approx(math.sqrt(0.1 / 105), rel=1e-4)
    assert error_of({**found, "small": torch.tensor([math.nan, 0.0])}, expected) == math.inf


def test_an_error_is_exact_in_one_precision_or_within_rounding() -> None:
    assert is_exact({"single": 9e-7})
    assert is_exact({"single": 3e-6, "double": 9e-7})
    assert is_exact({"single": 3e-6}, rounding=1e-6)
    assert not is_exact({"single": 3e-6})
    assert not is_exact({"single": 0.01}, rounding=1.0)
    assert not is_exact({"failed": "ValueError"})


def finding(safe: bool, packed: float, padded: float = 1e-7, wide: bool | None = None) -> Any:
    errors = {"single": packed, "single norm": packed}
    ours = {
        "safe": safe,
        "why": "because",
        "safe if wide": safe if wide is None else wide,
        "why if wide": "because",
        "packed": errors,
        "packed with a tail": errors,
        "padded": {"single": padded, "single norm": padded},
    }
    missing = {"unavailable": "it has none"}
    return {"implementations": {"eager": missing, "sdpa": missing, "evenstep": ours}}


def test_what_is_safe_must_be_exact_and_what_is_exact_must_be_accepted() -> None:
    assert not list(problems(finding(True, 1e-7)))
    assert not list(problems(finding(False, 0.5)))
    assert "called safe" in next(problems(finding(True, 0.5)))
    assert "called safe" in next(problems(finding(False, 0.5, wide=True)))
    assert "refused" in next(problems(finding(False, 1e-7)))
    assert "padded" in next(problems(finding(True, 1e-7, padded=0.5)))


def test_the_page_has_a_row_for_every_class() -> None:
    facts = {"task": "causal", "experts": False}
    findings = [
        {"types": ["fine"], **facts, **finding(True, 2e-7)},
        {"types": ["leaks"], **facts, **finding(False, 0.5)},
        {"types": ["odd"], **facts, **finding(False, 0.5, padded=0.25)},
        {"types": ["musicgen"], "task": "causal", "unbuildable": "RuntimeError"},
    ]

    text = page(findings, {"fine": {"DDP evenstep": 3e-7}}, "transformers 5")

    assert "| fine |  |  | – | – | – | – | 2e-07 | 1e-07 |" in text
    assert "| leaks | because |  |" in text
    assert "| odd | – | – | **inexact** |" in text
    assert "| musicgen | predicts several audio codes per step, not one token |" in text
    assert "| fine | 3e-07 |" in text


def test_a_figure_is_in_double_precision_where_rounding_is_large() -> None:
    found = finding(True, 3e-6)
    errors = found["implementations"]["evenstep"]["packed"]
    errors |= {"double": 1e-15, "double norm": 2e-15}

    text = page([{"types": ["fine"], "task": "causal", "experts": True, **found}], {}, "")

    assert "| fine | yes |  | – | – | – | – | 2e-15 d | 1e-07 |" in text


class Crashing(Kind):
    """A class that ends its process."""

    @property
    def model_class(self) -> Any:
        os._exit(1)


@pytest.mark.slow
def test_a_class_whose_process_ends_does_not_end_the_survey() -> None:
    chosen = [
        Crashing("Crashing", ("none",), "causal"),
        Kind("NoSuchClass", ("none",), "causal"),
        kind_of("llama"),
    ]

    found = {kind.name: result for kind, result in survey(chosen)}

    assert found["Crashing"] == {"unbuildable": "its process ended with 1"}
    assert found["NoSuchClass"]["unbuildable"].startswith("AttributeError")
    assert "implementations" in found["LlamaForCausalLM"]
