"""The pictures of docs/concepts.md. Those of plans show plans that the planner made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from docs.pictures.canvas import Canvas
from evenstep import (
    Cost,
    MicroBatch,
    Packed,
    Padded,
    Plan,
    Prefixes,
    Recipe,
    Sharing,
    Topology,
    make_plan,
)

LENGTHS = [9, 2, 3, 16, 4, 2, 7, 3, 12, 2, 5, 3]
BUDGET = 20
SLOT, ROW, GAP = 9.0, 16, 4


def shade(length: int) -> str:
    """Longer samples are darker."""
    return f"s{min(5, int(np.log2(max(length, 1)) * 1.3))}"


def lengths_to_plan() -> Canvas:
    """Lengths on the left, the plan of two ranks on the right."""
    canvas = Canvas("Lengths become a plan: micro-batches of two ranks", 780, 268)
    canvas.text(16, 24, "12 samples", "h")
    for at, length in enumerate(LENGTHS):
        y = 36 + at * (ROW + 2)
        canvas.text(30, y + 12, str(at), "small note end")
        canvas.box(36, y, length * SLOT, ROW, shade(length))
        canvas.text(42 + length * SLOT, y + 12, f"{length} tokens", "small note")
    canvas.arrow(280, 130, 350)
    canvas.text(282, 118, "make_plan", "small note")
    recipe = Recipe(layout=Packed(max_tokens=BUDGET), topology=Topology(dp=2))
    plan = make_plan(LENGTHS, recipe)
    canvas.text(372, 24, f"Two ranks, at most {BUDGET} slots per micro-batch", "h")
    for rank in range(2):
        y = 52 + rank * 100
        canvas.text(372, y + 34, f"rank {rank}")
        for at, micro in enumerate(plan[0, rank]):
            _packed_row(canvas, 430, y + at * 26, micro.segments.sample, micro.width)
            canvas.text(436 + micro.width * SLOT, y + 14 + at * 26, f"{micro.width}", "small note")
    canvas.text(372, 252, "Every sample once; ranks have equally many micro-batches.", "note")
    return canvas


def _packed_row(canvas: Canvas, x: float, y: float, samples: np.ndarray, width: int) -> None:
    canvas.box(x, y, width * SLOT, 20, "pad")
    for sample in samples:
        length = LENGTHS[sample]
        canvas.box(x, y, length * SLOT, 20, shade(length))
        if length > 1:
            bright = " bright" if shade(length) >= "s3" else ""
            canvas.text(x + length * SLOT / 2, y + 14, str(sample), f"small middle{bright}")
        x += length * SLOT


def layouts() -> Canvas:
    """The same samples in padded, dynamic and packed micro-batches of one rank."""
    recipes = {
        "Padded(samples=4), in order": Recipe(layout=Padded(samples=4), balance="none"),
        f"Padded(max_tokens={BUDGET})": Recipe(layout=Padded(max_tokens=BUDGET)),
        f"Packed(max_tokens={BUDGET})": Recipe(layout=Packed(max_tokens=BUDGET)),
    }
    canvas = Canvas("Padded, dynamic and packed micro-batches of the same samples", 780, 280)
    for at, (name, recipe) in enumerate(recipes.items()):
        plan, x = make_plan(LENGTHS, recipe), 16 + at * 262
        canvas.text(x, 24, name, "h")
        slots = sum(micro.rows * micro.width for micro in plan[0, 0])
        share = 1 - sum(LENGTHS) / slots
        canvas.text(x, 42, f"{slots} slots, {share:.0%} padding", "note" if share < 0.2 else "mark")
        _rows(canvas, x, 54, plan)
    return canvas


def _rows(canvas: Canvas, x: float, y: float, plan: Plan) -> None:
    """The rows of all micro-batches of rank 0, from top to bottom."""
    for micro in plan[0, 0]:
        rows = [[s] for s in micro.segments.sample] if micro.rows > 1 else [micro.segments.sample]
        for row in rows:
            canvas.box(x, y, micro.width * SLOT, 13, "pad")
            at = x
            for sample in row:
                canvas.box(at, y, LENGTHS[sample] * SLOT, 13, shade(LENGTHS[sample]))
                at += LENGTHS[sample] * SLOT
            y += 14
        y += 8


def lock_step() -> Canvas:
    """The same micro-batches when ranks wait at every micro-batch, and once per step."""
    works = ((12, 4, 7), (5, 10, 8))
    canvas = Canvas("Ranks that synchronise at every micro-batch, and once per step", 760, 250)
    waves = [max(works[0][at], works[1][at]) for at in range(3)]
    canvas.text(16, 24, 'sync_every="micro_batch" (FSDP): the sum of the slowest', "h")
    for rank, own in enumerate(works):
        x, y = 80.0, 40 + rank * 26
        canvas.text(20, y + 14, f"rank {rank}")
        for work, wave in zip(own, waves, strict=True):
            canvas.box(x, y, wave * 16, 20, "idle")
            canvas.box(x, y, work * 16, 20, "s3")
            x += wave * 16
    x = 80.0
    for wave in waves:
        x += wave * 16
        canvas.line(x, 34, x, 94, "line dashed")
    canvas.text(x + 8, 66, f"{sum(waves)} units of time", "mark")
    total = max(map(sum, works))
    canvas.text(16, 136, 'sync_every="step" (DDP): the slowest sum', "h")
    for rank, own in enumerate(works):
        x, y = 80.0, 152 + rank * 26
        canvas.text(20, y + 14, f"rank {rank}")
        canvas.box(x, y, total * 16, 20, "idle")
        for work in own:
            canvas.box(x, y, work * 16, 20, "s3")
            x += work * 16
    canvas.line(80 + total * 16, 146, 80 + total * 16, 206, "line dashed")
    canvas.text(88 + total * 16, 178, f"{total} units of time", "good")
    canvas.box(80, 222, 14, 14, "s3")
    canvas.text(100, 234, "work", "note")
    canvas.box(160, 222, 14, 14, "idle")
    canvas.text(180, 234, "waiting", "note")
    return canvas


def denominators() -> Canvas:
    """A mean of means, and one denominator for the step."""
    canvas = Canvas("A mean of means weighs tokens unequally; one denominator does not", 760, 214)
    losses = ((3.0, 3.0), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    canvas.text(16, 24, "Loss of each token", "h")
    for at, own in enumerate(losses):
        y = 40 + at * 46
        canvas.text(20, y + 20, f"micro-batch {at}")
        for place, loss in enumerate(own):
            canvas.box(120 + place * 34, y, 32, 30, "s4" if loss > 2 else "s1")
            kind = "middle bright h" if loss > 2 else "middle h"
            canvas.text(136 + place * 34, y + 20, f"{loss:.0f}", kind)
    means = [sum(own) / len(own) for own in losses]
    canvas.text(360, 60, f"mean {means[0]:.0f}", "note")
    canvas.text(360, 106, f"mean {means[1]:.0f}", "note")
    whole = sum(map(sum, losses)) / sum(map(len, losses))
    first, second = means
    told = f"Mean of the means: ({first:.0f} + {second:.0f}) / 2 = {(first + second) / 2:.1f}."
    canvas.text(16, 164, told, "mark")
    canvas.text(320, 164, "Depends on how the samples were divided.", "note")
    canvas.text(16, 192, f"One denominator: (3 + 3 + 6 · 1) / 8 = {whole:.1f}.", "good")
    canvas.text(320, 192, "The same for every division, on any number of ranks.", "note")
    return canvas


def cursors() -> Canvas:
    """A cursor is an epoch and a position in its order."""
    canvas = Canvas("A cursor is an epoch and a position in its order", 760, 236)
    canvas.text(16, 24, "Epoch 2, in its own order: steps of 6 samples", "h")
    order = np.random.default_rng(5).permutation(36)
    for at, sample in enumerate(order):
        x = 16 + at * 20
        canvas.box(x, 40, 18, 22, "s1" if at < 18 else "s3")
        canvas.text(x + 9, 55, str(sample), "small middle" if at < 18 else "small middle bright")
        if at % 6 == 0:
            canvas.line(x - 1, 34, x - 1, 68)
    x = 16 + 18 * 20 - 1
    canvas.line(x, 30, x, 92, "marked")
    canvas.text(x + 6, 86, "cursor after step 3: epoch 2, position 18", "mark")
    for at, (name, ranks) in enumerate((("saved on 2 ranks", 2), ("resumed on 3 ranks", 3))):
        canvas.text(16 + at * 372, 126, name, "h")
        for rank in range(ranks):
            y = 140 + rank * 28
            canvas.text(16 + at * 372, y + 15, f"rank {rank}")
            own = order[(12, 18)[at] :][:6][rank::ranks]
            for place, sample in enumerate(own):
                canvas.box(74 + at * 372 + place * 24, y, 22, 20, "s1" if at == 0 else "s3")
                kind = "small middle" if at == 0 else "small middle bright"
                canvas.text(85 + at * 372 + place * 24, y + 14, str(sample), kind)
            canvas.text(84 + at * 372 + len(own) * 24, y + 14, f"step {3 + at}", "small note")
    return canvas


def trees() -> Canvas:
    """A step of four answers to each of two prompts on two ranks, with and without sharing."""
    prompt, answers = 14, [6, 3, 4, 8, 2, 5, 7, 3]
    lengths, groups = [prompt + each for each in answers], [0, 0, 0, 0, 1, 1, 1, 1]
    recipe = Recipe(layout=Packed(max_tokens=44), topology=Topology(dp=2))
    prefixes = Prefixes.of_groups(groups, [prompt] * len(lengths))
    canvas, y = Canvas("One step without and with shared prompts", 480, 282), 24
    for plan, name in (
        (make_plan(lengths, recipe), "Every answer with its prompt"),
        (make_plan(lengths, recipe, prefixes=prefixes), "Every prompt once per micro-batch"),
    ):
        slots = sum(micro.width for rank in range(2) for micro in plan[0, rank])
        canvas.text(16, y, f"{name}: {slots} slots", "h")
        y += 12
        for rank in range(2):
            canvas.text(20, y + 15, f"rank {rank}")
            for micro in plan[0, rank]:
                _tree_row(canvas, y, micro, prompt)
                y += 24
            y += 6
        y += 30
    canvas.box(80, 258, 14, 14, "s4")
    canvas.text(100, 270, "prompt", "note")
    canvas.box(170, 258, 14, 14, "s1")
    canvas.text(190, 270, "answer, with its number", "note")
    return canvas


def _tree_row(canvas: Canvas, y: float, micro: MicroBatch, prompt: int) -> None:
    x, parts = 80.0, micro.segments
    for sample, start, length in zip(parts.sample, parts.start, parts.length, strict=True):
        shared = max(min(int(start + length), prompt) - int(start), 0)
        if shared:
            canvas.box(x, y, shared * SLOT, 20, "s4")
        if length > shared:
            width = (int(length) - shared) * SLOT
            canvas.box(x + shared * SLOT, y, width, 20, "s1")
            canvas.text(x + shared * SLOT + width / 2, y + 14, str(sample), "small middle")
        x += int(length) * SLOT


def sharing() -> Canvas:
    """A step with one long sequence on three ranks, with and without sharing."""
    lengths, cost = [30, 9, 7, 6, 4, 3], Cost(per_token=24, per_pair=1, per_moved=0, per_exchange=0)
    recipe = Recipe(layout=Packed(max_tokens=36), topology=Topology(dp=3), cost=cost)
    canvas, y = Canvas("One step without and with a shared sequence", 480, 240), 24
    for plan, name in (
        (make_plan(lengths, recipe), "Whole sequences"),
        (make_plan(lengths, replace(recipe, sharing=Sharing())), "Ranks share the longest"),
    ):
        work = plan.costs
        canvas.text(16, y, f"{name}: slowest rank {work.max() / work.mean():.2f}× the mean", "h")
        y += 12
        for rank in range(3):
            canvas.text(20, y + 15, f"rank {rank}")
            x, parts = 80.0, plan[0, rank][0].segments
            for sample, start, length in zip(parts.sample, parts.start, parts.length, strict=True):
                canvas.box(x, y, int(length) * SLOT, 20, "s4" if sample == 0 else "s1")
                label, bright = str(sample), " bright" if sample == 0 else ""
                if sample == 0 and length > 4:
                    label = f"tokens {start}–{start + length - 1}"
                canvas.text(x + int(length) * SLOT / 2, y + 14, label, f"small middle{bright}")
                x += int(length) * SLOT
            y += 24
        y += 34
    return canvas


PICTURES = {
    "trees": trees,
    "sharing": sharing,
    "lengths-to-plan": lengths_to_plan,
    "layouts": layouts,
    "lock-step": lock_step,
    "denominators": denominators,
    "cursors": cursors,
}
