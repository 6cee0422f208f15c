"""NeMo-RL: `policy.sequence_packing` and `policy.dynamic_batching`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evenstep.config.dialects.dialect import Dialect, anything, flag, number, whole, word
from evenstep.config.dialects.draft import Draft
from evenstep.config.dialects.parallel import set_topology
from evenstep.config.dialects.reader import Reader
from evenstep.core.recipe import Fp8Recipe, Topology
from evenstep.core.text import counted

PACKING, DYNAMIC = "policy.sequence_packing", "policy.dynamic_batching"
DTENSOR, MEGATRON = "policy.dtensor_cfg", "policy.megatron_cfg"
DIVISIBLE = "policy.make_sequence_length_divisible_by"
COMPILE = ("policy.torch_compile", f"{DTENSOR}.torch_compile")
ROWS = "policy.train_micro_batch_size"
NODES, GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
ANSWERS = "grpo.num_generations_per_prompt"
COLOCATED = "policy.generation.colocated.enabled"
GENERATION = "policy.generation.colocated.resources"
REWARD = "env.reward_model.resources"
DATASETS = ("data.train", "data.validation", "data.default")
DISTILLATION = "on_policy_distillation"
TEACHERS = f"{DISTILLATION}.non_colocated_teachers"
PAIRS = ("dpo", "rm")
_WITHOUT_GENERATION = ("sft", *PAIRS, "teachers")
"""Sections of algorithms that never generate; `teachers` is off-policy distillation."""

KEYS = {
    f"{PACKING}.enabled": flag(),
    f"{PACKING}.train_mb_tokens": whole(),
    f"{PACKING}.logprob_mb_tokens": whole(),
    f"{PACKING}.algorithm": word(
        "modified_first_fit_decreasing",
        "concatenative",
        "first_fit_decreasing",
        "first_fit_shuffle",
        "modified_first_fit_decreasing",
        when=f"{PACKING}.enabled",
    ),
    f"{PACKING}.sequence_length_round": whole(
        note=f"has no effect in NeMo-RL, nor here; {DIVISIBLE} is the rounding."
    ),
    f"{PACKING}.microbatch_order": word(
        "packer",
        "packer",
        "largest_first",
        note="has no effect: the plan orders micro-batches.",
        when=f"{PACKING}.enabled",
    ),
    f"{PACKING}.fuse_loss": flag(note="has no effect: a loss gets whole micro-batches."),
    f"{DYNAMIC}.enabled": flag(),
    f"{DYNAMIC}.train_mb_tokens": whole(),
    f"{DYNAMIC}.logprob_mb_tokens": whole(),
    f"{DYNAMIC}.sequence_length_round": whole(1),
    "policy.train_global_batch_size": whole(),
    ROWS: whole(),
    "policy.logprob_batch_size": whole(),
    "policy.max_total_sequence_length": whole(),
    DIVISIBLE: whole(),
    COMPILE[0]: flag(),
    COMPILE[1]: flag(),
    f"{DTENSOR}.enabled": flag(),
    f"{DTENSOR}.tensor_parallel_size": whole(1),
    f"{DTENSOR}.context_parallel_size": whole(1),
    f"{DTENSOR}.sequence_parallel": flag(),
    f"{MEGATRON}.enabled": flag(),
    f"{MEGATRON}.tensor_model_parallel_size": whole(1),
    f"{MEGATRON}.context_parallel_size": whole(1),
    f"{MEGATRON}.pipeline_model_parallel_size": whole(1),
    f"{MEGATRON}.expert_model_parallel_size": whole(1),
    f"{MEGATRON}.sequence_parallel": flag(),
    f"{MEGATRON}.fp8_cfg.enabled": flag(),
    f"{MEGATRON}.fp8_cfg.fp8_recipe": word(None),
    f"{MEGATRON}.moe_token_dispatcher_type": word(None),
    f"{MEGATRON}.moe_flex_dispatcher_backend": word(None),
    GPUS: whole(1),
    NODES: whole(1),
    COLOCATED: flag(True),
    f"{GENERATION}.gpus_per_node": whole(),
    f"{GENERATION}.num_nodes": whole(),
    **{name: anything() for name in DATASETS},
    f"{REWARD}.gpus_per_node": whole(),
    f"{REWARD}.num_nodes": whole(),
    f"{DISTILLATION}.enabled": flag(),
    f"{DISTILLATION}.teacher_model_by_agent_name": anything(),
    f"{DISTILLATION}.deduplicate_shared_teacher_checkpoints": flag(True),
    f"{TEACHERS}.enabled": flag(),
    f"{TEACHERS}.default_teacher_cfg.num_nodes": whole(1),
    f"{TEACHERS}.default_teacher_cfg.gpus_per_node": whole(8),
    f"{TEACHERS}.teacher_overrides": anything(),
    "dpo.reference_policy_kl_penalty": number(),
    ANSWERS: whole(1),
}


def read(reader: Reader) -> None:
    """Set the recipes for training and log-probabilities."""
    _check_rules(reader)
    draft = Draft()
    _set_topology(reader, draft)
    mode = PACKING if reader[f"{PACKING}.enabled"] else DYNAMIC
    enabled = reader[f"{mode}.enabled"]
    reader.train = draft.copy()
    _set_steps(reader)
    budget = f"{mode}.train_mb_tokens"
    _set_layout(reader, reader.train, mode if enabled else "", budget, ROWS)
    budget = f"{mode}.logprob_mb_tokens"
    rows = ROWS if "dpo" in reader.tree.data else "policy.logprob_batch_size"  # as in DPO's loop
    if reader.given(budget if enabled else rows):
        reader.log_probs = draft.copy()
        _set_layout(reader, reader.log_probs, mode if enabled else "", budget, rows)
    reader.share_prompts(ANSWERS)
    if "ppo" in reader.tree.data and "value" in reader.tree.data:
        reader.note(
            "value: the value model of PPO is not in this result. Rename the section to policy to "
            "convert it."
        )


def _has_pairs(reader: Reader) -> bool:
    """Whether a sample of the batch sizes is a pair of sequences."""
    return any(name in reader.tree.data for name in PAIRS)


def _set_steps(reader: Reader) -> None:
    name = "policy.train_global_batch_size"
    pairs = _has_pairs(reader)
    if reader[name] is not None:
        origin = reader.where(name) + (", 2 per pair" if pairs else "")
        reader.train.set("steps.samples", reader[name] * (1 + pairs), origin)


def _backend(reader: Reader) -> str:
    if reader[f"{MEGATRON}.enabled"]:
        return MEGATRON
    return DTENSOR if reader[f"{DTENSOR}.enabled"] else ""


def _axes(reader: Reader) -> dict[str, str]:
    """The keys of the parallel axes of the backend in use."""
    backend = _backend(reader)
    if backend == MEGATRON:
        return {
            "tp": f"{MEGATRON}.tensor_model_parallel_size",
            "cp": f"{MEGATRON}.context_parallel_size",
            "pp": f"{MEGATRON}.pipeline_model_parallel_size",
            "sequence_parallel": f"{MEGATRON}.sequence_parallel",
        }
    if backend == DTENSOR:
        return {
            "tp": f"{DTENSOR}.tensor_parallel_size",
            "cp": f"{DTENSOR}.context_parallel_size",
            "sequence_parallel": f"{DTENSOR}.sequence_parallel",
        }
    return {}


def _check_rules(reader: Reader) -> None:
    packing, dynamic = reader[f"{PACKING}.enabled"], reader[f"{DYNAMIC}.enabled"]
    axes = _axes(reader)
    cp_key, pp_key = axes.get("cp", ""), axes.get("pp", "")
    cp = reader[cp_key] if cp_key else 1
    pp = reader[pp_key] if pp_key else 1
    if packing and dynamic:
        reader.refuse(
            f"{PACKING}.enabled and {DYNAMIC}.enabled exclude each other. Enable one of them.",
            f"{PACKING}.enabled",
            f"{DYNAMIC}.enabled",
        )
    if dynamic and pp > 1:
        reader.refuse(
            f"{DYNAMIC} needs a pipeline of size 1, got {pp_key}={pp}. Use {PACKING}.", pp_key
        )
    for key in COMPILE:
        if dynamic and reader[key]:
            reader.refuse(
                f"{DYNAMIC} changes shapes, so it cannot be used with {key}. Disable one of them.",
                key,
            )
    _check_backend(reader, packing, cp_key, cp)
    if _has_pairs(reader) and (packing or dynamic):
        mode = PACKING if packing else DYNAMIC
        algorithm = "DPO" if "dpo" in reader.tree.data else "a reward model"
        reader.refuse(
            f"{algorithm} cannot be trained with {mode}.enabled in NeMo-RL: pairs would be "
            f"separated. Disable it, or write a native recipe with groups.",
            f"{mode}.enabled",
        )


def _check_backend(reader: Reader, packing: bool, cp_key: str, cp: int) -> None:
    backend = _backend(reader)
    if reader[f"{MEGATRON}.enabled"] and reader[f"{DTENSOR}.enabled"]:
        reader.refuse(
            f"{MEGATRON}.enabled and {DTENSOR}.enabled are both true. Enable one backend.",
            f"{MEGATRON}.enabled",
            f"{DTENSOR}.enabled",
        )
    if cp > 1 and backend == MEGATRON and not packing:
        reader.refuse(f"{cp_key}={cp} needs {PACKING}.enabled with Megatron. Enable it.", cp_key)
    if cp > 1 and backend == DTENSOR and packing:
        reader.refuse(
            f"{cp_key}={cp} cannot be combined with {PACKING}.enabled on DTensor. Disable one of "
            f"them, or use Megatron.",
            cp_key,
        )


def _set_topology(reader: Reader, draft: Draft) -> None:
    axes = _axes(reader)
    world, origin = None, "cluster"
    if reader.ranks is None and (reader.given(GPUS) or reader.given(NODES)):
        world, origin = _training_gpus(reader)
    set_topology(reader, draft, axes, world, origin)
    multiple = reader[DIVISIBLE]
    cp = reader[axes["cp"]] if axes else 1
    sharded = bool(axes) and reader[axes["sequence_parallel"]]
    unit = (2 * cp if cp > 1 else 1) * (reader[axes["tp"]] if sharded else 1)
    if multiple is not None and multiple % unit:
        rule = f"a multiple of {unit} (2cp · tp; tp with sequence parallelism)"
        if reader[f"{PACKING}.enabled"] and _backend(reader) == MEGATRON:
            reader.refuse(
                f"{DIVISIBLE} must be {rule}, got {multiple}. Use {math.lcm(multiple, unit)}.",
                DIVISIBLE,
                *axes.values(),
            )
        else:
            reader.note(f"{reader.where(DIVISIBLE)}: is {multiple}, not {rule}; rows are padded.")
    experts = f"{MEGATRON}.expert_model_parallel_size"
    if _backend(reader) == MEGATRON and reader[experts] == 1:
        draft.set("sync_every", "step", "derived: Megatron reduces gradients once per step")


# The GPUs of the policy ---------------------------------------------------------------------------


def _training_gpus(reader: Reader) -> tuple[int | None, str]:
    """How many GPUs train, and where that comes from: the cluster without all other workers.

    Reward models, teachers and generation have nodes of their own, or share the only node.
    None if the file contradicts itself.

    cluster 4 x 8, generation on 1 node       24 GPUs
    cluster 1 x 8, generation on 6 of its GPUs 2 GPUs
    """
    gpus, nodes = reader[GPUS], reader[NODES]
    single_controller = "async_rl" in reader.tree.data
    parts = []
    if not any(name in reader.tree.data for name in _WITHOUT_GENERATION):
        if not single_controller and "distillation" not in reader.tree.data:
            reward_nodes, reward_gpus = _reward_resources(reader)
            if nodes == 1 and reward_gpus:
                gpus -= reward_gpus
                parts.append(f"{counted(reward_gpus, 'GPU')} for the reward model")
            elif nodes > 1 and reward_nodes:
                nodes -= reward_nodes
                parts.append(f"{counted(reward_nodes, 'node')} for the reward model")
            teacher_nodes = _teacher_nodes(reader)
            if teacher_nodes:
                nodes -= teacher_nodes
                parts.append(f"{counted(teacher_nodes, 'node')} for teachers")
        if not reader[COLOCATED] and nodes > 0:
            shared = _generation_gpus(reader) if nodes == 1 else 0
            separate = _generation_nodes(reader, single_controller) if nodes > 1 else 0
            gpus, nodes = gpus - shared, nodes - separate
            reserved = counted(shared, "GPU") if shared else counted(separate, "node")
            parts.append(f"{reserved} for generation")
    origin = f"cluster without {' and '.join(parts)}" if parts else "cluster"
    if gpus > 0 and nodes > 0:
        return gpus * nodes, origin
    reader.refuse(
        f"{NODES}={reader[NODES]} with {GPUS}={reader[GPUS]} leaves no GPU for training "
        f"({', '.join(parts)}). Raise {NODES} or {GPUS}.",
        NODES,
        GPUS,
    )
    return None, origin


def _generation_gpus(reader: Reader) -> int:
    """The GPUs that generate on the only node of the policy."""
    gpus, nodes = f"{GENERATION}.gpus_per_node", f"{GENERATION}.num_nodes"
    reader.need(gpus, f"{COLOCATED} is false and the policy has one node")
    if (reader[nodes] or 1) > 1:
        reader.refuse(f"{nodes} must be 1 or null on one node, got {reader[nodes]}.", nodes)
    return reader[gpus] or 0


def _generation_nodes(reader: Reader, single_controller: bool) -> int:
    """The nodes that generate, with all their GPUs."""
    gpus, nodes = f"{GENERATION}.gpus_per_node", f"{GENERATION}.num_nodes"
    if single_controller:
        return reader[nodes] or 1
    reader.need(nodes, f"{COLOCATED} is false and {NODES} is {reader[NODES]}")
    reader.need(gpus, f"{COLOCATED} is false")
    if reader.given(gpus) and reader[gpus] != reader[GPUS]:
        reader.refuse(
            f"{gpus}={reader[gpus]} must be {GPUS}={reader[GPUS]}: with several nodes, whole nodes "
            f"generate.",
            gpus,
            GPUS,
        )
    return reader[nodes] or 0


def _reward_resources(reader: Reader) -> tuple[int, int]:
    """The nodes of a reward model, and its GPUs on each; 0 if no dataset uses it."""
    names: list[Any] = []
    for name in DATASETS:
        section = reader[name]
        if isinstance(section, Mapping):
            names.append(reader.below(name, "env_name"))
        elif isinstance(section, list):
            names += [reader.below(name, str(at), "env_name") for at in range(len(section))]
    if "reward_model" not in names:
        return 0, 0
    nodes, gpus = f"{REWARD}.num_nodes", f"{REWARD}.gpus_per_node"
    for name in (nodes, gpus):
        reader.need(name, "a dataset has env_name: reward_model")
    return reader[nodes] or 0, reader[gpus] or 0


def _teacher_nodes(reader: Reader) -> int:
    """The nodes of teachers with GPUs of their own; one checkpoint is loaded once."""
    name = f"{DISTILLATION}.teacher_model_by_agent_name"
    models = reader[name]
    enabled = reader[f"{DISTILLATION}.enabled"] and reader[f"{TEACHERS}.enabled"]
    if not enabled or not isinstance(models, Mapping):
        return 0
    total, loaded = 0, set()
    for alias in models:
        model = reader.below(name, alias)
        if model in loaded and reader[f"{DISTILLATION}.deduplicate_shared_teacher_checkpoints"]:
            continue
        loaded.add(model)
        nodes = reader.below(f"{TEACHERS}.teacher_overrides", alias, "num_nodes")
        nodes = reader[f"{TEACHERS}.default_teacher_cfg.num_nodes"] if nodes is None else nodes
        if not isinstance(nodes, int) or nodes < 1:
            reader.refuse(
                f"{TEACHERS}.teacher_overrides.{alias}.num_nodes must be an integer of at least 1, "
                f"got {nodes!r}.",
                f"{TEACHERS}.teacher_overrides",
            )
            continue
        total += nodes
    return total


# Layouts -----------------------------------------------------------------------------------------


def _set_layout(reader: Reader, draft: Draft, mode: str, budget: str, rows: str) -> None:
    unit, rounding = reader[DIVISIBLE] or 1, reader.where(DIVISIBLE)
    if not mode:
        draft.set("layout.kind", "padded", "derived: neither packing nor dynamic batching")
        size = reader.need(rows, f"neither {PACKING} nor {DYNAMIC} is enabled")
        pairs = _has_pairs(reader) and rows == ROWS
        origin = reader.where(rows) + (", 2 per pair" if pairs else "")
        draft.set("layout.samples", size * (1 + pairs), origin)
        draft.set("balance", "none", "derived: fixed micro-batches in order")
    else:
        tokens = reader.need(budget, f"{mode}.enabled is true")
        draft.set("layout.max_tokens", tokens, reader.where(budget))
        _note_longest(reader, budget, tokens)
    if mode == PACKING:
        draft.set("layout.kind", "packed", reader.where(f"{PACKING}.enabled"))
        reader.take(draft, "layout.packer", f"{PACKING}.algorithm")
        if _backend(reader) == MEGATRON:
            unit, rounding = _kernel_multiple(reader, unit, rounding)
    if mode == DYNAMIC:
        draft.set("layout.kind", "padded", reader.where(f"{DYNAMIC}.enabled"))
        name = f"{DYNAMIC}.sequence_length_round"
        if reader[name] % unit == 0:
            unit, rounding = reader[name], reader.where(name)
        else:
            unit = math.lcm(unit, reader[name])
            rounding = f"derived: multiple of {name} and {DIVISIBLE}"
    if unit > 1:
        draft.set("layout.round_to", unit, rounding)


def _kernel_multiple(reader: Reader, unit: int, origin: str) -> tuple[int, str]:
    """What FP8 and HybridEP need the width of a pack to be divisible by, besides `unit`."""
    kinds: dict[str, Fp8Recipe] = {"mxfp8": "mxfp8", "blockwise": "blockwise"}
    kind: Fp8Recipe
    name, backend = f"{MEGATRON}.fp8_cfg.fp8_recipe", f"{MEGATRON}.moe_flex_dispatcher_backend"
    flex = reader[f"{MEGATRON}.moe_token_dispatcher_type"] == "flex"
    if flex and reader[backend] == "hybridep":
        kind, name = "blockwise", backend  # 128 tokens per rank, as for FP8 in blocks
    elif reader[f"{MEGATRON}.fp8_cfg.enabled"]:
        kind = kinds.get(str(reader[name]).lower(), "tensorwise")
    else:
        return unit, origin
    axes = _axes(reader)
    topology = Topology(
        cp=reader[axes["cp"]],
        tp=reader[axes["tp"]],
        sequence_parallel=reader[axes["sequence_parallel"]] and reader[axes["tp"]] > 1,
    )
    multiple = topology.fp8_multiple(kind)
    return math.lcm(unit, multiple), f"derived: {multiple} for {reader.where(name)}"


def _note_longest(reader: Reader, budget: str, tokens: int) -> None:
    name = "policy.max_total_sequence_length"
    if reader.given(name) and reader[name] > tokens:
        reader.note(
            f"{name} is {reader[name]}, more than {budget}={tokens}: longer sequences are refused "
            f"(overflow: error)."
        )


NEMO_RL = Dialect(
    name="nemo-rl",
    system="NeMo-RL",
    keys=KEYS,
    read=read,
    strict=(PACKING, DYNAMIC),
    others=frozenset({"ppo"}),
    interpolates=True,
)
