"""Checks of a plan, one function for each guarantee. They use the `Plan` alone.

Each check returns a list of faults as sentences; an empty list means that the guarantee holds.
`CHECKS` holds all of them by name; `evenstep check` prints their docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import (
    ELSEWHERE,
    FloatArray,
    IntArray,
    by_first_appearance,
    offsets_of,
    sum_by,
)
from evenstep.core.text import MOST
from evenstep.errors import InputError, PlanError

if TYPE_CHECKING:
    from evenstep.core.plan import Plan


BoolArray: TypeAlias = NDArray[np.bool_]

_SHOWN = 3  # violations shown per check
_COUNTABLE = 2.0**62  # slots of a plan whose sums fit 64 bits


def offsets_nest(plan: Plan) -> list[str]:
    """Rows, micro-batches and cells cover the segments without gap or overlap."""
    wrong = []
    levels = (
        ("row_offsets", plan.row_offsets, len(plan.segments)),
        ("micro_offsets", plan.micro_offsets, len(plan.row_offsets) - 1),
        ("cell_offsets", plan.cell_offsets, len(plan.micro_offsets) - 1),
    )
    # Each level divides the entries of the level below it.
    for name, offsets, end in levels:
        ends = len(offsets) and (offsets[0], offsets[-1]) == (0, end)
        if not ends or (offsets[1:] < offsets[:-1]).any():
            wrong.append(f"{name} does not ascend from 0 to {end}")
    cells, micro_batches = len(plan.cell_offsets) - 1, len(plan.micro_offsets) - 1
    if len(plan.widths) != micro_batches:
        wrong.append(f"{len(plan.widths)} widths for {micro_batches} micro-batches")
    if cells % plan.num_ranks:
        wrong.append(f"{cells} cells do not divide into {plan.num_ranks} ranks")
    if (np.diff(plan.micro_offsets) < 1).any() or (plan.widths < 1).any():
        wrong.append("a micro-batch has no row or no width")
    # Columns of samples, and the samples of segments.
    count = len(plan.lengths)
    columns = {"step_of": plan.step_of, **plan.columns}
    for name in ("groups", "prefix_order", "prefix_shared"):
        if getattr(plan, name) is not None:
            columns[name] = getattr(plan, name)
    wrong += [
        f"{name} has {len(column)} entries for {count} samples"
        for name, column in columns.items()
        if len(column) != count
    ]
    if ((plan.segments.sample < 0) | (plan.segments.sample >= count)).any():
        wrong.append("a segment has a sample that does not exist")
    parent = plan.segments.parent
    if parent is not None and not wrong:
        segments = np.diff(plan.segment_offsets)[plan.micro_batch_of_segment]
        if ((parent < ELSEWHERE) | (parent >= segments)).any():
            wrong.append("a segment has a parent outside of its micro-batch")
    return wrong


def numbers_in_range(plan: Plan) -> list[str]:
    """Lengths, columns and slots are in a range that can be added up."""
    # 4 rows of 2**62 slots would overflow to 0, and a column of -150 would raise its limit.
    wrong = []
    columns = [("length", plan.lengths, 1), *((name, c, 0) for name, c in plan.columns.items())]
    for name, column, least in columns:
        sentence = f"sample {{}} has {name} {{}}, not between {least} and {MOST}"
        wrong += _faults((column < least) | (column > MOST), sentence, column)
    slots = plan.rows.astype(np.float64) * plan.widths
    if slots.sum() >= _COUNTABLE:
        widest = int(slots.argmax())
        wrong.append(
            f"micro-batch {widest} is {plan.widths[widest]} wide, which overflows 64-bit sums"
        )
    return wrong


def segments_once(plan: Plan) -> list[str]:
    """Every token of every sample runs or is shared once, unless it was dropped or truncated."""
    recipe, segments = plan.recipe, plan.whole_segments
    by = np.lexsort((segments.start, segments.sample))
    sample, start, length = segments.sample[by], segments.start[by], segments.length[by]
    # Where each segment must start: at 0, or where the one before it in its sample ends.
    # samples [0, 0, 1] with starts [0, 8, 0] and lengths [8, 3, 5] -> expected [0, 8, 0]
    first = np.ones(len(by), bool)
    first[1:] = sample[1:] != sample[:-1]
    expected = np.zeros(len(by), np.int64)
    expected[1:] = np.where(first[1:], 0, start[:-1] + length[:-1])
    ends = np.zeros(len(plan.lengths), np.int64)
    np.maximum.at(ends, sample, start + length)
    num_segments = np.bincount(sample, minlength=len(plan.lengths))
    kept = plan.step_of >= 0
    wrong = _named(sample[(start != expected) | (length < 1)], "repeats or skips tokens")
    wrong += _named(~kept & (num_segments > 0), "was dropped but runs")
    wrong += _named(kept & (num_segments == 0), "never runs")
    if recipe.overflow == "truncate":
        return wrong + _named(ends > plan.lengths, "runs past its end")
    whole = np.where(kept, plan.lengths, 0)
    return wrong + _named((ends != whole) & (num_segments > 0), "does not run to its end")


def overflow_as_asked(plan: Plan) -> list[str]:
    """Only samples that are too long are dropped, truncated, split or run over the budget."""
    recipe, limit = plan.recipe, plan.recipe.longest_segment
    count = len(plan.lengths)
    sample, length = plan.whole_segments.sample, plan.whole_segments.length
    kept = sum_by(sample, length, count).astype(np.int64)
    num_segments = np.bincount(sample, minlength=count)
    # Samples that are too long, and segments that are. What ranks share is not split.
    over = np.zeros(count, bool) if limit is None else plan.lengths > limit
    num_segments[plan.segments.sample[plan.segments.is_shared]] = 1
    beyond = length > (limit or int(length.max(initial=0)))
    # What happened to each sample, by the policy that allows it.
    faults = {
        "drop": (plan.step_of < 0, "was dropped"),
        "truncate": ((kept > 0) & (kept < plan.lengths), "was truncated"),
        "split": (num_segments > 1, "was split"),
    }
    wrong = []
    for policy, (happened, fault) in faults.items():
        if recipe.overflow == policy:
            wrong += _named(happened & ~over, f"{fault}, but it fits")
        else:
            wrong += _named(happened, f"{fault}, but overflow is {recipe.overflow!r}")
    if recipe.overflow == "truncate":
        wrong += _named(over & (kept != limit), "was not truncated to what fits")
    if recipe.overflow != "alone":
        wrong += _named(sample[beyond], "is longer than any micro-batch can hold")
    return wrong


def slots_within_budget(plan: Plan) -> list[str]:
    """No micro-batch has more slots than the budget, except an over-long sample alone."""
    recipe, layout = plan.recipe, plan.recipe.layout
    if layout.budget is None:
        # A micro-batch is no wider than the fullest row of its step needs.
        step = plan.cell_of_micro_batch // plan.num_ranks
        most = np.zeros(plan.num_steps, np.int64)
        np.maximum.at(most, np.repeat(step, plan.rows), _used_by_row(plan))
        most = layout.widths(most, recipe.width_unit)[step]
        sentence = "micro-batch {} is {} wide, but its step needs {}"
        return _faults(plan.widths > most, sentence, plan.widths, most)
    over = plan.slots > layout.budget
    if recipe.overflow == "alone" and recipe.longest_segment is not None and len(plan.segments):
        # One over-long segment, in a row just as wide as it needs. An empty micro-batch has the
        # length of another, which does not matter.
        offsets = plan.segment_offsets
        length = plan.segments.length[np.minimum(offsets[:-1], len(plan.segments) - 1)]
        alone = (np.diff(offsets) == 1) & (length > recipe.longest_segment) & (plan.rows == 1)
        over &= ~(alone & (plan.widths == layout.widths(length, recipe.width_unit)))
    return _faults(over, f"micro-batch {{}} has {{}} slots, more than {layout.budget}", plan.slots)


def _used_by_row(plan: Plan) -> IntArray:
    """The slots of each row's aligned segments."""
    return np.diff(offsets_of(plan.aligned_lengths)[plan.row_offsets])


