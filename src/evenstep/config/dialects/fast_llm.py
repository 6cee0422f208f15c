"""Fast-LLM: micro-batches of a fixed number of tokens and the schedule of a step."""

from __future__ import annotations

from evenstep.config.dialects.dialect import Dialect, anything, flag, number, whole
from evenstep.config.dialects.parallel import set_topology
from evenstep.config.dialects.reader import Reader

SIZE = "data.micro_batch_size"
DEPTH, BREADTH = "schedule.depth_first_micro_batches", "schedule.breadth_first_micro_batches"
DOCUMENTS = "schedule.docs_per_step"
PER_MICRO_BATCH = "schedule.per_micro_batch_normalization"
LONGEST = "data.maximum_document_length"
DISTRIBUTED = "model.distributed"
_SCHEDULING = "concerns how Fast-LLM schedules work; it does not change batches."

KEYS = {
    SIZE: whole(2048),
    LONGEST: whole(),
    "data.truncate_documents": flag(True),
    DEPTH: whole(1),
    BREADTH: whole(1),
    "schedule.micro_batch_splits": whole(1, note=_SCHEDULING),
    DOCUMENTS: whole(),
    PER_MICRO_BATCH: flag(),
    **{
        f"schedule.{name}": flag(True)
        for name in ("pipeline_overlap", "data_overlap", "throttle_cpu")
    },
    **{
        f"schedule.{name}": flag()
        for name in ("debug_schedule", "debug_send_recv", "profile_schedule", "skip_step")
    },
    "schedule.data_batch_warn_time_ms": number(1000.0),
    "schedule.throttle_cpu_rate": whole(1),
    "schedule.throttle_cpu_delay": whole(1, least=0),
    f"{DISTRIBUTED}.tensor_parallel": whole(1),
    f"{DISTRIBUTED}.pipeline_parallel": whole(1),
    f"{DISTRIBUTED}.sequence_data_parallel": whole(1),
    f"{DISTRIBUTED}.sequence_tensor_parallel": flag(),
    f"{DISTRIBUTED}.world_size": whole(),
    "batch": anything(),
}


def read(reader: Reader) -> None:
    """Set the recipe and the normalization."""
    draft = reader.train
    axes = {
        "tp": f"{DISTRIBUTED}.tensor_parallel",
        "cp": f"{DISTRIBUTED}.sequence_data_parallel",
        "pp": f"{DISTRIBUTED}.pipeline_parallel",
        "sequence_parallel": f"{DISTRIBUTED}.sequence_tensor_parallel",
    }
    world = f"{DISTRIBUTED}.world_size"
    set_topology(reader, draft, axes, reader[world], world)
    if reader.given("batch"):
        reader.refuse(
            f"batch is a section of older versions of Fast-LLM. Write the tokens of a micro-batch "
            f"as {SIZE}, and {DEPTH}.",
            "batch",
        )
    draft.set("layout.kind", "packed", "derived: Fast-LLM packs documents")
    draft.set("layout.pad_to", reader[SIZE], reader.where(SIZE))
    _set_overflow(reader)
    if reader[DOCUMENTS] is not None:
        reader.take(draft, "steps.samples", DOCUMENTS)
    else:
        count = reader[DEPTH] * reader[BREADTH]
        draft.set("steps.micro_batches", count, f"derived: {DEPTH} · {BREADTH}")
    if reader[PER_MICRO_BATCH]:
        reader.take(reader.stream, "trainer.per_micro_batch_normalization", PER_MICRO_BATCH)


def _set_overflow(reader: Reader) -> None:
    name = "data.truncate_documents"
    if reader[LONGEST] is not None and reader[LONGEST] < reader[SIZE]:
        reader.note(
            f"{reader.where(LONGEST)}: limits documents before they are packed; limit the "
            f"lengths of the source."
        )
    overflow = "split" if reader[name] else "drop"
    reader.train.set("overflow", overflow, f"derived: {reader.where(name)}")


FAST_LLM = Dialect(
    name="fast-llm",
    system="Fast-LLM",
    keys=KEYS,
    read=read,
    strict=("schedule",),
)
