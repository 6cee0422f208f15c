"""Rules and defaults of five systems; contradictions are refused with the rule."""

import re
from pathlib import Path

import pytest

from evenstep import Packed, Padded, Steps, Topology
from evenstep.config import FaultsError, load_file
from evenstep.data import Pool
from tests.config.dialect_files import loaded, refused
from tests.internals import DIALECTS

KUBERNETES = """
apiVersion: v1
kind: ConfigMap
metadata: {name: training, labels: {system: all}}
data: {config.yaml: "schedule: {}"}
spec: {containers: [{name: trainer, resources: {limits: {nvidia.com/gpu: 8}}}]}
"""


@pytest.mark.parametrize("text", [KUBERNETES, "", "policy: {model_name: a/b}", "train: {}"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_file_without_any_key_of_the_system_is_refused(
    dialect: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(FaultsError, match=r"none of the keys of .* that concern batches, such as"):
        load_file(path, dialect=dialect)


def test_a_file_of_another_system_is_named(tmp_path: Path) -> None:
    faults = refused(tmp_path, "fast-llm", "actor_rollout_ref: {actor: {use_dynamic_bsz: true}}")
    assert "It seems to be a file of verl: use --from verl." in faults[0]


def test_a_file_with_only_a_misspelt_key_names_it(tmp_path: Path) -> None:
    faults = refused(tmp_path, "veomni", "train: {dyn_bzs: true}")
    assert "Did you mean train.dyn_bsz?" in faults[0]


# ROLL --------------------------------------------------------------------------------------------


def roll(*lines: str, worker: str = "actor_train") -> str:
    return "\n".join([f"{worker}:", *(f"  {line}" for line in lines)]) + "\n"


TRAIN = ("use_dynamic_batching_in_train: true", "max_tokens_per_microbatch_in_train: 8192")


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        (TRAIN[:1], "max_tokens_per_microbatch_in_train is missing"),
        (
            (*TRAIN, "use_dynamic_batching_in_infer: true"),
            "max_tokens_per_microbatch_in_infer is missing",
        ),
        ((*TRAIN, "use_sequence_packing: true"), "exclude each other"),
        (
            (
                *TRAIN, "sequence_length_round_in_train: 6",
                "strategy_args: {strategy_config: {tensor_model_parallel_size: 2, "
                "context_parallel_size: 2}}",
            ),
            "must be divisible by 4",
        ),
        (
            ("use_sequence_packing: true", "sequence_packing_args: {algorithm: load_balance, "
             "max_packed_sequence_length_forward: 8}"),
            "max_packed_sequence_length_train is missing",
        ),
        ((*TRAIN, "device_mapping: all of them"), "must be a list of devices"),
        ((*TRAIN, "max_tokens_per_microbatch: 3"), "max_tokens_per_microbatch is not a known key"),
        ((*TRAIN, "sequence_length_round_in_eval: 3"), "not a known key"),
        ((*TRAIN, "sequence_packing_args: {size: 3}"), "sequence_packing_args.size"),
    ],
)  # fmt: skip
def test_roll_refuses(lines: tuple[str, ...], rule: str, tmp_path: Path) -> None:
    faults = refused(tmp_path, "roll", roll(*lines))
    assert len(faults) == 1, faults
    assert rule in faults[0]


def test_a_roll_file_without_workers_is_refused(tmp_path: Path) -> None:
    assert any(
        "none of the workers" in fault for fault in refused(tmp_path, "roll", "prompt_length: 3\n")
    )


@pytest.mark.parametrize(
    ("mapping", "dp"),
    [
        ("list(range(0,8))", 8),
        ("list(range(0, 16, 2))", 8),
        ("list([0,1,2,3,8,9])", 6),
        ("list((0, 1))", 2),
        ("range(4)", 4),
        ("'[0, 1, 2]'", 3),
        ("[0, 1]\n  num_gpus_per_worker: 2", 1),
    ],
)
def test_devices_of_a_mapping_are_counted(mapping: str, dp: int, tmp_path: Path) -> None:
    text = roll(*TRAIN, f"device_mapping: {mapping}")
    assert loaded(tmp_path, "roll", text).settings.recipe.topology.dp == dp


@pytest.mark.parametrize("worker", ["actor_train", "sft_train", "student", "student_train"])
def test_the_trained_worker_of_every_pipeline_is_read(worker: str, tmp_path: Path) -> None:
    text = roll(*TRAIN, "device_mapping: list(range(0,4))", worker=worker)
    recipe = loaded(tmp_path, "roll", text).settings.recipe
    assert (recipe.layout, recipe.topology) == (Padded(max_tokens=8192, round_to=4), Topology(dp=4))
    assert recipe.steps == Steps(samples=8 * 4)  # 8 per device is the default


def test_ranks_of_fsdp_that_share_rows_are_one_rank(tmp_path: Path) -> None:
    strategy = "strategy_args: {{strategy_name: {}}}"
    lines = ("model_args: {ulysses_size: 4}", "device_mapping: list(range(0,8))")
    text = roll(*lines, strategy.format("fsdp2_train"))
    recipe = loaded(tmp_path, "roll", text).settings.recipe
    assert (recipe.topology.dp, recipe.layout.round_to) == (2, 4)
    assert recipe.steps == Steps(samples=16)
    text = roll(*lines, *TRAIN, "sequence_length_round_in_train: 6", strategy.format("fsdp2_train"))
    assert loaded(tmp_path, "roll", text).settings.recipe.layout.round_to == 12
    text = roll(*lines, strategy.format("megatron_train"))
    assert loaded(tmp_path, "roll", text).settings.recipe.topology.dp == 8


def test_batch_sizes_of_roll_count_pairs(tmp_path: Path) -> None:
    lines = ("training_args: {per_device_train_batch_size: 4}", "infer_batch_size: 3")
    text = roll(*lines, "device_mapping: [0, 1]") + "chosen_key: chosen\n"
    settings = loaded(tmp_path, "roll", text).settings
    assert (settings.recipe.layout, settings.recipe.steps) == (Padded(samples=8), Steps(samples=16))
    assert settings.log_probs is not None
    assert settings.log_probs.layout == Padded(samples=6)
    faults = refused(tmp_path, "roll", roll(*TRAIN) + "rejected_key: worse\n")
    assert "cannot be used with pairs" in faults[0]


def test_roll_defaults(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "roll", roll(*TRAIN)).settings
    assert settings.recipe.layout == Padded(max_tokens=8192, round_to=4)
    assert settings.log_probs is not None
    assert settings.log_probs.layout == Padded(samples=16)
    assert settings.log_probs.balance == "none"


def test_pipelines_exchange_shapes_and_counts_are_made_divisible(tmp_path: Path) -> None:
    config = "{pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2}"
    text = roll(*TRAIN, f"strategy_args: {{strategy_config: {config}}}", "device_mapping: [0, 1]")
    topology = loaded(tmp_path, "roll", text).settings.recipe.topology
    assert topology == Topology(dp=1, pp=2, vpp=2, variable_seq_lengths=True)
    assert topology.multiple == 2


def test_a_worker_with_another_budget_is_noted(tmp_path: Path) -> None:
    infer = ("use_dynamic_batching_in_infer: true", "max_tokens_per_microbatch_in_infer: {}")
    text = roll(*TRAIN, infer[0], infer[1].format(8192))
    text += roll(infer[0], infer[1].format(4096), worker="reference")
    found = loaded(tmp_path, "roll", text)
    assert found.settings.log_probs is not None
    assert found.settings.log_probs.layout.max_tokens == 8192
    assert any(note.startswith("reference is planned differently") for note in found.notes)


def test_packing_without_an_algorithm_packs_fixed_batches_in_order(tmp_path: Path) -> None:
    text = roll("use_sequence_packing: true", "training_args: {per_device_train_batch_size: 4}")
    recipe = loaded(tmp_path, "roll", text).settings.recipe
    assert (recipe.layout, recipe.balance) == (Packed(samples=4), "none")


# cosmos-rl ---------------------------------------------------------------------------------------


def cosmos(*policy: str, train: tuple[str, ...] = ("max_num_steps = 10",)) -> str:
    return "\n".join(["[train]", *train, "[train.train_policy]", *policy]) + "\n"


ENABLED = "enable_dp_load_balancing = true"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (cosmos(ENABLED, train=()), "train.max_num_steps is missing"),
        (cosmos(ENABLED, 'load_balanced_batching_strategy = "best"'), "prefer_closest, prefer_f"),
        (cosmos(ENABLED, "load_balanced_batches_per_optimizer_step = 0"), "at least 1, got 0"),
        (cosmos(ENABLED, "load_balanced_pool_size = 0"), "at least 1, got 0"),
        (cosmos(ENABLED, "load_balanced_max_steps = 100"), "load_balanced_max_steps is not a know"),
        (
            cosmos(
                ENABLED,
                "load_balanced_batches_per_optimizer_step = 2",
                "load_balanced_accumulate_steps = 4",
            ),
            "mean the same",
        ),
    ],
)
def test_cosmos_refuses(text: str, rule: str, tmp_path: Path) -> None:
    faults = refused(tmp_path, "cosmos-rl", text)
    assert len(faults) == 1, faults
    assert rule in faults[0]