def rows_hold_segments(plan: Plan) -> list[str]:
    """Each row is wide enough for its aligned segments."""
    used = _used_by_row(plan)
    width = np.repeat(plan.widths, plan.rows)
    return _faults(used > width, "row {} needs {} slots but has {}", used, width)


def widths_aligned(plan: Plan) -> list[str]:
    """Widths are multiples of the rounding and the alignment, and equal `pad_to` if given."""
    fixed, unit, widths = plan.recipe.layout.pad_to, plan.recipe.width_unit, plan.widths
    sentence = f"micro-batch {{}} is {{}} wide, not a multiple of {unit}"
    wrong = _faults(widths % unit != 0, sentence, widths)
    if fixed is None:
        return wrong
    return wrong + _faults(widths != fixed, f"micro-batch {{}} is {{}} wide, not {fixed}", widths)


def rows_fit_layout(plan: Plan) -> list[str]:
    """Micro-batches have the rows and the segments per row that the layout asks for."""
    layout, rows = plan.recipe.layout, plan.rows
    wrong = []
    if layout.segments_per_row is not None:
        crowded = np.diff(plan.row_offsets) > layout.segments_per_row
        wrong += _faults(crowded, "row {} of a padded micro-batch holds more than one segment")
    segments = np.diff(plan.segment_offsets)
    wanted = layout.row_counts(segments)
    if not layout.static and plan.recipe.topology.equal_widths:
        wanted = np.maximum(wanted, rows)  # other micro-batches of the step may need more
    wrong += _faults(rows != wanted, "micro-batch {} has {} rows, not {}", rows, wanted)
    if layout.samples is not None:
        samples = plan.sum_by_micro_batch(plan.own.astype(np.int64))
        sentence = f"micro-batch {{}} holds {{}} samples, more than {layout.samples}"
        wrong += _faults(samples > layout.samples, sentence, samples)
    return wrong


