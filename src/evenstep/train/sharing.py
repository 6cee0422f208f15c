"""check_sharing: a model computes the same where samples share a prefix as on whole samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.ragged import rounded_up
from evenstep.errors import ConfigError
from evenstep.tensors.batch import Batch
from evenstep.tensors.trees import shares_slots
from evenstep.train.collectives import Collective
from evenstep.train.framework import Forward, Framework, undisturbed, unwrapped

_CHECKED: WeakSet[Any] = WeakSet()
TF32, HALF = 1e-2, 0.1
"""The most that outputs may differ by rounding, relative to their norm."""


def check_sharing(
    model: Any,
    forward: Forward,
    collate: Callable[[MicroBatch, Any], Batch],
    device: torch.device | str | None,
    items: Iterable[tuple[MicroBatch, Any]],
    plan: Plan | None,
    ranks: Collective,
) -> None:
    """Raise, on all ranks alike, if outputs differ where two samples share a prefix.

    Once per model, if any rank shares prefixes in this plan. Each rank runs two samples of its
    micro-batches, shared and whole, without gradients. `items` are its micro-batches and samples.
    """
    inner = unwrapped(model)
    if plan is None or inner in _CHECKED or not shares_slots(plan.segments):
        return
    item: tuple[MicroBatch, Any] | None = None
    for micro, samples in items:
        pair = pair_of(micro)
        item = (micro if pair is None else pair, samples)
        if pair is not None:
            break
    difference, allowed, error = 0.0, 1.0, None
    # Forwards of fully_shard communicate, so ranks that share nothing run some as well.
    if item is not None and (shares_slots(item[0].segments) or Framework.of(model).locks_step):
        try:
            batch = collate(*item)
            batch = batch if device is None else batch.to(device)
            difference, allowed = difference_of(inner, forward, batch)
        except Exception as raised:  # other ranks wait for the sum below
            error = raised
    fine = error is None and difference <= allowed  # False if it is NaN
    if float(ranks.all_reduce_sum(torch.tensor(float(not fine), dtype=torch.float64))) > 0:
        if error is not None:
            raise error
        raise ConfigError(
            f"{type(inner).__name__} computes other outputs where samples share a prefix: on this "
            f"rank they differ by {difference:.1%} from those of whole samples, and rounding "
            f"explains {allowed:.1%}. Use evenstep.tensors.attention and batch.position_ids in "
            f"its layers (use_attention(model) for Hugging Face models), or plan without prefixes. "
            f"check_prefixes=False skips this check."
        )
    _CHECKED.add(inner)


def pair_of(micro: MicroBatch) -> MicroBatch | None:
    """The two neighbours of a tree with the fewest tokens; None if nothing is shared."""
    segments, leaves = micro.segments, np.flatnonzero(micro.own)
    if not shares_slots(segments):
        return None
    assert segments.parent is not None
    tree = np.cumsum(segments.parent < 0)[leaves]
    mates = np.flatnonzero(tree[1:] == tree[:-1])
    tokens = micro.sample_ends[leaves]
    first = mates[np.argmin(tokens[mates] + tokens[mates + 1])]
    chosen = segments.sample[leaves[first : first + 2]]
    pair = micro.without(np.setdiff1d(segments.sample, chosen).tolist())
    slots = int(rounded_up(pair.segments.length, micro.alignment).sum())
    return replace(pair, width=rounded_up(slots, math.lcm(micro.width_unit, micro.alignment)))


def difference_of(model: Any, forward: Forward, batch: Batch) -> tuple[float, float]:
    """How far outputs behind the shared prefix differ from those of whole samples, and how far
    rounding lets them."""
    dtypes: set[torch.dtype] = set()

    def note(module: Any, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            dtypes.add(output.dtype)

    with undisturbed(model), ExitStack() as stack:
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            stack.callback(module.register_forward_hook(note).remove)
        shared, whole = (_outputs(forward(model, each), each) for each in (batch, batch.unshared))
    if batch.tree is None:
        return 0.0, 1.0
    behind = batch.tree.of_samples(batch.starts[batch.segment_ids] > 0)
    worst = 0.0
    for name in shared.keys() & whole.keys():
        ours = batch.tree.of_samples(shared[name])[behind].double()
        theirs = whole[name][behind].double()
        difference = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
        worst = worst if difference <= worst else difference  # NaN, too
        dtypes.add(shared[name].dtype)
    exact = torch.get_float32_matmul_precision() == "highest"
    rounding = {torch.float64: 1e-9, torch.float32: 1e-4 if exact else TF32}
    return worst, max((rounding.get(each, HALF) for each in dtypes), default=HALF)


def _outputs(outputs: Any, batch: Batch) -> dict[str, Tensor]:
    """The outputs that have one entry per slot, by name."""
    named = outputs if isinstance(outputs, Mapping) else {"": outputs}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.shape[:2] == batch.tokens.shape
    }
