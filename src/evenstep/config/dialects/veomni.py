"""VeOmni: `dyn_bsz` and packed inputs of a fixed length."""

from __future__ import annotations

import math

from evenstep.config.dialects.dialect import Dialect, flag, number, whole, word
from evenstep.config.dialects.parallel import set_topology
from evenstep.config.dialects.reader import Reader

PAD, PAD_INPUT, PAD_LENGTH = (
    "train.pad_to_length",
    "train.pad_packed_input",
    "train.pad_packed_to_length",
)
WARMUP = "train.bsz_warmup_ratio"
COMPILE = ("train.torch_compile.enable", "model.accelerator.torch_compile.enable")
_ACCELERATORS = ("train.accelerator", "model.accelerator")
SIZE, LONGEST = "train.micro_batch_size", "data.max_seq_len"
GLOBAL = "train.global_batch_size"
SIZE_OF_DATA = "data.train_size"
RATIO = "train.dyn_bsz_physical_overflow_ratio"
_ONLY_DOCUMENTED = "is in the documentation of VeOmni, not in its code; read as documented."
_OLD = "is a key of older versions and has no effect."

KEYS = {
    "train.dyn_bsz": flag(True),
    PAD: flag(),
    PAD_INPUT: flag(note=f"means {PAD}. It {_ONLY_DOCUMENTED}"),
    PAD_LENGTH: whole(note=_ONLY_DOCUMENTED),
    SIZE: whole(1),
    GLOBAL: whole(),
    "train.max_steps": whole(),
    "train.num_train_epochs": whole(1),
    "train.seed": whole(42, least=0),
    WARMUP: number(0),
    "train.bsz_warmup_init_mbtoken": whole(200),
    "train.dyn_bsz_runtime": word("main", "main", "worker"),
    "train.dyn_bsz_count_mode": word("total", "total", "effective"),
    RATIO: number(1.5),
    "train.dyn_bsz_buffer_size": whole(
        note="has no effect in VeOmni; data.dyn_bsz_buffer_size is the key."
    ),
    "train.dyn_bsz_margin": whole(least=0, note=_OLD),
    "train.rmpad": flag(note=_OLD),
    "train.rmpad_with_pos_ids": flag(note=_OLD),
    **{name: flag() for name in COMPILE},
    "train.ulysses_parallel_size": whole(1),
    **{
        f"{at}.{name}": whole(1)
        for at in _ACCELERATORS
        for name in ("ulysses_size", "cp_size", "tp_size", "pp_size")
    },
    **{
        f"{at}.{name}": whole(-1, least=-1)
        for at in _ACCELERATORS
        for name in ("dp_shard_size", "dp_replicate_size")
    },
    LONGEST: whole(2048),
    SIZE_OF_DATA: whole(10_000_000),
    "data.dyn_bsz_buffer_size": whole(200),
}


def read(reader: Reader) -> None:
    """Set the recipe, and the pool of the stream with `dyn_bsz`."""
    dynamic = reader["train.dyn_bsz"]
    _check_rules(reader, dynamic)
    dp = _set_ranks(reader)
    draft = reader.train
    draft.set("layout.kind", "packed", "derived: VeOmni packs with and without dyn_bsz")
    reader.take(reader.stream, "stream.seed", "train.seed")
    if reader.given("train.max_steps"):
        steps = reader["train.max_steps"] * reader["train.num_train_epochs"]
        origin = reader.where("train.max_steps")
        if reader["train.num_train_epochs"] > 1:
            origin = "derived: train.max_steps · train.num_train_epochs"
        reader.stream.set("stream.max_num_steps", steps, origin)
    if dynamic:
        _set_budget(reader)
        _set_pool(reader, dp)
    else:
        reader.take(draft, "layout.samples", SIZE)
        draft.set("balance", "none", "derived: fixed micro-batches in order")
        samples = reader[GLOBAL] or reader[SIZE] * dp
        origin = reader.where(GLOBAL) if reader[GLOBAL] else f"derived: {SIZE} · {dp} ranks"
        draft.set("steps.samples", samples, origin)
    if reader[PAD_LENGTH] is not None:
        reader.take(draft, "layout.pad_to", PAD_LENGTH)
    elif dynamic and (reader[PAD] or reader[PAD_INPUT]):
        budget = reader[SIZE] * reader[LONGEST]
        draft.set("layout.pad_to", budget, f"derived: {PAD}: {SIZE} · {LONGEST}")
        if reader["train.dyn_bsz_count_mode"] == "effective" and reader[RATIO] > 1:
            reader.note(
                f"{RATIO}: has no effect, because a micro-batch holds at most the {budget} tokens "
                f"that it is padded to ({SIZE} · {LONGEST})."
            )


