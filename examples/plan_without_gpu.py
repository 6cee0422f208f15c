"""Plan a training run without a GPU, without torch and without the data: from lengths alone.

    python examples/plan_without_gpu.py        5 seconds on two cores, the first time 30

For those who run clusters: how much of the time of 64 H200s is padding and waiting, what a plan
saves, and what budget and step size change. Lengths are drawn at random here; `evenstep lengths`
counts those of your files. Writes steps.svg, and steps.plan, which ranks can run.
The same on the command line, with memory and more choices: `evenstep compare`, `simulate`, `tune`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from evenstep import Cost, Packed, Padded, Plan, Recipe, Steps, Topology, make_plan, violations
from evenstep.report import Simulation, advice, comparison_picture, named_cluster, simulate

MODEL, GPU, RANKS = "llama-3-8b", "h200", Topology(dp=64)
JOB = Recipe(
    layout=Packed(max_tokens=16_384),
    topology=RANKS,
    steps=Steps(samples=1024),
    cost=Cost.named(MODEL),  # long samples cost more per token
)
STRATEGIES = {
    "padded batches of 8": replace(JOB, layout=Padded(samples=8), balance="none"),
    "dynamic batches": replace(JOB, layout=Padded(max_tokens=16_384)),
    "packed, in order": replace(JOB, balance="none"),
    "packed, even": JOB,
}
CHANGES = {
    "budget 24,576": replace(JOB, layout=Packed(max_tokens=24_576)),
    "512 samples a step": replace(JOB, steps=Steps(samples=512)),
    "2,048 samples a step": replace(JOB, steps=Steps(samples=2048)),
}


def made_lengths(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Chats: most are short, a few fill the context."""
    drawn = np.random.default_rng(0).lognormal(6.4, 1.1, count)
    return np.clip(drawn, 16, 16_384).astype(np.int64)


def main() -> None:
    lengths = made_lengths(8 * 1024)
    cluster = named_cluster(MODEL, GPU, RANKS)
    print(f"{len(lengths):,} samples of {lengths.min()} to {lengths.max():,} tokens, {MODEL} on")
    print(f"64 x {GPU}, which wait for each other at every micro-batch")

    plans: dict[str, Plan] = {}
    print(f"\n{'':20}  padding  waiting  seconds per step   tokens/s")
    for name, recipe in STRATEGIES.items():
        plans[name] = plan = make_plan(lengths, recipe)
        row(name, plan, simulate(plan, cluster))

    print("changes of the last")
    for name, recipe in CHANGES.items():
        plan = make_plan(lengths, recipe)
        row(name, plan, simulate(plan, cluster))

    chosen = plans["packed, even"]
    for found in advice(chosen, make_plan)[:2]:
        print(f"\n{found.text}")
    chosen.save("steps.plan")
    Path("steps.svg").write_text(comparison_picture(plans, "8 steps on 64 ranks"))
    again = Plan.load("steps.plan")
    print(f"\nwrote steps.plan ({again}, {len(violations(again))} violations) and steps.svg")


def row(name: str, plan: Plan, found: Simulation) -> None:
    print(
        f"{name:20}  {plan.stats()['padding_ratio']:7.1%}  {found.share('waiting'):7.1%}  "
        f"{found.time.mean():16.2f}  {found.tokens_per_second:9,.0f}"
    )


if __name__ == "__main__":
    main()
