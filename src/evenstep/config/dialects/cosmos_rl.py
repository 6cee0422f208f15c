"""cosmos-rl: load-balanced dynamic batching."""

from __future__ import annotations

from evenstep.config.dialects.dialect import Dialect, flag, whole, word
from evenstep.config.dialects.parallel import set_topology
from evenstep.config.dialects.reader import Reader

POLICY = "train.train_policy"
ENABLE = f"{POLICY}.enable_dp_load_balancing"
BUDGET = f"{POLICY}.load_balanced_max_tokens_for_batch"
STRATEGY = f"{POLICY}.load_balanced_batching_strategy"
BATCHES = f"{POLICY}.load_balanced_batches_per_optimizer_step"
ALIAS = f"{POLICY}.load_balanced_accumulate_steps"
LOOPS = ("train.infinite_loop", f"{POLICY}.infinite_loop")
TYPE, DYNAMIC = f"{POLICY}.type", f"{POLICY}.max_token_len_per_mini_batch"
PER_UPDATE = f"{POLICY}.batch_size_per_optimize"
REPLICAS = "policy.parallelism.n_init_replicas"
DOCUMENTED_BUDGET = 32768
_OF_GRPO = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
_ONLY_DOCUMENTED = "is in the documentation of cosmos-rl, not in its code; read as documented."

KEYS = {
    "train.max_num_steps": whole(),
    "train.sequence_packing": flag(),
    "train.epoch": whole(),
    "train.train_batch_per_replica": whole(8),
    LOOPS[0]: flag(True, note=_ONLY_DOCUMENTED),
    LOOPS[1]: flag(True, note=_ONLY_DOCUMENTED),
    ENABLE: flag(),
    f"{POLICY}.load_balanced_pool_size": whole(32),
    BUDGET: whole(),
    STRATEGY: word("prefer_closest", "prefer_closest", "prefer_first"),
    BATCHES: whole(1),
    ALIAS: whole(note=_ONLY_DOCUMENTED),
    f"{POLICY}.dataloader_seed": whole(0, least=0),
    f"{POLICY}.dataloader_shuffle": flag(True),
    f"{POLICY}.mini_batch": whole(2),
    TYPE: word(None, "sft", "grpo"),
    DYNAMIC: whole(least=0),
    PER_UPDATE: whole(),
    REPLICAS: whole(1),
    "policy.model_max_length": whole(4096),
    "policy.parallelism.tp_size": whole(1),
    "policy.parallelism.cp_size": whole(1),
    "policy.parallelism.pp_size": whole(1),
    "policy.parallelism.dp_shard_size": whole(-1, least=-1),
    "policy.parallelism.dp_replicate_size": whole(1, least=-1),
}


def read(reader: Reader) -> None:
    """Set the recipe, and the pool of the stream if load balancing is enabled."""
    dp = _set_ranks(reader)
    packing, draft = reader["train.sequence_packing"], reader.train
    kind = "packed" if packing else "padded"
    draft.set("layout.kind", kind, reader.where("train.sequence_packing"))
    reader.take(reader.stream, "stream.seed", f"{POLICY}.dataloader_seed")
    if not reader[f"{POLICY}.dataloader_shuffle"]:
        reader.take(reader.stream, "stream.shuffle", f"{POLICY}.dataloader_shuffle")
    if reader[ENABLE]:
        _set_pool(reader, packing)
        return
    for name in (BUDGET, STRATEGY, BATCHES, ALIAS):
        if reader.given(name):
            reader.note(f"{reader.where(name)}: has no effect without {ENABLE}.")
    _set_batches_of_steps(reader, dp)
    if reader.given("train.max_num_steps"):
        reader.take(reader.stream, "stream.max_num_steps", "train.max_num_steps")


def _is_grpo(reader: Reader) -> bool:
    """Whether the file trains with GRPO, as cosmos-rl decides it."""
    train = reader.tree.data.get("train")
    policy = train.get("train_policy") if isinstance(train, dict) else None
    if reader.given(TYPE) or not isinstance(policy, dict):
        return bool(reader[TYPE] != "sft")
    return any(name in policy for name in _OF_GRPO)