def test_the_documented_budget_is_taken_and_said(tmp_path: Path) -> None:
    text = cosmos(ENABLED) + "[policy]\nmodel_max_length = 2048\n"
    found = loaded(tmp_path, "cosmos-rl", text)
    assert found.settings.recipe.layout == Padded(max_tokens=32768)
    assert found.settings.stream.pool == Pool(samples=32, strategy="prefer_closest")
    assert found.settings.stream.infinite_loop
    assert any("32768 is taken, as documented" in note and "(2048)" in note for note in found.notes)


def test_keys_that_only_the_document_has_are_accepted_with_a_note(tmp_path: Path) -> None:
    text = cosmos(ENABLED, "load_balanced_accumulate_steps = 4", "infinite_loop = false")
    found = loaded(tmp_path, "cosmos-rl", text)
    assert found.settings.recipe.steps == Steps(micro_batches=4)
    assert not found.settings.stream.infinite_loop
    for name in ("load_balanced_accumulate_steps", "infinite_loop"):
        assert any(name in note and "documentation" in note for note in found.notes)


def test_an_epoch_and_a_strategy_without_effect_are_noted(tmp_path: Path) -> None:
    text = cosmos(
        ENABLED,
        'load_balanced_batching_strategy = "prefer_first"',
        train=("max_num_steps = 10", "epoch = 3", "sequence_packing = true"),
    )
    notes = loaded(tmp_path, "cosmos-rl", text).notes
    assert any("train.epoch" in note and "no effect" in note for note in notes)
    assert any("load_balanced_batching_strategy" in note and "no effect" in note for note in notes)


