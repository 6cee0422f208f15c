"""Collating a micro-batch, compared with copying the same tensors by `torch.cat`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.bench import Bench
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import interleave
from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.tensors import Collator, Extra

SAMPLES, TOKENS, RATIO = 100, 32_768, 2.0
EXTRAS = {"advantages": Extra(aligned="token"), "old_logprobs": Extra(aligned="token")}


def collating(bench: Bench) -> Section:
    """Measure the collator and `torch.cat` on all tensors of a batch."""
    section = Section(
        "Collating",
        notes=[
            f"One micro-batch of {SAMPLES} samples with {TOKENS:,} tokens in total, one thread. "
            "torch.cat copies as many columns as the batch has per slot (tokens, labels, "
            "positions, segments, weights, extras), each from separate tensors, without checks.",
        ],
    )
    table = Table(
        "One micro-batch",
        {
            "layout": "",
            "columns": "d",
            "collate, µs": ".0f",
            "torch.cat, µs": ".0f",
            "ratio": ".2f",
            "target": "",
        },
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, TOKENS), SAMPLES - 1, replace=False))
    lengths = np.diff(np.concatenate(([0], cuts, [TOKENS])))
    worst = 0.0
    for name, recipe, given in _kinds():
        bench.say(f"collate: {name}")
        samples = [_sample(int(n), given) for n in lengths]
        micro = make_plan(lengths, recipe)[0, 0][0]
        collator = Collator(extras={key: EXTRAS[key] for key in EXTRAS if key in given})
        columns = 5 + ("labels" in given) + len(collator.extras)
        copies = [_copy(samples, at < columns - 1 - len(collator.extras)) for at in range(columns)]
        timed = interleave(
            {
                "collate": partial(collator, micro, samples),
                "cat": partial(_cat, copies),
            },
            repeats=bench.pick(200, 10),
            burst=5,
        )
        ours, floor = timed["collate"].seconds, timed["cat"].seconds
        if isinstance(recipe.layout, Packed) and recipe.topology.alignment == 1:
            worst = max(worst, ours / floor)
        table.add(
            name, columns, ours * 1e6, floor * 1e6, ours / floor, verdict(ours / floor < RATIO)
        )
    torch.set_num_threads(threads)
    section.tables.append(table)
    section.targets.append(
        Target(
            f"packed, 32k tokens, 100 samples: under {RATIO:g}× torch.cat",
            f"{worst:.2f}×",
            worst < RATIO,
        )
    )
    return section


def _kinds() -> list[tuple[str, Recipe, tuple[str, ...]]]:
    packed = Recipe(layout=Packed(max_tokens=TOKENS))
    aligned = Recipe(layout=Packed(max_tokens=2 * TOKENS), topology=Topology(cp=2))
    return [
        ("packed", packed, ()),
        ("packed, labels given", packed, ("labels",)),
        ("packed, labels and extras", packed, ("labels", *EXTRAS)),
        ("packed, aligned to 4", aligned, ()),
    ]


def _copy(samples: list[dict[str, Any]], integer: bool) -> list[torch.Tensor]:
    """A separate copy of the tokens, as integers or floats."""
    dtype = torch.int64 if integer else torch.float32
    return [sample["input_ids"].to(dtype, copy=True) for sample in samples]


def _cat(columns: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(column) for column in columns]


def _sample(length: int, given: tuple[str, ...]) -> dict[str, Any]:
    tokens = torch.randint(0, 32_000, (length,))
    sample: dict[str, Any] = {"input_ids": tokens}
    for key in given:
        sample[key] = tokens.clone() if key == "labels" else torch.randn(length)
    return sample
