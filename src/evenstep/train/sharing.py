"""check_sharing: a model computes the same where segments see others as on whole samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.ragged import ELSEWHERE, Segments, rounded_up
from evenstep.errors import ConfigError
from evenstep.tensors.batch import Batch
from evenstep.tensors.losses import select_output
from evenstep.train.collectives import Collective
from evenstep.train.framework import Forward, Framework, device_of, undisturbed, unwrapped

if TYPE_CHECKING:
    from evenstep.train.runner import Runner
    from evenstep.train.scoring import ForwardPasses

_CHECKED: MutableMapping[Any, list[Collective]] = WeakIdKeyDictionary()
"""The collectives whose ranks have checked a model. Others have to check it again, together."""
TF32, HALF = 1e-2, 0.1
"""The most that outputs may differ by rounding, relative to their norm."""


def check_sharing(
    running: Runner | ForwardPasses,
    items: Iterable[tuple[MicroBatch, Any]],
    plan: Plan | None,
    ranks: Collective,
) -> None:
    """Raise, on all ranks alike, if outputs differ where two samples share a prefix.

    Once per model and collective, if samples share prefixes in this plan, or ranks share samples.
    Each rank runs two samples of its micro-batches without gradients: shared, whole, and without
    their prefix; if ranks share samples, the beginning of one sample in two segments. `items` are
    its micro-batches and samples.
    """
    if not running.check_prefixes or plan is None or plan.segments.parent is None:
        return
    inner, forward = unwrapped(running.model), running.forward
    if _is_checked(inner, ranks):
        return
    assert forward is not None
    between = bool((plan.segments.parent == ELSEWHERE).any())
    compared, difference, allowed = False, 0.0, 1.0
    error: Exception | None = None
    try:
        # On all ranks: it drops gathered parameters, which the forwards of all ranks gather again.
        model = running.model
        locks_step = isinstance(model, torch.nn.Module) and Framework.of(model).locks_step
        item: tuple[MicroBatch, Any] | None = None
        for micro, samples in items:
            pair = halves_of(micro) if between else pair_of(micro)
            micro = MicroBatch.one_row([]) if between else micro
            item = (micro if pair is None else pair, samples)
            if pair is not None:
                compared = True
                break
        # Forwards of fully_shard communicate, so ranks that share nothing run some as well.
        if item is not None and (compared or locks_step):
            batch, device = running.collate(*item), running.device or device_of(running.model)
            batch = batch if device is None else batch.to(device)
            difference, allowed = difference_of(inner, forward, batch)
    except Exception as raised:  # other ranks wait for the sum below
        error = raised
    fine = error is None and difference <= allowed  # False if it is NaN
    counts = torch.tensor([not fine, compared], dtype=torch.float64)
    failures, comparisons = ranks.all_reduce_sum(counts).tolist()
    if failures:
        if error is not None:
            raise error
        if fine:
            raise ConfigError(
                f"the check of shared prefixes of {type(inner).__name__} failed on another rank, "
                f"whose error says why. check_prefixes=False skips this check."
            )
        raise ConfigError(
            f"{type(inner).__name__} computes other outputs where samples share a prefix: on this "
            f"rank they differ by {difference:.2g} of their norm from those of whole samples, and "
            f"{allowed:.2g} is allowed. Use evenstep.tensors.attention and batch.position_ids in "
            f"its layers (use_attention(model) for Hugging Face models), or plan without prefixes. "
            f"check_prefixes=False skips this check."
        )
    if comparisons:
        with suppress(TypeError):  # a model without weak references is checked every time
            _CHECKED.setdefault(inner, []).append(ranks)


def _is_checked(model: Any, ranks: Collective) -> bool:
    try:
        return ranks in _CHECKED.get(model, ())
    except TypeError:  # no weak references
        return False


_FEW = 32  # tokens of a sample that is compared


def halves_of(micro: MicroBatch) -> MicroBatch | None:
    """The beginning of a sample in two segments, of which the second sees the first."""
    if not len(micro.sample_ends) or micro.sample_ends.max() < 2:
        return None
    longest = int(micro.sample_ends.argmax())
    two = [longest, longest]
    tokens = min(int(micro.sample_ends[longest]), _FEW)
    half = tokens // 2
    sample = micro.segments.sample[two]
    columns = np.array([[0, half], [half, tokens - half], [-1, 0]])  # start, length, parent
    segments = Segments(sample, *columns)
    ends = np.full(2, tokens)
    groups = None if micro.groups is None else micro.groups[two]
    return MicroBatch(
        segments, np.array([0, 2]), tokens, micro.sample_lengths[two], 1, ends, groups
    )


def pair_of(micro: MicroBatch) -> MicroBatch | None:
    """The two neighbours of a tree with the fewest tokens; None if no two samples share."""
    segments, leaves = micro.segments, np.flatnonzero(micro.own)
    if not segments.shares_slots:
        return None
    assert segments.parent is not None
    tree = np.cumsum(segments.parent < 0)[leaves]
    mates = np.flatnonzero(tree[1:] == tree[:-1])
    if not len(mates):  # what is left of a tree whose other samples were skipped
        return None
    tokens = micro.sample_ends[leaves]
    first = mates[np.argmin(tokens[mates] + tokens[mates + 1])]
    chosen = segments.sample[leaves[first : first + 2]]
    pair = micro.without(np.setdiff1d(segments.sample, chosen).tolist())
    slots = int(rounded_up(pair.segments.length, micro.alignment).sum())
    return replace(pair, width=rounded_up(slots, math.lcm(micro.width_unit, micro.alignment)))


def difference_of(model: Any, forward: Forward, batch: Batch) -> tuple[float, float]:
    """How far outputs behind the shared prefix differ from those of whole samples, and how far
    they may: by rounding, but by no more than half of what forgetting the prefix would change."""
    dtypes: set[torch.dtype] = set()

    def note(module: Any, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            dtypes.add(output.dtype)

    variants = (batch, batch.unshared, replace(batch, tree=None, keys=None))
    with undisturbed(model), ExitStack() as stack:
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            stack.callback(module.register_forward_hook(note).remove)
        shared, whole, alone = (_outputs(forward(model, each), each) for each in variants)
    if batch.tree is None:
        return 0.0, 1.0
    names = shared.keys() & whole.keys() & alone.keys()
    if not names:
        raise ConfigError(
            f"{type(model).__name__} returns no tensor (rows, width, ...) to compare where samples "
            f"share a prefix. Let `forward` return such a tensor, or an object that has it as "
            f"'logits'. check_prefixes=False skips this check."
        )
    behind = batch.tree.of_samples(batch.starts[batch.segment_ids] > 0)
    worst = forgotten = 0.0
    for name in names:
        expected = whole[name][behind].double()
        norm = expected.norm().clamp(min=1e-30)
        ours, without_prefix = (
            float((batch.tree.of_samples(each[name])[behind].double() - expected).norm() / norm)
            for each in (shared, alone)
        )
        worst = worst if ours <= worst else ours  # NaN, too
        forgotten = max(forgotten, without_prefix)
        dtypes.add(shared[name].dtype)
    exact = torch.get_float32_matmul_precision() == "highest"
    rounding = {torch.float64: 1e-9, torch.float32: 1e-4 if exact else TF32}
    allowed = max(rounding.get(each, HALF) for each in dtypes)
    return worst, min(allowed, max(1e-5, forgotten / 2))


def _outputs(outputs: Any, batch: Batch) -> dict[Any, Tensor]:
    """The outputs that have one entry per slot, by name or position."""
    if isinstance(outputs, tuple | list):
        outputs = dict(enumerate(outputs))
    elif not isinstance(outputs, Mapping):
        outputs = {"logits": select_output(outputs, "logits", batch.rows, batch.width)}
    return {
        name: value
        for name, value in outputs.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.shape[:2] == batch.tokens.shape
    }