def test_without_load_balancing_batches_are_fixed(tmp_path: Path) -> None:
    text = cosmos("mini_batch = 4", train=("train_batch_per_replica = 32",))
    text += "[policy.parallelism]\ndp_shard_size = 4\ntp_size = 2\n"
    settings = loaded(tmp_path, "cosmos-rl", text).settings
    assert settings.recipe.layout == Padded(samples=4)
    assert settings.recipe.topology == Topology(dp=4, tp=2)
    assert settings.recipe.steps == Steps(samples=128)
    assert settings.stream.pool is None


@pytest.mark.parametrize(
    ("policy", "replicas", "samples", "dp"),
    [
        ('type = "sft"', 1, 32 * 4, 4),
        ('type = "grpo"', 1, 32, 4),
        ('type = "grpo"', 2, 64, 8),
        ("temperature = 0.9", 1, 32, 4),
        ('type = "grpo"\nbatch_size_per_optimize = 4', 2, 32, 8),
        ('type = "grpo"\nbatch_size_per_optimize = 64', 1, 32, 4),
    ],
)
def test_grpo_counts_samples_per_replica_and_sft_per_rank(
    policy: str, replicas: int, samples: int, dp: int, tmp_path: Path
) -> None:
    text = cosmos("mini_batch = 4", policy, train=("train_batch_per_replica = 32",))
    text += f"[policy.parallelism]\ndp_shard_size = 4\nn_init_replicas = {replicas}\n"
    recipe = loaded(tmp_path, "cosmos-rl", text).settings.recipe
    assert (recipe.steps, recipe.topology.dp) == (Steps(samples=samples), dp)
    assert recipe.layout == Padded(samples=4)


def test_grpo_may_have_a_budget(tmp_path: Path) -> None:
    budget = "max_token_len_per_mini_batch = 4096"
    size = "[policy.parallelism]\ncp_size = 2\n"
    text = cosmos('type = "grpo"', budget) + size
    assert loaded(tmp_path, "cosmos-rl", text).settings.recipe.layout == Padded(max_tokens=8192)
    text = cosmos('type = "sft"', budget) + size
    assert loaded(tmp_path, "cosmos-rl", text).settings.recipe.layout == Padded(samples=2)


