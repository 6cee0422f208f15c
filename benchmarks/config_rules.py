"""The sizes of a training run, computed from another system's configuration a second time.

Values are resolved by OmegaConf and Hydra, and the arithmetic is written from each system's code,
independently of `evenstep.config`. `Sizes` have the paths of native settings.
"""

from __future__ import annotations

import math
import tomllib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import omegaconf
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

Get = Callable[..., Any]
"""The resolved value at a dotted path, or a default."""
Sizes = dict[str, Any]


class RefusedError(Exception):
    """The system itself refuses the file."""


class OtherFileError(Exception):
    """The file does not describe a training run."""


def _get(config: Any) -> Get:
    def get(path: str, default: Any = None) -> Any:
        value = OmegaConf.select(config, path, throw_on_missing=False)
        if omegaconf.OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=False)
        return default if value is None else value

    return get


def _divided(number: int, by: int, rule: str) -> int:
    if number % by:
        raise RefusedError(f"{rule}: {number} / {by}")
    return number // by


# Files -------------------------------------------------------------------------------------------


def merged_file(path: Path, _: Sequence[str] = ()) -> Get:
    """A file of NeMo-RL, with the files that it builds on."""
    for name, function in (
        ("add", lambda a, b: a + b),
        ("mul", lambda a, b: a * b),
        ("div", lambda a, b: a / b),
        ("max", max),
        ("min", min),
    ):
        OmegaConf.register_new_resolver(name, function, replace=True)
    return _get(_inherited(path))


def _inherited(path: Path) -> Any:
    config = OmegaConf.load(path)
    if not isinstance(config, omegaconf.DictConfig):
        raise OtherFileError("a list")
    parents = config.pop("defaults", [])
    base = OmegaConf.create({})
    for parent in [parents] if isinstance(parents, str) else parents:
        base = _over(base, _inherited(path.parent / str(parent)))
    return _over(base, config)


def _over(base: Any, config: Any) -> Any:
    for key in list(config):
        if OmegaConf.is_missing(config, key):
            continue
        node = config._get_node(key)
        section = isinstance(node, omegaconf.DictConfig) and not node._is_interpolation()
        if section and not node._is_none() and node.get("_override_", False):
            node.pop("_override_")
            base.pop(key, None)
    return OmegaConf.merge(base, config)


def composed_file(path: Path, overrides: Sequence[str] = ()) -> Get:
    """A file that Hydra composes."""
    GlobalHydra.instance().clear()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            hydra.initialize_config_dir(str(path.parent.resolve()), version_base=None),
        ):
            return _get(hydra.compose(path.stem, list(overrides)))
    except hydra.errors.HydraException as error:
        raise RefusedError(str(error).splitlines()[0]) from None


def plain_file(path: Path, _: Sequence[str] = ()) -> Get:
    """A file that stands alone, in YAML or TOML."""
    if path.suffix == ".toml":
        return _get(OmegaConf.create(tomllib.loads(path.read_text())))
    config = OmegaConf.load(path)
    if not isinstance(config, omegaconf.DictConfig):
        raise OtherFileError("a list")
    return _get(config)


# NeMo-RL -----------------------------------------------------------------------------------------