def counts_agree(plan: Plan) -> list[str]:
    """All ranks of a step run equally many micro-batches, a multiple of the pipeline's."""
    multiple = plan.recipe.topology.multiple
    counts = np.diff(plan.cell_offsets).reshape(plan.num_steps, plan.num_ranks)
    distinct = [sorted(set(ranks)) for ranks in counts.tolist()]
    uneven = (counts != counts[:, :1]).any(axis=1)
    off = (counts[:, 0] % multiple != 0) | (counts[:, 0] == 0)
    sentence = f"step {{}} runs {{}} micro-batches per rank, not a multiple of {multiple}"
    return [
        *_faults(uneven, "ranks of step {} run {} micro-batches", distinct),
        *_faults(off, sentence, counts[:, 0]),
    ]


def samples_stay_in_step(plan: Plan) -> list[str]:
    """Each sample runs in its assigned step. Steps have the size asked for; none is empty."""
    cell = plan.cell_of_micro_batch[plan.micro_batch_of_segment]
    sample, step_of = plan.segments.sample, plan.step_of
    elsewhere = cell // plan.num_ranks != step_of[sample]
    wrong = _named(sample[elsewhere], "does not run in its step")
    here = step_of[(step_of >= 0) & (step_of < plan.num_steps)]
    empty = np.bincount(here, minlength=plan.num_steps) == 0
    wrong += _faults(empty, "step {} runs no sample")
    asked = plan.recipe.steps.micro_batches
    if asked is None:
        return wrong + _named(step_of != _assigned_steps(plan), "is in a wrong step")
    # All steps but the last have exactly as many micro-batches as asked, and samples are in order:
    # none is in an earlier step than one before it. A group counts where its first member is, so
    # steps [0, 1, 0] of samples in groups [7, 8, 7] are in order. Whether a step could take more
    # samples is not checked: that depends on the packer.
    kept = np.flatnonzero(step_of >= 0)
    kept = kept[np.argsort(_owners(plan, kept), kind="stable")]
    behind = kept[1:][step_of[kept][1:] < step_of[kept][:-1]]
    wrong += _named(np.append(behind, np.flatnonzero(step_of < -1)), "is in a wrong step")
    count = np.diff(plan.cell_offsets)[:: plan.num_ranks]
    off = count != asked
    off[-1:] = count[-1:] > asked
    sentence = f"step {{}} has {{}} micro-batches per rank, not {asked}"
    return wrong + _faults(off, sentence, count)