# VeOmni ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("train: {torch_compile: {enable: true}}", "one shape"),
        ("train: {dyn_bsz: false, torch_compile: {enable: true}}", "one shape"),
        ("train: {dyn_bsz_count_mode: labels}", "expected one of: total, effective"),
        ("train: {micro_batch_size: 2, global_batch_size: 5}", "must be a multiple of"),
        ("train: {dyn_bsz_buffer: 5}", "train.dyn_bsz_buffer is not a known key"),
        ("train: {pad_to_lenght: true}", "Did you mean pad_to_length?"),
    ],
)
def test_veomni_refuses(text: str, rule: str, tmp_path: Path) -> None:
    faults = refused(tmp_path, "veomni", text)
    assert len(faults) == 1, faults
    assert rule in faults[0]


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ("dyn_bsz: false, pad_to_length: true", "pad_to_length"),
        ("dyn_bsz: false, pad_packed_input: true", "pad_packed_input"),
        ("dyn_bsz: false, bsz_warmup_ratio: 0.1, max_steps: 9", "bsz_warmup_ratio"),
        ("dyn_bsz: false, dyn_bsz_count_mode: effective", "dyn_bsz_count_mode"),
        ("dyn_bsz_runtime: worker, bsz_warmup_ratio: 0.1, max_steps: 9", "bsz_warmup_ratio"),
        ("dyn_bsz_buffer_size: 100", "dyn_bsz_buffer_size"),
    ],
)
def test_a_key_without_effect_is_noted(keys: str, key: str, tmp_path: Path) -> None:
    result = loaded(tmp_path, "veomni", f"train: {{{keys}}}")
    assert any(key in note and "has no effect" in note for note in result.notes)
    without = ", ".join(part for part in keys.split(", ") if not part.startswith(key))
    other = loaded(tmp_path, "veomni", f"train: {{dyn_bsz_margin: 0, {without}}}")
    assert result.settings == other.settings


def test_more_tokens_than_a_micro_batch_is_padded_to_are_noted(tmp_path: Path) -> None:
    keys = "train: {dyn_bsz_count_mode: effective, pad_to_length: true}"
    result = loaded(tmp_path, "veomni", keys)
    assert result.settings.recipe.layout.pad_to == 2048
    assert any("physical_overflow_ratio: has no effect" in note for note in result.notes)


@pytest.mark.parametrize(
    ("keys", "size", "steps"),
    [
        # Steps of an epoch: ⌈10⁷ · 1.05 / (8 · 2048)⌉ = 641, of which a tenth.
        ("global_batch_size: 8, bsz_warmup_ratio: 0.1", "", 64),
        ("global_batch_size: 8, bsz_warmup_ratio: 0.1, max_steps: 99", "", 9),
        ("global_batch_size: 8, bsz_warmup_ratio: 0.1, max_steps: 999", "", 64),
        ("global_batch_size: 8, bsz_warmup_ratio: 0.1", "data: {train_size: 1e6}", 6),
        ("global_batch_size: 8, bsz_warmup_ratio: 0.001", "data: {train_size: 1e6}", 0),
        ("micro_batch_size: 2, bsz_warmup_ratio: 0.1", "", 256),
    ],
)
def test_the_warm_up_is_a_share_of_the_steps(
    keys: str, size: str, steps: int, tmp_path: Path
) -> None:
    result = loaded(tmp_path, "veomni", f"train: {{{keys}}}\n{size}\n")
    assert result.settings.stream.pool is not None
    assert result.settings.stream.pool.warmup_steps == steps


def test_epochs_of_limited_steps_are_added_up(tmp_path: Path) -> None:
    text = "train: {max_steps: 10, num_train_epochs: 3}"
    assert loaded(tmp_path, "veomni", text).settings.stream.max_num_steps == 30


def test_veomni_defaults(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "veomni", "train: {dyn_bsz: true}").settings
    assert settings.recipe.layout == Packed(max_tokens=2048)
    assert settings.recipe.overflow == "alone"
    assert settings.stream.pool == Pool(samples=200, strategy="greedy")


def test_batching_in_workers_drops_longer_samples(tmp_path: Path) -> None:
    text = "train: {dyn_bsz_runtime: worker}"
    assert loaded(tmp_path, "veomni", text).settings.recipe.overflow == "drop"


def test_the_accelerator_may_be_the_model_s(tmp_path: Path) -> None:
    text = "model: {accelerator: {ulysses_size: 4, dp_shard_size: 2, dp_replicate_size: 2}}"
    recipe = loaded(tmp_path, "veomni", text).settings.recipe
    assert (recipe.layout.round_to, recipe.topology.dp) == (4, 4)


# Fast-LLM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("schedule: {depth_first: 3}", "Did you mean depth_first_micro_batches?"),
        ("batch: {sequence_length: 2048}", "older versions"),
        ("schedule: {per_micro_batch_normalization: 1}", "must be true or false, got 1"),
        ("data: {micro_batch_size: 0}", "at least 1, got 0"),
    ],
)
def test_fast_llm_refuses(text: str, rule: str, tmp_path: Path) -> None:
    faults = refused(tmp_path, "fast-llm", text)
    assert len(faults) == 1, faults
    assert rule in faults[0]