def _check_rules(reader: Reader, dynamic: bool) -> None:
    if not dynamic:
        for name in (PAD, PAD_INPUT, WARMUP):
            if reader[name]:
                reader.note(f"{reader.where(name)}: has no effect without train.dyn_bsz.")
    padded = reader[PAD] or reader[PAD_INPUT] or reader[PAD_LENGTH]
    for name in COMPILE:
        if reader[name] and not (dynamic and padded):
            reader.refuse(
                f"{name} needs micro-batches of one shape. Enable train.dyn_bsz and {PAD}.",
                name,
                PAD,
                "train.dyn_bsz",
            )
    if reader[WARMUP] and dynamic and reader["train.dyn_bsz_runtime"] == "worker":
        reader.note(f"{reader.where(WARMUP)}: has no effect with train.dyn_bsz_runtime=worker.")
    mode = "train.dyn_bsz_count_mode"
    if reader[mode] == "effective" and not dynamic:
        reader.note(f"{reader.where(mode)}: has no effect without train.dyn_bsz.")
    if reader["train.dyn_bsz_count_mode"] == "total" and reader.given(RATIO):
        reader.note(f"{reader.where(RATIO)}: has no effect without dyn_bsz_count_mode=effective.")


def _set_ranks(reader: Reader) -> int:
    names = ("ulysses_size", "cp_size", "tp_size", "pp_size", "dp_shard_size")
    at = _ACCELERATORS[any(reader.given(f"{_ACCELERATORS[1]}.{name}") for name in names)]
    axes = {axis: f"{at}.{axis}_size" for axis in ("tp", "cp", "pp")}
    shard, replicas = reader[f"{at}.dp_shard_size"], reader[f"{at}.dp_replicate_size"]
    world = None
    if shard > 0:
        group = math.prod(reader[name] for name in axes.values())
        world = shard * max(replicas, 1) * group
    for name in (f"{at}.ulysses_size", "train.ulysses_parallel_size"):
        if reader[name] > 1:
            origin = f"derived: rows are shared by {reader.where(name)}"
            reader.train.set("layout.round_to", reader[name], origin)
    return set_topology(reader, reader.train, axes, world, at)


def _set_budget(reader: Reader) -> None:
    draft, budget = reader.train, reader[SIZE] * reader[LONGEST]
    formula = f"{SIZE} · {LONGEST}"
    if reader["train.dyn_bsz_count_mode"] == "effective":
        name = "limits.columns.loss_tokens"
        draft.set(name, budget, f"derived: {formula}, counted in labels")
        ratio = reader[RATIO]
        draft.set("layout.max_tokens", math.ceil(budget * ratio), f"derived: {formula} · {ratio:g}")
    else:
        draft.set("layout.max_tokens", budget, f"derived: {formula}")
    if reader["train.dyn_bsz_runtime"] == "worker":
        draft.set("overflow", "drop", "derived: dyn_bsz_runtime=worker drops longer samples")
    elif not (reader[PAD] or reader[PAD_INPUT] or reader[PAD_LENGTH]):
        draft.set("overflow", "alone", "derived: a sample over the budget is a batch of its own")


def _set_pool(reader: Reader, dp: int) -> None:
    draft, stream = reader.train, reader.stream
    reader.take(stream, "stream.pool.samples", "data.dyn_bsz_buffer_size")
    stream.set("stream.pool.strategy", "greedy", "derived: dyn_bsz takes what fits, in order")
    batch, share = reader[GLOBAL], reader[SIZE] * dp
    count, origin = 1, f"derived: one micro-batch per step without {GLOBAL}"
    if batch is not None:
        count, origin = batch // share, f"derived: {GLOBAL} / ({SIZE} · {dp} ranks)"
        if batch % share:
            reader.refuse(
                f"{GLOBAL} must be a multiple of {SIZE} · {dp} ranks = {share}, got {batch}. Set "
                f"the number of ranks with --set topology.dp=N.",
                GLOBAL,
                SIZE,
            )
    draft.set("steps.micro_batches", max(count, 1), origin)
    _set_warmup(reader, share if batch is None else batch)


def _set_warmup(reader: Reader, batch: int) -> None:
    """The steps of the growing budget: a share of the steps of an epoch, as VeOmni counts them."""
    ratio = reader[WARMUP]
    if not ratio or reader["train.dyn_bsz_runtime"] == "worker":
        return
    tokens = int(reader[SIZE_OF_DATA] * (1 + ratio / 2))
    steps = math.ceil(tokens / (batch * reader[LONGEST]))
    longest = reader["train.max_steps"]
    limited = longest is not None and longest <= steps
    warm = int((longest if limited else steps) * ratio)
    if warm:
        source = "train.max_steps" if limited else f"{SIZE_OF_DATA} / ({GLOBAL} · {LONGEST})"
        reader.stream.set("stream.pool.warmup_steps", warm, f"derived: {WARMUP} · {source}")
        reader.take(reader.stream, "stream.pool.warmup_tokens", "train.bsz_warmup_init_mbtoken")


VEOMNI = Dialect(
    name="veomni",
    system="VeOmni",
    keys=KEYS,
    read=read,
    patterns=("train.dyn_bsz*", "train.pad_*", "train.bsz_*", "data.dyn_bsz*", "train.rmpad*"),
    others=frozenset({"dp_size", "ep_size"}),
)