def _assigned_steps(plan: Plan) -> IntArray:
    """The step of each sample by order alone; a group counts where its first member is."""
    asked, kept = plan.recipe.steps, np.flatnonzero(plan.step_of >= 0)
    expected = np.full(len(plan.lengths), -1, np.int64)
    expected[kept] = 0
    limit = asked.samples or asked.tokens
    if limit is None or len(kept) == 0:
        return expected
    # What each unit adds to a step: samples or tokens.
    weight = np.ones(len(kept), np.int64) if asked.samples else plan.lengths[kept]
    owner = _owners(plan, kept)
    loads = sum_by(owner, weight, int(owner.max()) + 1).astype(np.int64)
    total = offsets_of(loads)
    starts = [0]  # of each step; a step takes units while their sum is within the limit
    while True:
        end = int(np.searchsorted(total, total[starts[-1]] + limit, "right")) - 1
        end = max(end, starts[-1] + 1)
        if end >= len(loads):
            break
        starts.append(end)
    expected[kept] = np.searchsorted(starts, owner, "right") - 1
    return expected


def _owners(plan: Plan, samples: IntArray) -> IntArray:
    """The unit of each sample, by first appearance: groups [7, 8, 7] -> [0, 1, 0]."""
    if plan.groups is None:
        return np.arange(len(samples))
    return by_first_appearance(plan.groups[samples])[0]


def groups_together(plan: Plan) -> list[str]:
    """Samples of one group share a micro-batch, or a step, as asked."""
    if plan.groups is None:
        return []
    group = plan.groups[plan.segments.sample]
    micro = plan.micro_batch_of_segment
    owner = micro
    if plan.recipe.groups == "step":
        owner = plan.cell_of_micro_batch[micro] // plan.num_ranks
    # Sorted by group: a group is divided where two neighbours have different owners.
    by = np.lexsort((owner, group))
    same = (group[by][1:] == group[by][:-1]) & (owner[by][1:] != owner[by][:-1])
    divided = np.unique(group[by][1:][same])
    where = {"micro_batch": "micro-batches", "step": "steps"}[plan.recipe.groups]
    return [f"group {g} is spread over several {where}" for g in divided[:_SHOWN]]


def shapes_equal(plan: Plan) -> list[str]:
    """All micro-batches of a step have one shape if the pipeline needs it."""
    if not plan.recipe.topology.equal_widths:
        return []
    starts, shapes = plan.cell_offsets[:: plan.num_ranks], np.stack((plan.rows, plan.widths), 1)
    wrong = []
    for step in range(plan.num_steps):
        here = np.unique(shapes[starts[step] : starts[step + 1]], axis=0)
        if len(here) > 1:
            wrong.append(f"step {step} has the shapes {list(map(tuple, here[:_SHOWN].tolist()))}")
    return wrong[:_SHOWN]


