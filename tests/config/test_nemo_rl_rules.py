"""Rules and defaults of NeMo-RL: contradictions are refused with the rule."""

from pathlib import Path

import pytest

from evenstep import Padded, Steps
from tests.config.dialect_files import loaded, refused

PACK = "sequence_packing: {enabled: true, train_mb_tokens: 4096}"
DYNAMIC = "dynamic_batching: {enabled: true, train_mb_tokens: 4096}"


def nemo(*parts: str, rest: str = "") -> str:
    return f"policy: {{{', '.join(parts)}}}\n{rest}"


def megatron(**sizes: object) -> str:
    keys = {"enabled": "true", **sizes}
    return f"megatron_cfg: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}"


def dtensor(**sizes: object) -> str:
    return megatron(**sizes).replace("megatron_cfg", "dtensor_cfg")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (nemo(PACK, DYNAMIC), "exclude each other"),
        (nemo(DYNAMIC, megatron(pipeline_model_parallel_size=2)), "pipeline of size 1"),
        (nemo(DYNAMIC, "torch_compile: true"), "cannot be used with policy.torch_compile"),
        (nemo(DYNAMIC, dtensor(torch_compile="true")), "cannot be used with policy.dtensor_cfg"),
        (nemo(DYNAMIC, megatron(context_parallel_size=2)), "needs policy.sequence_packing.enabled"),
        (nemo(PACK, dtensor(context_parallel_size=2)), "cannot be combined"),
        (nemo(PACK, megatron(), dtensor()), "Enable one backend"),
        (nemo(PACK, rest="dpo: {}"), "DPO cannot be used with policy.sequence_packing"),
        (nemo(DYNAMIC, rest="dpo: {}"), "DPO cannot be used with policy.dynamic_batching"),
        (nemo("sequence_packing: {enabled: true}"), "train_mb_tokens is missing"),
        (nemo("sequence_packing: {enabled: false}"), "train_micro_batch_size is missing"),
        (
            nemo(PACK, megatron(context_parallel_size=2), "make_sequence_length_divisible_by: 6"),
            "must be a multiple of 4 (2cp · tp",
        ),
        (
            nemo(
                PACK,
                megatron(tensor_model_parallel_size=2, sequence_parallel="true"),
                "make_sequence_length_divisible_by: 3",
            ),
            "must be a multiple of 2",
        ),
        (
            nemo(PACK, megatron(tensor_model_parallel_size=3), rest="cluster: {gpus_per_node: 8}"),
            "8 GPUs cannot be divided",
        ),
        (
            nemo(PACK.replace("}", ", algorithm: best_fit}")),
            "unknown policy.sequence_packing.algorithm 'best_fit'; expected one of: concatenative",
        ),
        (
            nemo(PACK.replace("}", ", microbatch_order: smallest_first}")),
            "expected one of: packer, largest_first",
        ),
    ],
)
def test_nemo_rl_refuses(text: str, rule: str, tmp_path: Path) -> None:
    faults = refused(tmp_path, "nemo-rl", text)
    assert len(faults) == 1, faults
    assert rule in faults[0]


def test_several_broken_rules_are_listed_together(tmp_path: Path) -> None:
    text = nemo(
        PACK, DYNAMIC, "torch_compile: true", "train_global_batch_size: many",
        megatron(pipeline_model_parallel_size=2, pipelines=3, context_parallel_siez=2),
    )  # fmt: skip
    faults = refused(tmp_path, "nemo-rl", text)
    assert len(faults) == 5
    for word in (
        "exclude each other",
        "pipeline of size 1",
        "torch_compile",
        "train_global_batch_size must be an integer",
        "Did you mean policy.megatron_cfg.context_parallel_size?",
    ):
        assert any(word in fault for fault in faults), word
    assert all("file.yaml:1" in fault for fault in faults)


@pytest.mark.parametrize(
    ("recipe", "multiple"), [("blockwise", 128), ("mxfp8", 32), ("tensorwise", 16)]
)
def test_packs_are_rounded_for_fp8(recipe: str, multiple: int, tmp_path: Path) -> None:
    fp8 = f"{{enabled: true, fp8_recipe: {recipe}}}"
    text = nemo(PACK, megatron(fp8_cfg=fp8))
    assert loaded(tmp_path, "nemo-rl", text).settings.recipe.layout.round_to == multiple
    parallel = megatron(
        fp8_cfg=fp8, context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel="true"
    )
    recipe_ = loaded(tmp_path, "nemo-rl", nemo(PACK, parallel)).settings.recipe
    assert recipe_.layout.round_to == multiple * 4 * 2


def test_without_packing_and_dynamic_batching_batches_are_fixed(tmp_path: Path) -> None:
    text = nemo("train_micro_batch_size: 4", "logprob_batch_size: 8", "train_global_batch_size: 64")
    settings = loaded(tmp_path, "nemo-rl", text).settings
    assert settings.recipe.layout == Padded(samples=4)
    assert (settings.recipe.balance, settings.recipe.steps) == ("none", Steps(samples=64))
    assert settings.log_probs is not None
    assert settings.log_probs.layout == Padded(samples=8)
    pairs = loaded(tmp_path, "nemo-rl", text + "dpo: {}\n").settings.recipe
    assert pairs.steps == Steps(samples=128)


def test_a_file_without_budget_for_log_probs_has_no_recipe_for_them(tmp_path: Path) -> None:
    assert loaded(tmp_path, "nemo-rl", nemo(PACK)).settings.log_probs is None


def test_widths_are_multiples_of_both_roundings(tmp_path: Path) -> None:
    text = nemo(
        DYNAMIC.replace("}", ", sequence_length_round: 64}"), "make_sequence_length_divisible_by: 6"
    )
    assert loaded(tmp_path, "nemo-rl", text).settings.recipe.layout.round_to == 192


def test_sequences_over_the_budget_are_noted(tmp_path: Path) -> None:
    text = nemo(PACK, "max_total_sequence_length: 8192")
    assert any("longer sequences are refused" in n for n in loaded(tmp_path, "nemo-rl", text).notes)
