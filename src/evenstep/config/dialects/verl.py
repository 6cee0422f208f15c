"""verl: `use_dynamic_bsz` of the actor and of log-probabilities."""

from __future__ import annotations

import math

from evenstep.config.dialects.dialect import Dialect, Key, flag, whole, word
from evenstep.config.dialects.draft import Draft
from evenstep.config.dialects.parallel import set_topology
from evenstep.config.dialects.reader import Reader

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref"))
MEGATRON = f"{ACTOR}.megatron"
REMOVE = "actor_rollout_ref.model.use_remove_padding"
MINI = f"{ACTOR}.ppo_mini_batch_size"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
BUDGET = f"{ACTOR}.ppo_max_token_len_per_gpu"
LENGTHS = ("data.max_prompt_length", "data.max_response_length")
_MEGATRON_AXES = {
    "tp": f"{MEGATRON}.tensor_model_parallel_size",
    "cp": f"{MEGATRON}.context_parallel_size",
    "pp": f"{MEGATRON}.pipeline_model_parallel_size",
    "vpp": f"{MEGATRON}.virtual_pipeline_model_parallel_size",
}
TITAN, VEOMNI = f"{ACTOR}.torchtitan", f"{ACTOR}.veomni"
_TITAN_AXES = {
    "tp": f"{TITAN}.tensor_parallel_size",
    "cp": f"{TITAN}.context_parallel_size",
    "pp": f"{TITAN}.pipeline_parallel_size",
}
SHARDS, REPLICAS = f"{TITAN}.data_parallel_shard_size", f"{TITAN}.data_parallel_replicate_size"
_FOLLOWS: dict[str, Key] = {
    "log_prob_use_dynamic_bsz": Key("flag"),
    "log_prob_max_token_len_per_gpu": whole(),
    "log_prob_micro_batch_size": whole(note="is deprecated in verl; write it per GPU."),
    "log_prob_micro_batch_size_per_gpu": whole(),
}

KEYS = {
    f"{ACTOR}.use_dynamic_bsz": flag(),
    BUDGET: whole(16384),
    MINI: whole(256),
    f"{ACTOR}.ppo_micro_batch_size": whole(note="is deprecated in verl; write it per GPU."),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": whole(),
    ULYSSES: whole(1),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": whole(1),
    f"{ACTOR}.strategy": word("fsdp", "fsdp", "fsdp2", "megatron", "veomni", "torchtitan"),
    f"{VEOMNI}.ulysses_parallel_size": whole(1),
    **{name: whole(1) for name in _TITAN_AXES.values()},
    SHARDS: whole(1),
    REPLICAS: whole(1),
    f"{ACTOR}.use_remove_padding": Key("flag"),
    **{name: whole(None if axis == "vpp" else 1) for axis, name in _MEGATRON_AXES.items()},
    f"{MEGATRON}.expert_model_parallel_size": whole(1),
    f"{MEGATRON}.sequence_parallel": flag(True),
    f"{MEGATRON}.dynamic_context_parallel": flag(),
    REMOVE: flag(),
    **{f"{ROLLOUT}.{name}": key for name, key in _FOLLOWS.items()},
    **{f"{REF}.{name}": key for name, key in _FOLLOWS.items()},
    f"{ROLLOUT}.n": whole(1),
    LENGTHS[0]: whole(512),
    LENGTHS[1]: whole(512),
    "trainer.balance_batch": flag(True),
    "trainer.nnodes": whole(1),
    "trainer.n_gpus_per_node": whole(8),
}


def read(reader: Reader) -> None:
    """Set the recipes of the actor: training and log-probabilities."""
    base = Draft()
    dp, width = _set_topology(reader, base)
    packed = reader[f"{ACTOR}.use_remove_padding"]
    packed = reader[REMOVE] if packed is None else packed
    kind = "packed" if packed else "padded"
    base.set("layout.kind", kind, reader.where(REMOVE))
    reader.train = base.copy()
    origin = f"derived: {MINI} · {ROLLOUT}.n"
    reader.train.set("steps.samples", reader[MINI] * reader[f"{ROLLOUT}.n"], origin)
    dynamic = reader[f"{ACTOR}.use_dynamic_bsz"]
    if dynamic:
        _set_budget(reader, reader.train, BUDGET, reader[BUDGET], width, reader.where(BUDGET))
    else:
        _set_fixed(reader, reader.train, f"{ACTOR}.ppo_micro_batch_size", dp, "use_dynamic_bsz")
    reader.share_prompts(f"{ROLLOUT}.n")
    drafts = []
    for worker in (ROLLOUT, REF):
        drafts.append(_log_probs(reader, base.copy(), worker, dp, width))
    reader.log_probs = drafts[0] or drafts[1]
    if drafts[0] and drafts[1] and drafts[0].values != drafts[1].values:
        reader.note(f"{REF} is planned differently from {ROLLOUT}; log_probs is that of {ROLLOUT}.")


