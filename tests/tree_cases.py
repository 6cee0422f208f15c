"""Random forests of samples that share prefixes, recipes for them, and a naive checker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenstep import (
    Cost,
    Limits,
    Packed,
    Plan,
    Prefixes,
    Recipe,
    Steps,
    Topology,
    find_prefixes,
    make_plan,
)


def random_samples(rng: np.random.Generator, most: int = 40) -> list[list[int]]:
    """Token ids of samples that branch at random: prefixes of prefixes, duplicates, loners."""
    samples: list[list[int]] = []
    letters = int(rng.integers(2, 5))
    for _ in range(int(rng.integers(1, most))):
        tokens: list[int] = []
        if samples and rng.random() < 0.8:
            other = samples[int(rng.integers(len(samples)))]
            tokens = other[: int(rng.integers(0, len(other) + 1))]
        if not tokens or rng.random() < 0.85:
            tokens = tokens + rng.integers(0, letters, int(rng.integers(1, 12))).tolist()
        samples.append(tokens)
    return samples


@dataclass(frozen=True, slots=True)
class TreeCase:
    """The arguments of one call of `make_plan` with prefixes."""

    samples: list[list[int]]
    recipe: Recipe
    groups: Any
    columns: dict[str, Any]
    prefixes: Prefixes

    def plan(self) -> Plan:
        """Plan it."""
        lengths = [len(tokens) for tokens in self.samples]
        return make_plan(
            lengths,
            self.recipe,
            groups=self.groups,
            columns=self.columns,
            prefixes=self.prefixes,
        )


def random_case(seed: int, most: int = 40) -> TreeCase:
    """A forest with a recipe: ways to synchronise, limits, groups, steps, alignment, pipelines."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    samples = random_samples(rng, most)
    longest = max(map(len, samples))
    columns = {"patches": rng.integers(0, 5, len(samples))} if rng.random() < 0.2 else {}
    alignment = pick(1, 1, 1, 2, 4)
    budget = int(pick(longest, longest + 3, 2 * longest, 5 * longest)) + 2 * alignment
    overflow: Any = "error"
    if rng.random() < 0.15:
        budget = max(longest * 2 // 3, 4 * alignment)
        overflow = pick("truncate", "drop", "alone")
    pipeline = pick(None, None, None, 2)
    groups = rng.integers(0, len(samples), len(samples)) // 2 if rng.random() < 0.25 else None
    recipe = Recipe(
        layout=Packed(max_tokens=budget, samples=pick(None, None, None, 6)),
        topology=Topology(
            dp=pick(1, 2, 3, 4),
            tp=alignment,
            sequence_parallel=alignment > 1,
            pp=pipeline or 1,
            variable_seq_lengths=pipeline is not None,
        ),
        steps=pick(
            Steps(), Steps(), Steps(samples=8), Steps(tokens=8 * longest), Steps(micro_batches=2)
        ),
        cost=pick(
            Cost(),
            Cost(per_token=1, per_pair=0.1),
            Cost(per_token=1, per_segment=5),
            Cost(per_token=1, per_pair=0.01, per_micro_batch=3),
        ),
        sync_every=pick("micro_batch", "step"),
        limits=Limits(
            gathered=pick(None, None, None, 3 * longest + 8 * alignment),
            columns={"patches": 12} if columns else {},
        ),
        overflow=overflow,
        groups=pick("micro_batch", "step") if groups is not None else "micro_batch",
    )
    if rng.random() < 0.1 and overflow == "error":
        whole = recipe.cost.of_lengths(np.array([longest + 2 * alignment]))[0]
        limit = 1.3 * float(whole) + recipe.cost.per_micro_batch
        recipe = replace(recipe, limits=replace(recipe.limits, cost=limit))
    if rng.random() < 0.1 and overflow == "error":
        rounded = replace(recipe.layout, round_to=3)
        recipe = replace(recipe, layout=replace(rounded, max_tokens=budget // 3 * 3 + 12))
    return TreeCase(samples, recipe, groups, columns, find_prefixes(samples))


def faults_of(case: TreeCase, plan: Plan) -> list[str]:
    """What is wrong with the plan, from token ids alone, without the project's own checks."""
    faults, runs = [], dict.fromkeys(range(len(case.samples)), 0)
    recipe, alignment = case.recipe, case.recipe.topology.alignment
    budget = recipe.layout.max_tokens or 0
    where: dict[int, set[tuple[int, int, int]]] = {}
    for step in range(plan.num_steps):
        counts = {len(plan[step, rank]) for rank in range(plan.num_ranks)}
        if len(counts) > 1 or next(iter(counts)) % recipe.topology.multiple:
            faults.append(f"step {step} has unequal counts {counts}")
        for rank in range(plan.num_ranks):
            for number, micro in enumerate(plan[step, rank]):
                segments = micro.segments
                parent = segments.parent
                used, gathered, labels = 0, 0, dict[tuple[int, int], set[int]]()
                for i in range(len(segments)):
                    # The path of the segment, as (segment, first token, end).
                    path, at = [i], i
                    while parent is not None and parent[at] >= 0:
                        if parent[at] >= at:
                            faults.append("a parent does not stand before its child")
                            break
                        at = int(parent[at])
                        path.append(at)
                    path.reverse()
                    sample = int(segments.sample[i])
                    tokens = case.samples[sample]
                    end = int(segments.start[i] + segments.length[i])
                    used += -(-int(segments.length[i]) // alignment) * alignment
                    if len(path) > 1:
                        length = -(-int(segments.length[i]) // alignment) * alignment
                        gathered += int(segments.start[i]) + length
                    seen: list[int] = []
                    for node in path:
                        first = int(segments.start[node])
                        if first != len(seen) and len(path) > 1:
                            faults.append(f"segment {node} starts at {first}, not at {len(seen)}")
                        other = case.samples[int(segments.sample[node])]
                        seen += other[first : first + int(segments.length[node])]
                    if len(path) > 1 and seen != tokens[:end]:
                        faults.append(f"the path of sample {sample} holds other tokens")
                    shared = parent is not None and i in parent.tolist()
                    if shared and end >= len(tokens):
                        faults.append(f"sample {sample} has no token of its own")
                    if not shared:
                        runs[sample] += end - (0 if len(path) > 1 else int(segments.start[i]))
                        where.setdefault(sample, set()).add((step, rank, number))
                        for node in path:
                            stop = int(segments.start[node] + segments.length[node])
                            if stop < len(tokens):
                                labels.setdefault((node, stop - 1), set()).add(tokens[stop])
                if any(len(next_tokens) > 1 for next_tokens in labels.values()):
                    faults.append("a slot has two labels")
                single = len(segments) == 1 and recipe.overflow == "alone"
                if used > budget and not single:
                    faults.append(f"{used} slots of {budget}")
                owners = {int(segments.sample[i]) for i in range(len(segments))}
                if recipe.layout.samples and len(owners) > recipe.layout.samples:
                    faults.append(f"{len(owners)} samples")
                if recipe.limits.cost is not None and not single:
                    cost, spent = recipe.cost, float(recipe.cost.per_micro_batch)
                    for i in range(len(segments)):
                        n = -(-int(segments.length[i]) // alignment) * alignment
                        p = int(segments.start[i]) if parent is not None and parent[i] >= 0 else 0
                        spent += cost.per_token * n + cost.per_pair * ((p + n) ** 2 - p**2)
                        spent += cost.per_segment
                    if spent > recipe.limits.cost * (1 + 1e-9):
                        faults.append(f"a cost of {spent}")
                if gathered > (recipe.limits.gathered or 8 * budget):
                    faults.append(f"{gathered} gathered keys")
                held = {int(s) for s in segments.sample}
                if case.columns and not single:
                    total = sum(int(case.columns["patches"][s]) for s in held)
                    if total > recipe.limits.columns["patches"]:
                        faults.append(f"{total} patches")
    for sample, tokens in enumerate(case.samples):
        wanted = len(tokens)
        if recipe.overflow == "drop" and wanted > budget // alignment * alignment:
            wanted = 0
        if recipe.overflow == "truncate":
            wanted = min(wanted, budget // alignment * alignment)
        if runs[sample] != wanted:
            faults.append(f"sample {sample} runs {runs[sample]} of {wanted} tokens")
    if case.groups is not None and recipe.groups == "micro_batch":
        for group in set(case.groups.tolist()):
            members = np.flatnonzero(case.groups == group).tolist()
            if len(set().union(*(where.get(sample, set()) for sample in members))) > 1:
                faults.append(f"group {group} is on several micro-batches")
    return faults