def test_documents_that_are_not_truncated_are_dropped(tmp_path: Path) -> None:
    text = "data: {truncate_documents: false, maximum_document_length: 100}"
    found = loaded(tmp_path, "fast-llm", text)
    assert found.settings.recipe.overflow == "drop"
    assert any("maximum_document_length" in note for note in found.notes)


# verl --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            "actor_rollout_ref: {actor: {use_dynamic_bsz: true, strategy: torchtitan}}",
            "must be the number of GPUs (trainer), 8",
        ),
        (
            "actor_rollout_ref: {actor: {use_dynamic_bsz: true, strategy: megatron, "
            "megatron: {dynamic_context_parallel: true}}}",
            "dynamic_context_parallel cannot be planned",
        ),
        ("trainer: {nnodes: 1}", "ppo_micro_batch_size_per_gpu is missing"),
        (
            "actor_rollout_ref: "
            "{actor: {ppo_micro_batch_size: 8, ppo_micro_batch_size_per_gpu: 8}}",
            "exclude each other",
        ),
        (
            "actor_rollout_ref: {actor: {use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 1000}}",
            "must be at least data.max_prompt_length + data.max_response_length = 1024",
        ),
        (
            "actor_rollout_ref: {actor: {use_dynamic_bsz: true, max_token_len: 8}}",
            "max_token_len is not a known key",
        ),
        ("actor_rollout_ref: {rollout: {log_prob_bsz: 1}, actor: {use_dynamic_bsz: true}}",
         "log_prob_bsz is not a known key"),
        (
            "actor_rollout_ref: "
            "{actor: {use_dynamic_bsz: true, ulysses_sequence_parallel_size: 3}}",
            "8 GPUs cannot be divided",
        ),
        (
            "actor_rollout_ref: {actor: {use_dynamic_bsz: '${oc.env:DYNAMIC}'}}",
            "${oc.env:DYNAMIC}, which cannot be resolved: it depends on the environment",
        ),
    ],
)  # fmt: skip
def test_verl_refuses(text: str, rule: str, tmp_path: Path) -> None:
    faults = refused(tmp_path, "verl", text)
    assert len(faults) >= 1, faults
    assert rule in faults[0]


def test_verl_defaults(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path, "verl", "actor_rollout_ref: {actor: {use_dynamic_bsz: true}}"
    ).settings
    assert settings.recipe.layout == Padded(max_tokens=16384)
    assert settings.log_probs is not None
    assert settings.log_probs.layout == Padded(max_tokens=16384)
    assert settings.recipe.steps == Steps(samples=256)
    assert settings.recipe.topology == Topology(dp=8)


@pytest.mark.parametrize(
    ("engine", "topology", "budget"),
    [
        ("strategy: veomni, veomni: {ulysses_parallel_size: 4}", Topology(dp=2), 65536),
        (
            "strategy: torchtitan, torchtitan: {data_parallel_shard_size: 2, "
            "tensor_parallel_size: 2, context_parallel_size: 2}",
            Topology(dp=2, tp=2, cp=2),
            32768,
        ),
        (
            "strategy: megatron, megatron: {context_parallel_size: 4}",
            Topology(dp=2, cp=4),
            65536,
        ),
    ],
)
def test_ranks_of_every_engine_are_counted(
    engine: str, topology: Topology, budget: int, tmp_path: Path
) -> None:
    text = f"actor_rollout_ref: {{actor: {{use_dynamic_bsz: true, {engine}}}}}"
    recipe = loaded(tmp_path, "verl", text).settings.recipe
    assert recipe.topology == topology
    assert recipe.layout.max_tokens == budget


def test_the_deprecated_size_is_divided_over_ranks(tmp_path: Path) -> None:
    found = loaded(tmp_path, "verl", "actor_rollout_ref: {actor: {ppo_micro_batch_size: 32}}")
    assert found.settings.recipe.layout == Padded(samples=4)
    assert any(re.search("ppo_micro_batch_size.*deprecated", note) for note in found.notes)


def test_faults_of_the_recipe_name_the_keys_behind_it(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {actor: {use_dynamic_bsz: true, strategy: megatron}}"
    (fault,) = refused(tmp_path, "verl", text, "layout.pad_to=100000")
    assert "layout.max_tokens is actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in fault


def test_sections_of_any_content_do_not_make_a_file_one_of_a_system(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text("kind: ConfigMap\ndata: {default: a, train: b}\n")
    with pytest.raises(FaultsError) as caught:
        load_file(path)
    assert "it seems" not in str(caught.value)