def _set_topology(reader: Reader, draft: Draft) -> tuple[int, int]:
    """Set the topology; the data-parallel ranks, and the ranks that share a micro-batch."""
    world = reader["trainer.nnodes"] * reader["trainer.n_gpus_per_node"]
    match reader[f"{ACTOR}.strategy"]:
        case "megatron":
            return _set_megatron(reader, draft, world)
        case "torchtitan":
            return _set_titan(reader, draft, world)
        case "veomni":
            names = [f"{VEOMNI}.ulysses_parallel_size"]
        case _:
            names = [ULYSSES, f"{ACTOR}.fsdp_config.{ULYSSES.rpartition('.')[2]}"]
    name = next((key for key in names if reader[key] > 1), names[0])
    width = reader[name]
    if world % width:
        reader.refuse(f"{world} GPUs cannot be divided into groups of {name}={width}.", name)
        width = 1
    if width > 1:
        draft.set("layout.round_to", width, f"derived: rows are shared by {reader.where(name)}")
    dp = set_topology(reader, draft, {}, world // width, "trainer")
    return dp, width


def _set_megatron(reader: Reader, draft: Draft, world: int) -> tuple[int, int]:
    axes = dict(_MEGATRON_AXES)
    if reader[axes["tp"]] > 1:
        axes["sequence_parallel"] = f"{MEGATRON}.sequence_parallel"
    dp = set_topology(reader, draft, axes, world, "trainer")
    if reader[axes["pp"]] > 1:
        origin = "derived: verl exchanges shapes between pipeline stages"
        draft.set("topology.variable_seq_lengths", True, origin)
    if reader[f"{MEGATRON}.expert_model_parallel_size"] == 1:
        draft.set("sync_every", "step", "derived: Megatron reduces gradients once per step")
    name = f"{MEGATRON}.dynamic_context_parallel"
    if reader[name]:
        reader.refuse(f"{name} cannot be planned: sequences choose their ranks. Disable it.", name)
    return dp, reader[axes["cp"]]


def _set_titan(reader: Reader, draft: Draft, world: int) -> tuple[int, int]:
    """torchtitan: the data-parallel sizes are keys of their own and must fit the GPUs."""
    group = math.prod(reader[name] for name in _TITAN_AXES.values())
    sizes = reader[SHARDS] * reader[REPLICAS]
    if sizes * group != world and reader.ranks is None:
        reader.refuse(
            f"{SHARDS} · {REPLICAS} · tp · cp · pp = {sizes * group} must be the number of GPUs "
            f"(trainer), {world}.",
            SHARDS,
            REPLICAS,
            *_TITAN_AXES.values(),
        )
        return 1, reader[_TITAN_AXES["tp"]]
    dp = set_topology(reader, draft, _TITAN_AXES, world, "trainer")
    return dp, reader[_TITAN_AXES["tp"]]  # verl counts the budget for a tensor-parallel group


def _set_budget(
    reader: Reader, draft: Draft, name: str, tokens: int, width: int, origin: str
) -> None:
    shared = f", times {width} ranks that share a micro-batch" if width > 1 else ""
    draft.set("layout.max_tokens", tokens * width, origin + shared)
    for path, value in (("cost.per_token", 24576.0), ("cost.per_pair", 1.0)):
        draft.set(path, value, "derived: verl balances 24576·L + L²")
    if draft.values["layout.kind"] == "padded":
        reader.note(
            f"{name} counts tokens without padding in verl; without use_remove_padding it counts "
            f"rows times width here, so that the budget holds."
        )
    longest = reader[LENGTHS[0]] + reader[LENGTHS[1]]
    if longest > tokens * width:
        reader.refuse(
            f"{name}={tokens} must be at least {' + '.join(LENGTHS)} = {longest}"
            f"{f' / {width} ranks' if width > 1 else ''}. Raise it.",
            name,
            *LENGTHS,
        )


def _set_fixed(reader: Reader, draft: Draft, name: str, dp: int, switch: str) -> None:
    """A fixed number of samples per micro-batch."""
    per_gpu = f"{name}_per_gpu"
    size = reader[per_gpu]
    origin = reader.where(per_gpu)
    if reader.given(name) and reader.given(per_gpu):
        reader.refuse(f"{name} and {per_gpu} exclude each other. Remove {name}.", name, per_gpu)
    elif reader.given(name):
        size, origin = max(reader[name] // dp, 1), f"derived: {reader.where(name)} / {dp} ranks"
    elif size is None:
        reader.need(per_gpu, f"{switch} is false")
        size = 1
    draft.set("layout.samples", size, origin)
    if not reader["trainer.balance_batch"]:
        draft.set("balance", "none", reader.where("trainer.balance_batch"))


def _log_probs(reader: Reader, draft: Draft, worker: str, dp: int, width: int) -> Draft | None:
    """The recipe of a worker's log-probabilities; None if the file says nothing about it."""
    switch = f"{worker}.log_prob_use_dynamic_bsz"
    dynamic = reader[switch]
    dynamic = reader[f"{ACTOR}.use_dynamic_bsz"] if dynamic is None else dynamic
    size = f"{worker}.log_prob_micro_batch_size"
    if dynamic:
        name = f"{worker}.log_prob_max_token_len_per_gpu"
        own = reader[name] is not None
        tokens, source = (reader[name], name) if own else (reader[BUDGET], BUDGET)
        _set_budget(reader, draft, source, tokens, width, reader.where(source))
        return draft
    if not reader.given(size) and not reader.given(f"{size}_per_gpu"):
        return None
    _set_fixed(reader, draft, size, dp, switch)
    return draft


VERL = Dialect(
    name="verl",
    system="verl",
    keys=KEYS,
    read=read,
    patterns=(
        f"{ACTOR}.*dynamic_bsz*",
        f"{ACTOR}.*token_len*",
        f"{ROLLOUT}.log_prob_*",
        f"{REF}.log_prob_*",
    ),
    others=frozenset(
        {
            "ppo_infer_max_token_len_per_gpu",
            "ppo_infer_micro_batch_size_per_gpu",
            "use_dynamic_bsz_balance",
        }
    ),
    interpolates=True,
)