def limits_hold(plan: Plan) -> list[str]:
    """No micro-batch exceeds the limits on cost, columns and gathered keys."""
    recipe, layout, limits, wrong = plan.recipe, plan.recipe.layout, plan.recipe.limits, []
    measured: list[tuple[str, IntArray | FloatArray, float]] = []
    count = np.diff(plan.segment_offsets)
    # With overflow='alone', a segment that exceeds a limit by itself runs alone.
    alone = (count == 1) if recipe.overflow == "alone" else np.zeros(len(count), bool)
    if limits.cost is not None:
        owner, aligned = plan.micro_batch_of_segment, plan.aligned_lengths
        together = layout.segment_costs(recipe, aligned, plan.segments.behind, plan.widths[owner])
        by_itself = layout.segment_costs(recipe, aligned)
        costs, alone_costs = (
            sum_by(owner, each, len(count)) + recipe.cost.per_micro_batch
            for each in (together, by_itself)
        )
        exempt = alone & (alone_costs > limits.cost)
        measured.append(("cost", np.where(exempt, 0.0, costs), limits.cost * (1 + 1e-9)))
    for name, limit in limits.columns.items():
        if name not in plan.columns:
            wrong.append(f"column {name} has a limit but is not in the plan")
            continue
        column = np.where(plan.own, plan.columns[name][plan.segments.sample], 0)
        measured.append((name, np.where(alone, 0, plan.sum_by_micro_batch(column)), limit))
    if (parents := plan.parents) is not None and recipe.gathered is not None:
        # Segments behind a shared prefix gather its keys and their own.
        keys = np.where(parents >= 0, plan.segments.start + plan.aligned_lengths, 0)
        measured.append(("gathered keys", plan.sum_by_micro_batch(keys), recipe.gathered))
    for name, value, most in measured:
        over = (value > most) & (count > 0)
        wrong += _faults(over, f"micro-batch {{}} holds {{}} {name}, more than {most}", value)
    return wrong


def sizes_equal(plan: Plan) -> list[str]:
    """With `equal_sizes`, ranks of a step differ by one segment at most."""
    if not plan.recipe.equal_sizes:
        return []
    cell = plan.cell_of_micro_batch[plan.micro_batch_of_segment]
    count = np.bincount(cell, minlength=plan.num_steps * plan.num_ranks)
    count = count.reshape(plan.num_steps, plan.num_ranks)
    uneven = count.max(axis=1) - count.min(axis=1) > 1
    return _faults(uneven, "ranks of step {} hold {} segments", count.tolist())


def tokens_equal(plan: Plan) -> list[str]:
    """With `equal_tokens`, all micro-batches of a wave have equally many slots."""
    wrong = []
    for step, slots in _by_wave(plan, plan.slots) if plan.recipe.equal_tokens else ():
        sentence = f"wave {{}} of step {step} has {{}} slots"
        wrong += _faults(slots.min(axis=0) != slots.max(axis=0), sentence, slots.T.tolist())
    return wrong[:_SHOWN]


def kinds_together(plan: Plan) -> list[str]:
    """With `second_work.same_waves`, every rank of a wave has a sample with that work, or none."""
    second = plan.recipe.second_work
    if second is None or not second.same_waves:
        return []
    if second.column not in plan.columns:
        return [f"column {second.column} is the second work but is not in the plan"]
    column = plan.columns[second.column][plan.segments.sample]
    wrong = []
    for step, counts in _by_wave(plan, plan.sum_by_micro_batch((column > 0).astype(np.int64))):
        having = (counts > 0).sum(axis=0)
        mixed = (having > 0) & (having < plan.num_ranks)
        sentence = f"wave {{}} of step {step} has {second.column} on {{}} of {plan.num_ranks} ranks"
        wrong += _faults(mixed, sentence, having)
    return wrong[:_SHOWN]


