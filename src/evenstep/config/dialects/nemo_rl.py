"""NeMo-RL: `policy.sequence_packing` and `policy.dynamic_batching`."""

from __future__ import annotations

import math

from evenstep.config.dialects.dialect import Dialect, flag, number, whole, word
from evenstep.config.dialects.draft import Draft
from evenstep.config.dialects.parallel import set_topology
from evenstep.config.dialects.reader import Reader
from evenstep.core.topology import Fp8Recipe, Topology

PACKING, DYNAMIC = "policy.sequence_packing", "policy.dynamic_batching"
DTENSOR, MEGATRON = "policy.dtensor_cfg", "policy.megatron_cfg"
DIVISIBLE = "policy.make_sequence_length_divisible_by"
COMPILE = ("policy.torch_compile", f"{DTENSOR}.torch_compile")

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
    ),
    f"{PACKING}.sequence_length_round": whole(
        note=f"has no effect in NeMo-RL, nor here; {DIVISIBLE} is the rounding."
    ),
    f"{PACKING}.microbatch_order": word(
        "packer", "packer", "largest_first", note="has no effect: the plan orders micro-batches."
    ),
    f"{PACKING}.fuse_loss": flag(note="has no effect: a loss gets whole micro-batches."),
    f"{DYNAMIC}.enabled": flag(),
    f"{DYNAMIC}.train_mb_tokens": whole(),
    f"{DYNAMIC}.logprob_mb_tokens": whole(),
    f"{DYNAMIC}.sequence_length_round": whole(1),
    "policy.train_global_batch_size": whole(),
    "policy.train_micro_batch_size": whole(),
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
    "cluster.gpus_per_node": whole(1),
    "cluster.num_nodes": whole(1),
    "dpo.reference_policy_kl_penalty": number(),
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
    budget, rows = f"{mode}.train_mb_tokens", "policy.train_micro_batch_size"
    _set_layout(reader, reader.train, mode if enabled else "", budget, rows)
    budget, rows = f"{mode}.logprob_mb_tokens", "policy.logprob_batch_size"
    if reader.given(budget if enabled else rows):
        reader.log_probs = draft.copy()
        _set_layout(reader, reader.log_probs, mode if enabled else "", budget, rows)


def _set_steps(reader: Reader) -> None:
    name = "policy.train_global_batch_size"
    pairs = 2 if "dpo" in reader.tree.data else 1
    if reader[name] is not None:
        origin = reader.where(name) + (", 2 per pair" if pairs > 1 else "")
        reader.train.set("steps.samples", pairs * reader[name], origin)


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
    if "dpo" in reader.tree.data and (packing or dynamic):
        mode = PACKING if packing else DYNAMIC
        reader.refuse(
            f"DPO cannot be used with {mode}.enabled in NeMo-RL: pairs would be separated. Disable "
            f"it, or write a native recipe with groups.",
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
    if reader.given("cluster.gpus_per_node") or reader.given("cluster.num_nodes"):
        world = reader["cluster.gpus_per_node"] * reader["cluster.num_nodes"]
    set_topology(reader, draft, axes, world, origin)
    multiple = reader[DIVISIBLE]
    cp = reader[axes["cp"]] if axes else 1
    sharded = bool(axes) and reader[axes["sequence_parallel"]]
    unit = (2 * cp if cp > 1 else 1) * (reader[axes["tp"]] if sharded else 1)
    if multiple is not None and multiple % unit:
        reader.refuse(
            f"{DIVISIBLE} must be a multiple of {unit} (2cp · tp; tp with sequence parallelism), "
            f"got {multiple}. Use {math.lcm(multiple, unit)}.",
            DIVISIBLE,
            *axes.values(),
        )
    experts = f"{MEGATRON}.expert_model_parallel_size"
    if _backend(reader) == MEGATRON and reader[experts] == 1:
        draft.set("sync_every", "step", "derived: Megatron reduces gradients once per step")


def _set_layout(reader: Reader, draft: Draft, mode: str, budget: str, rows: str) -> None:
    unit, origin = reader[DIVISIBLE] or 1, reader.where(DIVISIBLE)
    if not mode:
        draft.set("layout.kind", "padded", "derived: neither packing nor dynamic batching")
        size = reader.need(rows, f"neither {PACKING} nor {DYNAMIC} is enabled")
        draft.set("layout.samples", size, reader.where(rows))
        draft.set("balance", "none", "derived: fixed micro-batches in order")
    else:
        tokens = reader.need(budget, f"{mode}.enabled is true")
        draft.set("layout.max_tokens", tokens, reader.where(budget))
        _note_longest(reader, budget, tokens)
    if mode == PACKING:
        draft.set("layout.kind", "packed", reader.where(f"{PACKING}.enabled"))
        reader.take(draft, "layout.packer", f"{PACKING}.algorithm")
        if reader[f"{MEGATRON}.fp8_cfg.enabled"] and _backend(reader) == MEGATRON:
            unit, origin = _fp8_multiple(reader, unit)
    if mode == DYNAMIC:
        draft.set("layout.kind", "padded", reader.where(f"{DYNAMIC}.enabled"))
        name = f"{DYNAMIC}.sequence_length_round"
        if reader[name] % unit == 0:
            unit, origin = reader[name], reader.where(name)
        else:
            unit = math.lcm(unit, reader[name])
            origin = f"derived: multiple of {name} and {DIVISIBLE}"
    if unit > 1:
        draft.set("layout.round_to", unit, origin)


def _fp8_multiple(reader: Reader, unit: int) -> tuple[int, str]:
    """What the width of a pack must be divisible by for FP8."""
    axes = _axes(reader)
    name = f"{MEGATRON}.fp8_cfg.fp8_recipe"
    topology = Topology(
        cp=reader[axes["cp"]],
        tp=reader[axes["tp"]],
        sequence_parallel=reader[axes["sequence_parallel"]],
    )
    recipe = str(reader[name]).lower()
    kinds: dict[str, Fp8Recipe] = {"mxfp8": "mxfp8", "blockwise": "blockwise"}
    multiple = topology.fp8_multiple(kinds.get(recipe, "tensorwise"))
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
    interpolates=True,
)
