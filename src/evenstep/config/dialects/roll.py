"""ROLL: `*_in_train` and `*_in_infer` of its workers."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from evenstep.config.dialects.dialect import Dialect, anything, flag, whole, word
from evenstep.config.dialects.draft import Draft
from evenstep.config.dialects.parallel import set_topology
from evenstep.config.dialects.reader import Reader

TRAINED = ("actor_train", "sft_train", "student", "student_train")
WORKERS = (*TRAINED, "reference", "critic")
PAIRS = ("chosen_key", "rejected_key")
ANSWERS = "num_return_sequences_in_group"
_BATCH = "training_args.per_device_train_batch_size"
PACKING_COST = {"cost.per_token": 24576.0, "cost.per_pair": 1.0}

_WORKER = {
    "use_dynamic_batching_in_train": flag(),
    "max_tokens_per_microbatch_in_train": whole(0, least=0),
    "sequence_length_round_in_train": whole(4),
    "use_dynamic_batching_in_infer": flag(),
    "max_tokens_per_microbatch_in_infer": whole(least=0),
    "sequence_length_round_in_infer": whole(4),
    "use_sequence_packing": flag(),
    "sequence_packing_args.algorithm": word("none", "none", "load_balance"),
    "sequence_packing_args.max_packed_sequence_length_train": whole(),
    "sequence_packing_args.max_packed_sequence_length_forward": whole(),
    "sequence_packing_args.min_num_micro_batches_train": whole(
        1, note="has no effect: the plan chooses the number of micro-batches by time."
    ),
    "sequence_packing_args.min_num_micro_batches_forward": whole(
        1, note="has no effect: the plan chooses the number of micro-batches by time."
    ),
    "infer_batch_size": whole(16),
    "device_mapping": anything(),
    "num_gpus_per_worker": whole(1),
    "model_args.ulysses_size": whole(1),
    _BATCH: whole(8),
    "training_args.gradient_accumulation_steps": whole(1),
    "strategy_args.strategy_name": word(None),
    "strategy_args.strategy_config.tensor_model_parallel_size": whole(1),
    "strategy_args.strategy_config.context_parallel_size": whole(1),
    "strategy_args.strategy_config.pipeline_model_parallel_size": whole(1),
    "strategy_args.strategy_config.virtual_pipeline_model_parallel_size": whole(),
    "strategy_args.strategy_config.expert_model_parallel_size": whole(1),
    "strategy_args.strategy_config.sequence_parallel": flag(),
}
KEYS = {f"{worker}.{name}": key for worker in WORKERS for name, key in _WORKER.items()}
KEYS |= {"prompt_length": whole(), "response_length": whole(), "sequence_length": whole()}
KEYS |= {name: word(None) for name in PAIRS}
KEYS |= {ANSWERS: whole(1)}

_AXES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
}


def read(reader: Reader) -> None:
    """Set the recipes of the worker that is trained, or of `reference`."""
    present = [worker for worker in WORKERS if isinstance(reader.tree.data.get(worker), dict)]
    if not present:
        reader.refuse(f"the file has none of the workers {', '.join(WORKERS)}. Add actor_train.")
        present = ["actor_train"]
    main = present[0]
    made: dict[str, Draft] = {}
    for worker in present:
        made[f"{worker}.infer"] = _recipe(reader, worker, "infer")
        if worker == main or (worker == "critic" and reader.given(f"{worker}.{_BATCH}")):
            made[f"{worker}.train"] = _recipe(reader, worker, "train")
    reader.train = made[f"{main}.train"]
    reader.log_probs = made[f"{main}.infer"]
    reader.share_prompts(ANSWERS)
    for name, draft in made.items():
        other = reader.log_probs if name.endswith(".infer") else reader.train
        if draft.values != other.values:
            reader.note(
                f"{name.partition('.')[0]} is planned differently from {main}; its recipe is not "
                f"in this result. Rename it to {main} to convert it."
            )


def _recipe(reader: Reader, worker: str, phase: str) -> Draft:
    draft = Draft()
    at = f"{worker}.strategy_args.strategy_config"
    axes = {axis: f"{at}.{name}" for axis, name in _AXES.items()}
    mapping = f"{worker}.device_mapping"
    world = _devices(reader, mapping)
    shared = _shared_rows(reader, draft, worker, world)
    dp = set_topology(reader, draft, axes, None if world is None else world // shared, mapping)
    dynamic, packing = f"{worker}.use_dynamic_batching_in_{phase}", f"{worker}.use_sequence_packing"
    if reader[dynamic] and reader[packing]:
        reader.refuse(
            f"{dynamic} and {packing} exclude each other. Enable one of them.", dynamic, packing
        )
    for name in (dynamic, packing):
        if _has_pairs(reader) and reader[name]:
            reader.refuse(
                f"{name} cannot be used with pairs ({', '.join(PAIRS)}), which it would separate. "
                f"Disable it, or write a native recipe with groups.",
                name,
            )
    if reader[dynamic]:
        _set_dynamic(reader, draft, worker, phase, axes)
    elif reader[packing]:
        _set_packing(reader, draft, worker, phase)
    else:
        _set_fixed(reader, draft, worker, phase, "padded")
    if reader[axes["pp"]] > 1 and (reader[dynamic] or reader[packing]):
        origin = "derived: ROLL exchanges shapes between pipeline stages"
        draft.set("topology.variable_seq_lengths", True, origin)
    strategy = str(reader[f"{worker}.strategy_args.strategy_name"] or "")
    if strategy.startswith("megatron") and reader[f"{at}.expert_model_parallel_size"] == 1:
        draft.set("sync_every", "step", "derived: Megatron reduces gradients once per step")
    if phase == "train":
        _set_steps(reader, draft, worker, dp)
    return draft


def _shared_rows(reader: Reader, draft: Draft, worker: str, world: int | None) -> int:
    """How many ranks of FSDP2 share each row; Megatron has axes for that."""
    name = f"{worker}.model_args.ulysses_size"
    strategy = str(reader[f"{worker}.strategy_args.strategy_name"] or "")
    width: int = reader[name] if strategy.startswith("fsdp2") else 1
    if world is not None and world % width:
        reader.refuse(f"{world} GPUs cannot be divided into groups of {name}={width}.", name)
        return 1
    if width > 1:
        draft.set("layout.round_to", width, f"derived: rows are shared by {reader.where(name)}")
    return width


def _has_pairs(reader: Reader) -> bool:
    """Whether the samples of batch sizes are pairs, as in DPO."""
    return any(reader.given(name) for name in PAIRS)


def _set_steps(reader: Reader, draft: Draft, worker: str, dp: int) -> None:
    """The samples of an optimizer step, which do not depend on the batching here."""
    size = f"{worker}.{_BATCH}"
    steps = f"{worker}.training_args.gradient_accumulation_steps"
    pairs = _has_pairs(reader)
    origin = f"derived: {size} · {steps} · {dp} ranks" + (", 2 per pair" if pairs else "")
    draft.set("steps.samples", reader[size] * reader[steps] * dp * (1 + pairs), origin)


def _set_dynamic(
    reader: Reader, draft: Draft, worker: str, phase: str, axes: dict[str, str]
) -> None:
    switch = f"{worker}.use_dynamic_batching_in_{phase}"
    budget = f"{worker}.max_tokens_per_microbatch_in_{phase}"
    rounding = f"{worker}.sequence_length_round_in_{phase}"
    draft.set("layout.kind", "padded", reader.where(switch))
    tokens = reader.need(budget, f"{switch} is true")
    draft.set("layout.max_tokens", tokens, reader.where(budget))
    width = draft.values.get("layout.round_to", 1)  # of ranks that share rows
    draft.set("layout.round_to", math.lcm(width, reader[rounding]), reader.where(rounding))
    group = reader[axes["tp"]] * reader[axes["cp"]]
    if reader[rounding] % group:
        reader.refuse(
            f"{rounding} must be divisible by {group} (tensor_model_parallel_size · "
            f"context_parallel_size), got {reader[rounding]}.",
            rounding,
            axes["tp"],
            axes["cp"],
        )
    longest = reader["sequence_length"]
    if longest is None and reader.given("prompt_length") and reader.given("response_length"):
        longest = reader["prompt_length"] + reader["response_length"]
    if longest is not None and longest > tokens:
        reader.note(
            f"sequences have up to {longest} tokens, more than {budget}={tokens}: longer ones are "
            f"refused (overflow: error)."
        )


def _set_packing(reader: Reader, draft: Draft, worker: str, phase: str) -> None:
    at = f"{worker}.sequence_packing_args"
    if reader[f"{at}.algorithm"] == "none":
        _set_fixed(reader, draft, worker, phase, "packed")
        return
    name = "train" if phase == "train" else "forward"
    budget = f"{at}.max_packed_sequence_length_{name}"
    draft.set("layout.kind", "packed", reader.where(f"{worker}.use_sequence_packing"))
    tokens = reader.need(budget, f"{at}.algorithm is load_balance")
    draft.set("layout.max_tokens", tokens, reader.where(budget))
    for path, value in PACKING_COST.items():
        draft.set(path, value, "derived: load_balance counts 24576·L + L²")


def _set_fixed(reader: Reader, draft: Draft, worker: str, phase: str, kind: str) -> None:
    """Micro-batches of a fixed number of samples, in order."""
    batch = f"{worker}.{_BATCH}" if phase == "train" else f"{worker}.infer_batch_size"
    pairs = _has_pairs(reader)
    origin = reader.where(batch) + (", 2 per pair" if pairs else "")
    draft.set("layout.kind", kind, f"derived: fixed micro-batches of {worker}")
    draft.set("layout.samples", reader[batch] * (1 + pairs), origin)
    draft.set("balance", "none", "derived: fixed micro-batches in order")


def _devices(reader: Reader, name: str) -> int | None:
    """How many workers have devices: `list(range(0,8))`, `list([0,1])` or `[0, 1]` of them."""
    value: Any = reader[name]
    if value is None:
        return None
    if isinstance(value, str):
        listed = re.fullmatch(r"\s*list\((.*)\)\s*", value, re.DOTALL)
        value = listed[1].strip() if listed else value
        span = re.fullmatch(r"range\(([\d\s,]+)\)", value)
        try:
            numbers = ast.literal_eval(f"[{span[1]}]" if span else value)
            value = range(*numbers) if span else numbers
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = None
    if isinstance(value, list | tuple | range) and value:
        per_worker: int = reader[f"{name.partition('.')[0]}.num_gpus_per_worker"]
        if len(value) % per_worker == 0:
            return len(value) // per_worker
    reader.refuse(
        f"{name} must be a list of devices such as list(range(0,8)), as many for each worker.", name
    )
    return None


ROLL = Dialect(
    name="roll",
    system="ROLL",
    keys=KEYS,
    read=read,
    strict=tuple(f"{worker}.sequence_packing_args" for worker in WORKERS),
    patterns=tuple(
        f"{worker}.{pattern}"
        for worker in WORKERS
        for pattern in (
            "*_in_train",
            "*_in_infer",
            "use_dynamic_*",
            "*sequence_packing*",
            "max_tokens_per_*",
            "sequence_length_round*",
        )
    ),
    interpolates=True,
)