def nemo_rl(get: Get) -> Sizes:
    """`policy` of any algorithm."""
    if get("policy.train_global_batch_size") is None:
        raise OtherFileError("no policy is trained")
    megatron = get("policy.megatron_cfg.enabled", False)
    at = "policy.megatron_cfg" if megatron else "policy.dtensor_cfg"
    tp = get(f"{at}.tensor_model_parallel_size" if megatron else f"{at}.tensor_parallel_size", 1)
    cp = get(f"{at}.context_parallel_size", 1)
    pp = get(f"{at}.pipeline_model_parallel_size", 1) if megatron else 1
    rule = "World size must be divisible by PP * CP * TP"
    sequences = 2 if get("dpo") is not None or get("rm") is not None else 1
    sizes: Sizes = {
        "topology.dp": _divided(_nemo_rl_gpus(get), tp * cp * pp, rule),
        "steps.samples": get("policy.train_global_batch_size") * sequences,
    }
    packing = get("policy.sequence_packing.enabled", False)
    mode = "policy.sequence_packing" if packing else "policy.dynamic_batching"
    if packing and megatron:
        unit = (2 * cp if cp > 1 else 1) * (tp if get(f"{at}.sequence_parallel", False) else 1)
        _divided(get("policy.make_sequence_length_divisible_by"), unit, "minimum_pad_factor")
    if packing:
        sizes["layout.kind"] = "packed"
        shares = get("grpo.num_generations_per_prompt", 1) > 1 and cp == pp == 1
        sizes["layout.packer"] = None if shares else get(f"{mode}.algorithm").lower()
    if get(f"{mode}.enabled", False):
        sizes["layout.max_tokens"] = int(get(f"{mode}.train_mb_tokens"))
        if get(f"{mode}.logprob_mb_tokens") is not None:
            sizes["log_probs.layout.max_tokens"] = int(get(f"{mode}.logprob_mb_tokens"))
    else:
        sizes["layout.samples"] = get("policy.train_micro_batch_size") * sequences
    return sizes


def _nemo_rl_gpus(get: Get) -> int:
    """GPUs of the cluster that trains: nodes x GPUs per node."""
    all_nodes, gpus = get("cluster.num_nodes"), get("cluster.gpus_per_node")
    nodes = all_nodes
    single_controller = get("async_rl") is not None
    grpo = get("grpo") is not None or get("ppo") is not None
    generates = grpo or (get("distillation") is not None and get("teachers") is None)
    if not generates:
        return int(nodes * gpus)
    if grpo and not single_controller:
        if "reward_model" in _environments(get):
            nodes -= 0 if all_nodes == 1 else get("env.reward_model.resources.num_nodes")
            gpus -= get("env.reward_model.resources.gpus_per_node") if all_nodes == 1 else 0
        nodes -= _teacher_nodes(get)
    if not get("policy.generation.colocated.enabled"):
        own = get("policy.generation.colocated.resources.num_nodes")
        if nodes == 1:
            gpus -= get("policy.generation.colocated.resources.gpus_per_node")
        else:
            nodes -= own or 1
    if nodes < 1 or gpus < 1:
        raise RefusedError("no GPUs for training")
    return int(nodes * gpus)


def _environments(get: Get) -> set[str]:
    names = set()
    for section in ("train", "validation", "default"):
        data = get(f"data.{section}")
        if isinstance(data, dict):
            names.add(get(f"data.{section}.env_name"))
        for at in range(len(data) if isinstance(data, list) else 0):
            names.add(get(f"data.{section}[{at}].env_name"))
    return names


def _teacher_nodes(get: Get) -> int:
    at = "on_policy_distillation"
    if not get(f"{at}.enabled", False) or not get(f"{at}.non_colocated_teachers.enabled", False):
        return 0
    teachers = get(f"{at}.teacher_model_by_agent_name", {})
    one_each = not get(f"{at}.deduplicate_shared_teacher_checkpoints", True)
    models = [get(f"{at}.teacher_model_by_agent_name.{alias}") for alias in teachers]
    separate = f"{at}.non_colocated_teachers"
    default = get(f"{separate}.default_teacher_cfg.num_nodes", 1)
    return sum(
        get(f"{separate}.teacher_overrides.{alias}.num_nodes", default)
        for number, alias in enumerate(teachers)
        if one_each or models[number] not in models[:number]
    )


# ROLL --------------------------------------------------------------------------------------------