def _by_wave(plan: Plan, values: IntArray) -> list[tuple[int, IntArray]]:
    """Values of micro-batches -> (step, array of ranks and waves) of each step.

    A step whose ranks run different numbers of micro-batches has no waves: see `counts_agree`.
    """
    counts = np.diff(plan.cell_offsets).reshape(plan.num_steps, plan.num_ranks)
    starts = plan.cell_offsets[:: plan.num_ranks].tolist()
    return [
        (step, values[starts[step] : starts[step + 1]].reshape(plan.num_ranks, -1))
        for step in np.flatnonzero((counts == counts[:, :1]).all(axis=1)).tolist()
    ]


def order_kept(plan: Plan) -> list[str]:
    """With `balance="none"`, micro-batches take the samples in order, and ranks take turns."""
    filled = np.flatnonzero(np.diff(plan.segment_offsets))
    if plan.recipe.balance != "none" or len(filled) == 0:
        return []
    # The turn of each sample: its number, or that of its group.
    kept = np.flatnonzero(plan.step_of >= 0)
    turn = np.full(len(plan.lengths), -1, np.int64)
    together = plan.recipe.groups == "micro_batch"
    turn[kept] = _owners(plan, kept) if together else np.arange(len(kept))
    key = turn[plan.segments.sample]
    cell = plan.cell_of_micro_batch[filled]
    step, rank = cell // plan.num_ranks, cell % plan.num_ranks
    # In the order in which they run: by step, by wave, by rank.
    order = np.lexsort((rank, filled - plan.cell_offsets[cell], step))
    starts = plan.segment_offsets[filled]
    first, last = np.minimum.reduceat(key, starts)[order], np.maximum.reduceat(key, starts)[order]
    late = (first[1:] < last[:-1]) & (step[order][1:] == step[order][:-1])
    return [f"micro-batch {m} runs after later samples" for m in filled[order][1:][late][:_SHOWN]]


def parents_first(plan: Plan) -> list[str]:
    """Shared prefixes stand before the segments that see them, in one row and in preorder."""
    parent, segments = plan.parents, plan.segments
    if parent is None:
        return []
    number = np.arange(len(segments))
    wrong = _faults(parent >= number, "segment {} stands before its parent")
    if wrong:
        return wrong
    row = np.repeat(np.arange(len(plan.row_offsets) - 1), np.diff(plan.row_offsets))
    seen, above = parent >= 0, np.maximum(parent, 0)
    wrong = _faults(seen & (row != row[above]), "segment {} is in another row than its parent")
    # In preorder, a parent is the segment before, or a segment that this one sees.
    # parents [-1, 0, 1, 0] -> the segments before are 2 at segment 3, then 1, then 0, its parent
    at = number - 1
    while (at > parent).any():
        at = np.where(at > parent, parent[at], at)
    wrong += _faults(at != parent, "segment {} is apart from others behind its parent")
    # The sample of a shared prefix is the first behind it, so it runs in this micro-batch.
    other = ~plan.own & (segments.sample != np.roll(segments.sample, -1))
    return wrong + _faults(other, "segment {} is no prefix of the sample after it")


def positions_continue(plan: Plan) -> list[str]:
    """A segment that sees a shared prefix begins where that ends; prefixes begin at token 0."""
    parent, segments = plan.parents, plan.segments
    if parent is None:
        return []
    expected = np.where(parent < 0, 0, (segments.start + segments.length)[parent])
    wrong = (segments.start != expected) & ((parent >= 0) | ~plan.own)
    return _faults(wrong, "segment {} begins at token {}, not at {}", segments.start, expected)


