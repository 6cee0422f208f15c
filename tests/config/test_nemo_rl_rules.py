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


SHARDED = megatron(tensor_model_parallel_size=2, sequence_parallel="true")


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
        (nemo(PACK, rest="dpo: {}"), "DPO cannot be trained with policy.sequence_packing"),
        (nemo(DYNAMIC, rest="dpo: {}"), "DPO cannot be trained with policy.dynamic_batching"),
        (nemo(PACK, rest="rm: {}"), "a reward model cannot be trained with policy.sequence_p"),
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


@pytest.mark.parametrize("algorithm", ["dpo", "rm"])
def test_batch_sizes_count_pairs(algorithm: str, tmp_path: Path) -> None:
    text = nemo("train_micro_batch_size: 4", "logprob_batch_size: 8", "train_global_batch_size: 64")
    settings = loaded(tmp_path, "nemo-rl", f"{text}{algorithm}: {{}}\n").settings
    assert settings.recipe.steps == Steps(samples=128)
    assert settings.recipe.layout == Padded(samples=8)
    assert settings.log_probs is not None
    assert settings.log_probs.layout == Padded(samples=8)


OTHER = ", teacher_overrides: {b: {num_nodes: 1}}"
TRAIN = "train: {env_name: reward_model}"
LISTED = "train: [{env_name: math}, {env_name: '${data.name}'}], name: reward_model"


def cluster(nodes: int, gpus: int) -> str:
    return f"cluster: {{num_nodes: {nodes}, gpus_per_node: {gpus}}}\n"


def reward(data: str, nodes: int, gpus: int) -> str:
    resources = f"{{num_nodes: {nodes}, gpus_per_node: {gpus}}}"
    return f"data: {{{data}}}\nenv: {{reward_model: {{resources: {resources}}}}}\n"


def generation(nodes: object = "null", gpus: object = "null", colocated: str = "false") -> str:
    resources = f"{{num_nodes: {nodes}, gpus_per_node: {gpus}}}"
    return f"generation: {{colocated: {{enabled: {colocated}, resources: {resources}}}}}"


def teachers(models: str, more: str = "", enabled: str = "true") -> str:
    separate = f"{{enabled: {enabled}, default_teacher_cfg: {{num_nodes: 2}}{more}}}"
    return (
        f"on_policy_distillation: {{enabled: true, teacher_model_by_agent_name: {{{models}}}, "
        f"non_colocated_teachers: {separate}}}\n"
    )


@pytest.mark.parametrize(
    ("parts", "rest", "dp"),
    [
        # Generation with training: the whole cluster trains.
        ([generation(1, 8, "true")], cluster(4, 8), 32),
        # Generation on nodes of its own, or on GPUs of the only node.
        ([generation(1, 8)], cluster(4, 8), 24),
        ([generation(3, 8)], cluster(4, 8), 8),
        ([generation("null", 6)], cluster(1, 8), 2),
        ([generation(1, 2)], cluster(1, 8), 6),
        ([generation(1, 8), megatron(tensor_model_parallel_size=4)], cluster(5, 8), 8),
        # Algorithms that never generate do not reserve anything for it.
        ([generation(1, 8)], cluster(4, 8) + "sft: {}\n", 32),
        ([generation(1, 8)], cluster(4, 8) + "teachers: []\n", 32),
        ([generation(1, 8)], cluster(4, 8) + "distillation: {}\n", 24),
        ([generation(1, 8)], cluster(4, 8) + "ppo: {}\n", 24),
        # A reward model counts if a dataset uses it.
        ([], cluster(4, 8) + reward(TRAIN, 1, 8), 24),
        ([], cluster(1, 8) + reward(TRAIN, 1, 2), 6),
        ([], cluster(1, 8) + reward(LISTED, 1, 2), 6),
        ([], cluster(1, 8) + reward("train: {env_name: math}", 1, 2), 8),
        ([], cluster(4, 8) + reward("default: {env_name: reward_model}", 1, 8) + "ppo: {}\n", 24),
        ([], cluster(4, 8) + reward(TRAIN, 1, 8) + "distillation: {}\n", 32),
        ([], cluster(4, 8) + reward(TRAIN, 1, 8) + "sft: {}\n", 32),
        # Reward model and generation: both on the only node, or one node left for the policy.
        ([generation(1, 4)], cluster(1, 8) + reward(TRAIN, 1, 2), 2),
        ([generation(1, 4)], cluster(2, 8) + reward(TRAIN, 1, 2), 4),
        ([generation(1, 8)], cluster(4, 8) + reward(TRAIN, 1, 8), 16),
        # Teachers: one checkpoint is loaded once, and each may have other resources.
        ([], cluster(8, 8) + teachers("a: x, b: y"), 32),
        ([], cluster(8, 8) + teachers("a: x, b: x"), 48),
        ([], cluster(8, 8) + teachers("a: x, b: x", enabled="false"), 64),
        ([], cluster(8, 8) + teachers("a: x, b: y", OTHER), 40),
        ([generation(2, 8)], cluster(8, 8) + teachers("a: x"), 32),
        # One controller: nodes of generation are 1 unless given.
        ([generation("null", 8)], cluster(4, 8) + "async_rl: {}\n", 24),
        ([generation(2, 4)], cluster(4, 8) + "async_rl: {}\n", 16),
    ],
)  # fmt: skip
def test_only_the_gpus_of_the_policy_train(
    parts: list[str], rest: str, dp: int, tmp_path: Path
) -> None:
    result = loaded(tmp_path, "nemo-rl", nemo(PACK, *parts, rest=rest))
    assert result.settings.recipe.topology.dp == dp
    assert "GPUs (cluster" in result.origins["topology.dp"]