def _set_batches_of_steps(reader: Reader, dp: int) -> None:
    """Fixed mini-batches, or GRPO's of so many tokens. SFT counts samples per rank."""
    draft, batch = reader.train, "train.train_batch_per_replica"
    if _is_grpo(reader):
        samples = reader[batch] * reader[REPLICAS]
        origin = f"derived: {batch} · {reader[REPLICAS]} replicas"
        if reader[PER_UPDATE] is not None and reader[PER_UPDATE] * dp < samples:
            samples, origin = reader[PER_UPDATE] * dp, f"derived: {PER_UPDATE} · {dp} ranks"
        draft.set("steps.samples", samples, origin)
    else:
        draft.set("steps.samples", reader[batch] * dp, f"derived: {batch} · {dp} ranks")
    if _is_grpo(reader) and reader[DYNAMIC]:
        cp = reader["policy.parallelism.cp_size"]
        shared = f", times {cp} ranks that share a mini-batch" if cp > 1 else ""
        draft.set("layout.max_tokens", reader[DYNAMIC] * cp, reader.where(DYNAMIC) + shared)
        return
    size = f"{POLICY}.mini_batch"
    draft.set("layout.samples", reader[size], reader.where(size))
    draft.set("balance", "none", "derived: fixed micro-batches in order")


def _set_ranks(reader: Reader) -> int:
    at = "policy.parallelism"
    axes = {axis: f"{at}.{axis}_size" for axis in ("tp", "cp", "pp")}
    shard, replicas = reader[f"{at}.dp_shard_size"], reader[f"{at}.dp_replicate_size"]
    world = None
    if shard > 0 and replicas > 0:
        sizes = [reader[name] for name in axes.values()]
        world = shard * replicas * reader[REPLICAS] * sizes[0] * sizes[1] * sizes[2]
    return set_topology(reader, reader.train, axes, world, at)


def _set_pool(reader: Reader, packing: bool) -> None:
    draft, stream = reader.train, reader.stream
    budget = reader[BUDGET]
    if budget is None and not reader.given(BUDGET):
        reader.note(
            f"{BUDGET} is not set: {DOCUMENTED_BUDGET} is taken, as documented. The code of "
            f"cosmos-rl takes policy.model_max_length ({reader['policy.model_max_length']})."
        )
    origin = reader.where(BUDGET) if budget else "documented default of cosmos-rl"
    draft.set("layout.max_tokens", budget or DOCUMENTED_BUDGET, origin)
    draft.set("overflow", "alone", "derived: a sample over the budget is a batch of its own")
    _set_batches(reader)
    reader.take(stream, "stream.pool.samples", f"{POLICY}.load_balanced_pool_size")
    if packing:
        stream.set("stream.pool.strategy", "greedy", "derived: packing takes what fits, in order")
        if reader.given(STRATEGY):
            reader.note(f"{reader.where(STRATEGY)}: has no effect with train.sequence_packing.")
    else:
        reader.take(stream, "stream.pool.strategy", STRATEGY)
    steps = reader.need("train.max_num_steps", f"{ENABLE} is true")
    stream.set("stream.max_num_steps", steps, reader.where("train.max_num_steps"))
    loop = next((name for name in LOOPS if reader.given(name)), LOOPS[0])
    reader.take(stream, "stream.infinite_loop", loop)
    if reader.given("train.epoch"):
        reader.note(
            f"{reader.where('train.epoch')}: has no effect with {ENABLE}; "
            f"train.max_num_steps ends the training."
        )


def _set_batches(reader: Reader) -> None:
    """Micro-batches per step, by either name."""
    both = reader.given(BATCHES) and reader.given(ALIAS)
    if both and reader[BATCHES] != reader[ALIAS]:
        reader.refuse(
            f"{BATCHES}={reader[BATCHES]} and {ALIAS}={reader[ALIAS]} mean the same. Remove one.",
            BATCHES,
            ALIAS,
        )
    name = ALIAS if reader.given(ALIAS) else BATCHES
    draft = reader.train
    draft.set("steps.micro_batches", reader[name] or 1, reader.where(name))


COSMOS_RL = Dialect(
    name="cosmos-rl",
    system="cosmos-rl",
    keys=KEYS,
    read=read,
    patterns=(f"{POLICY}.load_balanced_*", f"{POLICY}.enable_dp_*", "train.load_balanced_*"),
    others=frozenset({"dp_size", "ep_size"}),
)
