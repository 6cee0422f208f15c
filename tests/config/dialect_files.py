"""Configurations of other systems that tests load: those of their documents, and larger ones."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from evenstep.config import FaultsError, Loaded, load_file


@dataclass(frozen=True)
class Case:
    dialect: str
    text: str
    suffix: str = ".yaml"

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.dialect}{self.suffix}"
        path.write_text(self.text, "utf-8")
        return path

    def load(self, folder: Path, *overrides: str) -> Loaded:
        return load_file(self.write(folder), overrides, dialect=self.dialect)


def loaded(folder: Path, dialect: str, text: str, *overrides: str) -> Loaded:
    suffix = ".toml" if dialect == "cosmos-rl" else ".yaml"
    path = folder / f"file{suffix}"
    path.write_text(text)
    return load_file(path, overrides, dialect=dialect)


def refused(folder: Path, dialect: str, text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(FaultsError) as caught:
        loaded(folder, dialect, text, *overrides)
    return caught.value.faults


COSMOS_DEFAULTS = Case(
    "cosmos-rl",
    """
[train]
max_num_steps = 100
sequence_packing = false

[train.train_policy]
enable_dp_load_balancing = true
load_balanced_pool_size = 32
load_balanced_max_tokens_for_batch = 32768
load_balanced_batching_strategy = "prefer_closest"  # or "prefer_first"
load_balanced_batches_per_optimizer_step = 1
""",
    ".toml",
)
COSMOS_PADDED = Case(
    "cosmos-rl",
    """
[train]
max_num_steps = 1000

[train.train_policy]
enable_dp_load_balancing = true
load_balanced_pool_size = 64
load_balanced_max_tokens_for_batch = 65536
load_balanced_batching_strategy = "prefer_closest"
load_balanced_batches_per_optimizer_step = 4
dataloader_seed = 42
""",
    ".toml",
)
COSMOS_PACKED = Case(
    "cosmos-rl",
    """
[train]
sequence_packing = true
max_num_steps = 1000

[train.train_policy]
enable_dp_load_balancing = true
load_balanced_pool_size = 64
load_balanced_max_tokens_for_batch = 65536
load_balanced_batches_per_optimizer_step = 4
dataloader_seed = 42
""",
    ".toml",
)
NEMO_PACKED = Case(
    "nemo-rl",
    """
policy:
  sequence_packing:
    enabled: True
    train_mb_tokens: 2048
    logprob_mb_tokens: 2048
    algorithm: "modified_first_fit_decreasing"
    sequence_length_round: 64
  dynamic_batching:
    enabled: False
""",
)
NEMO_DYNAMIC = Case(
    "nemo-rl",
    """
policy:
  dynamic_batching:
    enabled: True
    train_mb_tokens: 4096
    logprob_mb_tokens: 8192
    sequence_length_round: 64
  sequence_packing:
    enabled: False
""",
)
NEMO_MEGATRON = Case(
    "nemo-rl",
    """
grpo: {num_prompts_per_step: 32, seed: 42}
policy:
  model_name: some/model
  train_global_batch_size: 512
  train_micro_batch_size: 4
  logprob_batch_size: 8
  max_total_sequence_length: 512
  make_sequence_length_divisible_by: ${mul:2, ${mul:${.megatron_cfg.context_parallel_size}, 4}}
  dtensor_cfg: {enabled: false, tensor_parallel_size: 8}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    context_parallel_size: 2
    pipeline_model_parallel_size: 2
    sequence_parallel: true
    optimizer: {lr: 5.0e-6, clip_grad: "${policy.max_grad_norm}"}
  dynamic_batching: {enabled: False}
  sequence_packing:
    enabled: True
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}
    algorithm: FIRST_FIT_DECREASING
  max_grad_norm: 1.0
cluster: {gpus_per_node: 8, num_nodes: 2}
""",
)
ROLL_FULL = Case(
    "roll",
    """
actor_train:
  system_envs: {NVTE_FLASH_ATTN: '1', NVTE_FUSED_ATTN: '0', NVTE_UNFUSED_ATTN: '0'}
  model_args: {attn_implementation: fa2, disable_gradient_checkpointing: false, model_type: ~}
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 64
    warmup_steps: 10
    lr_scheduler_type: cosine
  data_args: {template: qwen2_5}
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      expert_model_parallel_size: 1
      use_distributed_optimizer: true
  device_mapping: list(range(0,8))
  infer_batch_size: 2
  use_dynamic_batching_in_train: true
  max_tokens_per_microbatch_in_train: 8192
  sequence_length_round_in_train: 128
  use_dynamic_batching_in_infer: true
  max_tokens_per_microbatch_in_infer: 16384
  sequence_length_round_in_infer: 128