def roll(get: Get) -> Sizes:
    """The worker that is trained, or else one that computes log-probabilities."""
    workers = ("actor_train", "sft_train", "student", "student_train", "reference", "critic")
    worker = next((name for name in workers if get(name) is not None), "")
    if not worker:
        raise OtherFileError("no worker is trained")
    if worker == "reference" and get("actor_train") is None and get("reference") is None:
        raise OtherFileError("no worker is trained")
    config = f"{worker}.strategy_args.strategy_config"
    strategy = get(f"{worker}.strategy_args.strategy_name", "")
    group = math.prod(
        get(f"{config}.{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline")
    ) * get(f"{config}.context_parallel_size", 1)
    if strategy.startswith("fsdp2"):
        group = get(f"{worker}.model_args.ulysses_size", 1)
    devices = get(f"{worker}.device_mapping")
    count = len(_devices(devices)) // get(f"{worker}.num_gpus_per_worker", 1) if devices else None
    dp = 1 if count is None else _divided(count, group, "world size")
    sequences = 2 if get("chosen_key") is not None else 1
    batch = get(f"{worker}.training_args.per_device_train_batch_size", 8) * sequences
    steps = get(f"{worker}.training_args.gradient_accumulation_steps", 1)
    sizes: Sizes = {"topology.dp": dp, "steps.samples": batch * steps * dp}
    packing = get(f"{worker}.use_sequence_packing", False)
    if get(f"{worker}.use_dynamic_batching_in_train", False):
        sizes["layout.max_tokens"] = get(f"{worker}.max_tokens_per_microbatch_in_train")
    elif packing and get(f"{worker}.sequence_packing_args.algorithm", "none") != "none":
        at = f"{worker}.sequence_packing_args.max_packed_sequence_length_train"
        sizes["layout.max_tokens"] = get(at)
    else:
        sizes["layout.samples"] = batch
    return sizes


def _devices(text: Any) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    return list(eval(text, {"__builtins__": {"list": list, "range": range}}))


# verl --------------------------------------------------------------------------------------------


def verl(get: Get) -> Sizes:
    """The actor."""
    actor = "actor_rollout_ref.actor"
    if get(actor) is None:
        raise OtherFileError("no actor is trained")
    gpus = get("trainer.nnodes") * get("trainer.n_gpus_per_node")
    strategy = get(f"{actor}.strategy")
    if strategy == "megatron":
        names = ("tensor_model", "pipeline_model", "context")
        sizes_ = [get(f"{actor}.megatron.{name}_parallel_size", 1) for name in names]
        group, width = math.prod(sizes_), sizes_[2]
    elif strategy == "torchtitan":
        keys = ["tensor_parallel", "pipeline_parallel", "context_parallel"]
        keys += ["data_parallel_shard", "data_parallel_replicate"]
        sizes_ = [get(f"{actor}.torchtitan.{key}_size", 1) for key in keys]
        if math.prod(sizes_) != gpus:
            raise RefusedError("dp_replicate * dp_shard * cp * tp * pp != WORLD_SIZE")
        group, width = math.prod(sizes_[:3]), sizes_[0]
    elif strategy == "fsdp_turbo":
        raise OtherFileError("fsdp_turbo, a library of its own, counts the ranks")
    elif strategy == "veomni":
        group = width = get(f"{actor}.veomni.ulysses_parallel_size", 1)
    else:
        plain = get(f"{actor}.ulysses_sequence_parallel_size", 1)
        group = width = max(plain, get(f"{actor}.fsdp_config.ulysses_sequence_parallel_size", 1))
    sizes: Sizes = {
        "topology.dp": _divided(gpus, group, "world size"),
        "steps.samples": get(f"{actor}.ppo_mini_batch_size") * get("actor_rollout_ref.rollout.n"),
        "layout.kind": "packed" if get("actor_rollout_ref.model.use_remove_padding") else "padded",
    }
    if get(f"{actor}.use_dynamic_bsz"):
        sizes["layout.max_tokens"] = get(f"{actor}.ppo_max_token_len_per_gpu") * width
    elif get(f"{actor}.ppo_micro_batch_size_per_gpu") is not None:
        sizes["layout.samples"] = get(f"{actor}.ppo_micro_batch_size_per_gpu")
    elif get(f"{actor}.ppo_micro_batch_size") is None:
        raise RefusedError("Please set at least one of 'actor.ppo_micro_batch_size_per_gpu'")
    if get("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz"):
        budget = get("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu")
        sizes["log_probs.layout.max_tokens"] = budget * width
    return sizes