def prefixes_equal(plan: Plan) -> list[str]:
    """Samples share only tokens that the prefixes of the plan call equal, and not the last one."""
    prefixes, parent, segments = plan.prefixes, plan.parents, plan.segments
    if prefixes is None:
        return [] if parent is None else ["samples share tokens, but the plan has no prefixes"]
    try:
        prefixes.check(plan.lengths)
    except InputError as error:
        return [str(error)]
    if parent is None:
        return []
    # A shared prefix ends before the last equal token, so that its last slot has one label.
    child = np.flatnonzero(parent >= 0)
    above = parent[child]
    sample, other = segments.sample[child], segments.sample[above]
    most = np.where(sample == other, plan.ends(sample), prefixes.between(sample, other)) - 1
    end = (segments.start + segments.length)[above]
    sentence = "samples {} and {} share {} tokens, but at most {} can be shared"
    names = [sentence.format(*values) for values in zip(sample, other, end, most, strict=True)]
    return [names[at] for at in np.flatnonzero(end > most)[:_SHOWN]]


def shared_in_one_wave(plan: Plan) -> list[str]:
    """The parts of a sample that ranks share are in one wave."""
    segments, parent = plan.segments, plan.segments.parent
    shared = np.flatnonzero(segments.is_shared)
    if parent is None or not len(shared):
        return []
    micro = plan.micro_batch_of_segment[shared]
    cell = plan.cell_of_micro_batch[micro]
    wave = micro - plan.cell_offsets[cell]
    sample, start = segments.sample[shared], segments.start[shared]
    by = np.lexsort((wave, sample))
    same = sample[by][1:] == sample[by][:-1]
    apart = wave[by][1:] != wave[by][:-1]
    wrong = _named(sample[by][1:][same & apart], "is shared by ranks in different waves")
    # The first part sees nothing, all others what is before them; none is a prefix of others.
    expected = np.where(start == 0, -1, ELSEWHERE)
    odd = (parent[shared] != expected) | ~plan.own[shared]
    return wrong + _named(sample[odd], "is shared, but not all its parts see what is before them")