actor_infer:
  generating_args: {max_new_tokens: 128, top_p: 0.99, temperature: 0.99}
  strategy_args:
    strategy_name: vllm
    strategy_config: {gpu_memory_utilization: 0.8, block_size: 16, load_format: auto}
  device_mapping: list(range(0,8))

reference:
  model_args: {attn_implementation: fa2, dtype: bf16, model_type: ~}
  strategy_args:
    strategy_name: megatron_infer
    strategy_config: ~
  device_mapping: list(range(0,8))
  infer_batch_size: 2
  use_dynamic_batching_in_infer: true
  max_tokens_per_microbatch_in_infer: 16384
  sequence_length_round_in_infer: 128
""",
)
ROLL_PACKED = Case(
    "roll",
    """
actor_train:
  training_args: {per_device_train_batch_size: 4, gradient_accumulation_steps: 8}
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      virtual_pipeline_model_parallel_size: 2
  device_mapping: [0, 1, 2, 3, 4, 5, 6, 7]
  infer_batch_size: 4
  use_sequence_packing: true
  sequence_packing_args:
    algorithm: load_balance
    max_packed_sequence_length_train: 16384
    max_packed_sequence_length_forward: 32768
""",
)
VEOMNI_ON = Case(
    "veomni",
    """
train: {dyn_bsz: true, micro_batch_size: 2, pad_to_length: true}
data: {max_seq_len: 4}
""",
)
VEOMNI_OFF = Case("veomni", "train: {dyn_bsz: false, micro_batch_size: 2}\n")
VEOMNI_SFT_PADDED = Case(
    "veomni", "train: {dyn_bsz: false, micro_batch_size: 2, pad_packed_to_length: 8}\n"
)
VEOMNI_DYNAMIC_PADDED = Case(
    "veomni",
    """
train: {dyn_bsz: true, pad_packed_to_length: 10}
data: {max_seq_len: 10}
""",
)
VEOMNI_EFFECTIVE = Case(
    "veomni",
    """
model: {model_path: some/model}
train:
  micro_batch_size: 2
  global_batch_size: 64
  max_steps: 500
  bsz_warmup_ratio: 0.02
  dyn_bsz_count_mode: effective
  accelerator: {ulysses_size: 2, dp_shard_size: 8, fsdp_config: {fsdp_mode: fsdp2}}
data: {max_seq_len: 4096, dyn_bsz_buffer_size: 500, train_size: 1_000_000_000}
""",
)
FAST_LLM = Case(
    "fast-llm",
    """
model:
  distributed: {sequence_data_parallel: 2, world_size: 8, compute_dtype: bfloat16}
  base_model: {head: {}}
data: {micro_batch_size: 10000, datasets: {}}
schedule:
  depth_first_micro_batches: 48
  docs_per_step: 256
optimizer: {beta_1: 0.9}
""",
)
FAST_LLM_LAZY = Case("fast-llm", "schedule: {per_micro_batch_normalization: true}\n")
VERL_DYNAMIC = Case(
    "verl",
    """
actor_rollout_ref:
  hybrid_engine: true
  model: {path: some/model, use_remove_padding: true}
  actor:
    strategy: fsdp
    ppo_mini_batch_size: 256
    ppo_micro_batch_size: null
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 16384
    ulysses_sequence_parallel_size: 2
    clip_ratio: 0.2
  rollout:
    n: 8
    log_prob_use_dynamic_bsz: ${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}
    log_prob_max_token_len_per_gpu: ${mul:2,${..actor.ppo_max_token_len_per_gpu}}
  ref:
    log_prob_use_dynamic_bsz: ${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}
    log_prob_max_token_len_per_gpu: ${..rollout.log_prob_max_token_len_per_gpu}
critic: {ppo_max_token_len_per_gpu: 32768}
data: {max_prompt_length: 1024, max_response_length: 4096, train_batch_size: 1024}
trainer: {balance_batch: true, nnodes: 2, n_gpus_per_node: 8}
""",
)
VERL_FIXED = Case(
    "verl",
    """
actor_rollout_ref:
  actor: {ppo_micro_batch_size_per_gpu: 4, strategy: megatron}
  rollout: {log_prob_micro_batch_size_per_gpu: 8}
trainer: {balance_batch: false, n_gpus_per_node: 4}
""",
)

CASES = {name: case for name, case in list(globals().items()) if isinstance(case, Case)}
