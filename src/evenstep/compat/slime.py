"""slime's schedule of micro-batches for data-parallel ranks.

Arguments and results are those of `slime.utils.dp_schedule`. Unlike there, packs are formed for
budget and balance together, and ranks are even at every micro-batch as well as over a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evenstep.compat.filled import filled_packs
from evenstep.compat.rank_packs import WORK, pipeline
from evenstep.core.cost import Cost
from evenstep.core.layout import Packed
from evenstep.core.ragged import IntArray, Ragged, by_first_appearance
from evenstep.core.recipe import Recipe, Steps, Topology
from evenstep.errors import ConfigError, InputError, PlanError
from evenstep.planning.planner import make_plan, plan_step

__all__ = ["build_dp_schedule"]

_REFUSED = {"global_batch_tokens": None, "multimodal_aware_packing": "off"}


class ScheduleError(InputError, AssertionError):
    """Samples that cannot be scheduled; slime raises `AssertionError`."""


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    sample_is_multimodal: Sequence[bool] | None = None,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """(samples per rank, micro-batches per rank, their number per step, rollouts per step).

    Samples of a rollout stay in one step. Rollouts after the last full step are left out. All
    ranks run equally many micro-batches. With `use_dynamic_batch_size` none exceeds
    `max_tokens_per_gpu * cp_size`, except one with a single longer sample; otherwise each has
    `micro_batch_size` samples, which stay in order without `balance_data`. Later versions pass
    `sample_is_multimodal`, which is only for their packing of media and not used here.

        schedule = build_dp_schedule(
            args, {"dp_size": 2, "cp_size": 1, "vpp_size": 1}, [5, 3, 8, 2],
            global_batch_size=4, rollout_indices=[0, 1, 2, 3],
        )
    """
    for name, allowed in _REFUSED.items():
        if getattr(args, name, allowed) not in (allowed, None):
            raise ConfigError(f"args.{name} is not supported here. Unset it, or use slime's own.")
    lengths = np.asarray(total_lengths, np.int64)
    config = train_parallel_config
    group = config.get("microbatch_group_size_per_vp_stage", 1) if config["vpp_size"] > 1 else 1
    topology = pipeline(config["dp_size"], group)
    steps = _steps(np.asarray(rollout_indices, np.int64), global_batch_size)
    partitions: list[list[int]] = [[] for _ in range(topology.dp)]
    batches: list[list[list[int]]] = [[] for _ in range(topology.dp)]
    counts = []
    for number, samples in enumerate(steps):
        packs = _packs(args, config["cp_size"], topology, lengths[samples], number)
        counts.append(len(packs[0]))
        for rank, own in enumerate(packs):
            for pack in own:
                first = len(partitions[rank])
                partitions[rank] += samples[np.sort(pack)].tolist()
                batches[rank].append(list(range(first, len(partitions[rank]))))
    return partitions, batches, counts, [global_batch_size] * len(steps)


def _steps(rollouts: IntArray, size: int) -> list[IntArray]:
    """The samples of each step, by rollout in the order of first appearance."""
    number, first = by_first_appearance(rollouts)
    count = len(first) // size
    if count < 1:
        raise ScheduleError(
            f"num_rollouts ({len(first)}) < global_batch_size ({size}); a step needs that many."
        )
    members = Ragged.group(number, len(first))
    return [
        np.concatenate([members[rollout] for rollout in range(step * size, (step + 1) * size)])
        for step in range(count)
    ]


def _packs(
    args: Any, cp_size: int, topology: Topology, lengths: IntArray, step: int
) -> list[list[IntArray]]:
    """The samples of each micro-batch, by rank, as numbers within the step."""
    if len(lengths) < topology.dp:
        raise ScheduleError(
            f"step {step} has {len(lengths)} samples for {topology.dp} ranks; each needs one."
        )
    try:
        if args.use_dynamic_batch_size:
            return filled_packs(make_plan(lengths, _dynamic(args, cp_size, topology)))
        recipe = _static(args, topology, len(lengths), step)
        return filled_packs(plan_step(lengths, recipe))
    except PlanError as error:
        raise ScheduleError(f"step {step}: {error}") from None


def _dynamic(args: Any, cp_size: int, topology: Topology) -> Recipe:
    if args.max_tokens_per_gpu is None:
        raise ScheduleError("use_dynamic_batch_size needs max_tokens_per_gpu. Set it.")
    margin = getattr(args, "packing_safety_margin", 1.0)
    return Recipe(
        layout=Packed(max_tokens=max(int(args.max_tokens_per_gpu * cp_size * margin), 1)),
        topology=topology,
        cost=WORK if args.balance_data else Cost.tokens(),
        overflow="alone",
    )


def _static(args: Any, topology: Topology, samples: int, step: int) -> Recipe:
    size = args.micro_batch_size
    unit = size * topology.dp * topology.multiple
    if samples % unit:
        raise ScheduleError(
            f"step {step} has {samples} samples; expected a multiple of {unit}: micro_batch_size "
            f"{size}, {topology.dp} ranks and a pipeline group of {topology.multiple}."
        )
    return Recipe(
        layout=Packed(samples=size),
        topology=topology,
        steps=Steps(micro_batches=samples // (size * topology.dp)),
        cost=WORK,
        balance="refined" if args.balance_data else "none",
    )