@pytest.mark.parametrize(
    ("parts", "rest", "rule"),
    [
        ([generation()], cluster(1, 8), "resources.gpus_per_node is missing"),
        ([generation(2, 4)], cluster(1, 8), "resources.num_nodes must be 1 or null on one node"),
        ([generation("null", 8)], cluster(4, 8), "resources.num_nodes is missing"),
        ([generation(1, 4)], cluster(4, 8), "gpus_per_node=4 must be cluster.gpus_per_node=8"),
        ([generation(1, 8)], cluster(1, 8), "leaves no GPU for training (8 GPUs for generation)"),
        ([generation(4, 8)], cluster(4, 8), "leaves no GPU for training (4 nodes for generation)"),
        (
            [],
            cluster(2, 8) + reward(TRAIN, 2, 8),
            "leaves no GPU for training (2 nodes for the reward model)",
        ),
        ([], cluster(2, 8) + teachers("a: x"), "leaves no GPU for training (2 nodes for teachers)"),
        (
            [generation(1, 8), megatron(tensor_model_parallel_size=16)],
            cluster(4, 8),
            "cluster without 1 node for generation: 24 GPUs cannot be divided",
        ),
    ],
)
def test_a_cluster_without_gpus_for_training_is_refused(
    parts: list[str], rest: str, rule: str, tmp_path: Path
) -> None:
    faults = refused(tmp_path, "nemo-rl", nemo(PACK, *parts, rest=rest))
    assert len(faults) == 1, faults
    assert rule in faults[0]
    ranks = loaded(tmp_path, "nemo-rl", nemo(PACK, *parts, rest=rest), "topology.dp=2")
    assert ranks.settings.recipe.topology.dp == 2


def test_ppo_files_load_and_the_value_model_is_noted(tmp_path: Path) -> None:
    result = loaded(tmp_path, "nemo-rl", nemo(PACK, rest="ppo: {ppo_epochs: 4}\nvalue: {}\n"))
    assert any("value model of PPO" in note for note in result.notes)
    assert not any("value" in note for note in loaded(tmp_path, "nemo-rl", nemo(PACK)).notes)


def test_a_packer_without_packing_has_no_effect(tmp_path: Path) -> None:
    text = nemo(
        "sequence_packing: {enabled: false, algorithm: modified_ffd}", "train_micro_batch_size: 1"
    )
    result = loaded(tmp_path, "nemo-rl", text)
    assert result.settings.recipe.layout == Padded(samples=1)
    assert result.notes == (
        "policy.sequence_packing.algorithm, file.yaml:1: has no effect without "
        "policy.sequence_packing.enabled.",
        *(note for note in result.notes if "algorithm" not in note),
    )


@pytest.mark.parametrize(
    "parts",
    [
        ["train_micro_batch_size: 1", SHARDED],
        [DYNAMIC, SHARDED],
        ["train_micro_batch_size: 1", dtensor(context_parallel_size=2)],
    ],
)
def test_a_divisor_without_packing_is_noted(parts: list[str], tmp_path: Path) -> None:
    result = loaded(tmp_path, "nemo-rl", nemo(*parts, "make_sequence_length_divisible_by: 1"))
    assert any("not a multiple of" in note for note in result.notes)


def test_packs_are_rounded_for_hybrid_ep(tmp_path: Path) -> None:
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": "true"}
    recipe = loaded(tmp_path, "nemo-rl", nemo(PACK, megatron(**flex, **sizes))).settings.recipe
    assert recipe.layout.round_to == 128 * 2
    flex["moe_flex_dispatcher_backend"] = "deepep"
    recipe = loaded(tmp_path, "nemo-rl", nemo(PACK, megatron(**flex, **sizes))).settings.recipe
    assert recipe.layout.round_to == 1


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