# Others ------------------------------------------------------------------------------------------


def veomni(get: Get) -> Sizes:
    """`train` and `data`; the number of GPUs is known only with `dp_shard_size`."""
    if get("train") is None:
        raise OtherFileError("nothing is trained")
    at = "train.accelerator" if get("model.accelerator") is None else "model.accelerator"
    shards = get(f"{at}.dp_shard_size", -1)
    dp = shards * max(get(f"{at}.dp_replicate_size", 1), 1) if shards > 0 else 1
    micro, longest = get("train.micro_batch_size", 1), get("data.max_seq_len", 2048)
    batch = get("train.global_batch_size", micro * dp)
    count = _divided(batch, micro * dp, "`global_batch_size` should be a multiple")
    if not get("train.dyn_bsz", True):
        return {"topology.dp": dp, "layout.samples": micro, "steps.samples": batch}
    sizes: Sizes = {"topology.dp": dp, "steps.micro_batches": count}
    if get("train.dyn_bsz_count_mode", "total") == "total":
        sizes["layout.max_tokens"] = micro * longest
    ratio = get("train.bsz_warmup_ratio", 0)
    tokens = int(get("data.train_size", 10_000_000) * (1 + ratio / 2))
    steps = min(math.ceil(tokens / (batch * longest)), get("train.max_steps", math.inf))
    main = get("train.dyn_bsz_runtime", "main") == "main"
    sizes["stream.pool.warmup_steps"] = int(steps * ratio) if main else 0
    return sizes


def fast_llm(get: Get) -> Sizes:
    """`data`, `schedule` and `model.distributed`."""
    if get("training") is None or get("model") is None:
        raise OtherFileError("nothing is trained")
    if get("batch") is not None:
        raise RefusedError("unknown field: batch")
    at = "model.distributed"
    group = math.prod(
        get(f"{at}.{name}", 1)
        for name in ("tensor_parallel", "pipeline_parallel", "sequence_data_parallel")
    )
    sizes: Sizes = {
        "topology.dp": _divided(get(f"{at}.world_size", group), group, "world_size"),
        "layout.pad_to": get("data.micro_batch_size", 2048),
    }
    if get("schedule.docs_per_step") is None:
        depth, breadth = (get(f"schedule.{n}_first_micro_batches", 1) for n in ("depth", "breadth"))
        sizes["steps.micro_batches"] = depth * breadth
    return sizes


def cosmos_rl(get: Get) -> Sizes:
    """`train` and `policy.parallelism`."""
    policy = get("train.train_policy")
    if get("train.train_batch_per_replica") is None and policy is None:
        raise OtherFileError("nothing is trained")
    at = "policy.parallelism"
    shards, replicas = get(f"{at}.dp_shard_size", -1), get(f"{at}.n_init_replicas", 1)
    dp = shards * get(f"{at}.dp_replicate_size", 1) * replicas if shards > 0 else 1
    named = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
    inferred = "grpo" if policy is None or any(name in policy for name in named) else "sft"
    grpo = get("train.train_policy.type", inferred) == "grpo"
    batch = get("train.train_batch_per_replica", 8)
    sizes: Sizes = {"topology.dp": dp}
    if get("train.train_policy.enable_dp_load_balancing", False):
        return sizes
    samples = batch * (replicas if grpo else dp)
    update = get("train.train_policy.batch_size_per_optimize") if grpo else None
    sizes["steps.samples"] = samples if update is None else min(samples, update * dp)
    if grpo and get("train.train_policy.max_token_len_per_mini_batch", 0):
        budget = get("train.train_policy.max_token_len_per_mini_batch")
        sizes["layout.max_tokens"] = budget * get(f"{at}.cp_size", 1)
    else:
        sizes["layout.samples"] = get("train.train_policy.mini_batch", 2)
    return sizes