def sharing_as_asked(plan: Plan) -> list[str]:
    """No sample is shared by more ranks, and no rank receives more tokens, than asked for."""
    recipe, segments = plan.recipe, plan.segments
    shared = np.unique(segments.sample[segments.is_shared])
    if recipe.sharing is None or not len(shared):
        return []
    parts = np.bincount(segments.sample)
    most = recipe.sharing.most_ranks or plan.num_ranks
    wrong = _named(shared[parts[shared] > most], f"is shared by more than {most} ranks")
    # By default, a rank receives at most its budget, or the longest sample of the step.
    limit = np.full(plan.num_micro_batches, recipe.sharing.max_received or recipe.capacity)
    if recipe.sharing.max_received is None:
        step = plan.cell_of_micro_batch // plan.num_ranks
        longest = np.zeros(plan.num_steps, np.int64)
        ends = plan.ends(segments.sample)
        aligned = -(-ends // recipe.topology.alignment) * recipe.topology.alignment
        np.maximum.at(longest, step[plan.micro_batch_of_segment], aligned)
        limit = np.maximum(limit, longest[step])
    received = plan.exchanged[1]
    sentence = "micro-batch {} receives {} tokens, more than {}"
    return wrong + _faults(received > limit, sentence, received, limit)


def exchanges_agree(plan: Plan) -> list[str]:
    """Ranks receive what others send, and a part sees exactly the tokens before it."""
    wrong: list[str] = []
    if plan.segments.parent is None or not (plan.segments.parent == ELSEWHERE).any():
        return wrong
    for number, step in enumerate(plan):
        for wave in zip(*step, strict=False):
            sent, received = [], []  # (from, to, sample, start, length), in order
            for rank, micro in enumerate(wave):
                segments, exchange = micro.segments, micro.exchange
                front = np.where(segments.parent == ELSEWHERE, segments.start, 0)
                if exchange is None:
                    if front.any():
                        wrong.append(f"rank {rank} of step {number} has no exchange")
                    continue
                parts, rows = segments.take(exchange.sent), np.full
                columns = parts.sample, parts.start, parts.length
                sent.append(np.stack((rows(len(parts), rank), exchange.sent_to, *columns)))
                sample, start = exchange.samples[exchange.received_number], exchange.received_start
                to = exchange.received_from, rows(len(sample), rank)
                received.append(np.stack((*to, sample, start, exchange.received)))
                parts = segments.take(np.flatnonzero(exchange.number >= 0))
                sample = np.append(sample, parts.sample)
                start = np.append(start, parts.start)
                length = np.append(exchange.received, parts.length)
                for at in np.flatnonzero(front).tolist():
                    mine = (sample == segments.sample[at]) & (start < front[at])
                    seen = np.flatnonzero(mine)[np.argsort(start[mine])]
                    ends = offsets_of(length[seen])
                    if not np.array_equal(ends, [*start[seen], front[at]]):
                        wrong += _named(segments.sample[at : at + 1], "lacks tokens before a part")
            if not sent:
                continue
            tables = [np.concatenate(each, axis=1) for each in (sent, received)]
            tables = [table[:, np.lexsort((table[1], table[0]))] for table in tables]
            if not np.array_equal(tables[0], tables[1]):
                wrong.append(f"ranks of step {number} send other tokens than others receive")
    return wrong[:_SHOWN]


CHECKS: dict[str, Callable[[Plan], list[str]]] = {
    check.__name__: check
    for check in (
        offsets_nest,
        numbers_in_range,
        segments_once,
        overflow_as_asked,
        slots_within_budget,
        rows_hold_segments,
        widths_aligned,
        rows_fit_layout,
        counts_agree,
        samples_stay_in_step,
        groups_together,
        shapes_equal,
        limits_hold,
        sizes_equal,
        tokens_equal,
        kinds_together,
        order_kept,
        parents_first,
        positions_continue,
        prefixes_equal,
        shared_in_one_wave,
        sharing_as_asked,
        exchanges_agree,
    )
}


def violations(plan: Plan) -> list[str]:
    """What is wrong with a plan, one sentence for each fault; empty if it is valid.

    Each starts with its check: "slots_within_budget: micro-batch 3 has 120 slots, more than 100".

    >>> from evenstep import Packed, Recipe, make_plan
    >>> violations(make_plan([5, 3], Recipe(layout=Packed(max_tokens=8))))
    []
    """
    by_check = violations_by_check(plan)
    return [f"{name}: {fault}" for name, faults in by_check.items() for fault in faults]


def violations_by_check(plan: Plan) -> dict[str, list[str]]:
    """The faults that each check finds. If offsets do not nest, no other check runs."""
    broken = offsets_nest(plan)
    if broken:
        return {"offsets_nest": broken}
    return {name: check(plan) for name, check in CHECKS.items()}


def assert_valid(plan: Plan) -> None:
    """Raise a `PlanError` that lists all faults."""
    faults = violations(plan)
    if faults:
        raise PlanError(f"the plan is invalid: {'; '.join(faults)}. Make the plan again.")


def _faults(wrong: BoolArray, sentence: str, *columns: Sequence[Any] | NDArray[Any]) -> list[str]:
    """The sentence of the first entries that are wrong, with their number and their columns.

    wrong [False, True], "row {} needs {}", [3, 5] -> ["row 1 needs 5"]
    """
    faults = []
    for at in np.flatnonzero(wrong)[:_SHOWN].tolist():
        fault = sentence
        for value in (at, *(column[at] for column in columns)):
            fault = fault.replace("{}", str(value), 1)  # names of columns may have other braces
        faults.append(fault)
    return faults


def _named(samples: IntArray | BoolArray, fault: str) -> list[str]:
    """The fault of the first samples: their numbers, or which of all samples they are."""
    numbers = np.flatnonzero(samples) if samples.dtype == np.bool_ else np.unique(samples)
    more = f" (and {len(numbers) - _SHOWN} more)" if len(numbers) > _SHOWN else ""
    return [f"sample {number} {fault}{more}" for number in numbers[:_SHOWN]]
