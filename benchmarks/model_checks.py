"""Checks on a GPU: attention kernels and the gradient of a step, compared with float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gradients import PER_PARAMETER, gradient_of, worst_parameter
from benchmarks.models import (
    HALF,
    SMALL,
    TINY,
    Setup,
    build,
    draw_lengths,
    first_line,
    loss_of,
    make_batches,
    states,
)
from benchmarks.tables import Section, Table, Target
from evenstep import Packed, Padded, Recipe
from evenstep.tensors.batch import Boundaries
from evenstep.tensors.segment_attention import BACKENDS, Call, choose
from evenstep.train.runner import Runner

# Kernels --------------------------------------------------------------------------------------

LENGTHS = [1, 200, 3, 129, 64, 333, 1, 517]
"""Segments of the kernel checks, some hundred tokens each."""

KERNELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "equal heads": {"kv_heads": 8},
    "7 query heads per key head": {"heads": 14},
    "a window": {"window": 100},
    "a window of 1": {"window": 1},
    "sinks": {"sunk": True},
    "sinks and a window": {"sunk": True, "window": 100},
    "bidirectional": {"causal": False},
    "bidirectional, a window": {"causal": False, "window": 100},
    "values of 64, keys of 96": {"dim": 96, "values": 64},
    "heads of 44": {"dim": 44, "values": 44},
    "heads of 128": {"dim": 128, "values": 128},
    "a soft cap and a window": {"softcap": 5.0, "window": 100},
    "a soft cap and sinks": {"softcap": 5.0, "sunk": True},
}
SINGLE = ("sinks and a window", "a soft cap and a window", "a soft cap and sinks", "a window")
"""Cases that run in float32 too. FlexAttention compiles each for 10 seconds or more."""


def kernel_case(
    device: str, dtype: torch.dtype, backend: str | None, *, heads: int = 8, kv_heads: int = 2,
    dim: int = 64, values: int = 64, sunk: bool = False, **options: Any,
) -> tuple[str, list[Tensor]]:  # fmt: skip
    """The backend that ran, its outputs and the gradients of q, k, v and sinks, in float32."""
    random = torch.Generator().manual_seed(1)
    ends = np.cumsum([0, *LENGTHS])
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, values), (heads, values))
    q, k, v, grad = (
        torch.randn(1, n, int(ends[-1]), d, generator=random).to(HALF).to(device, dtype)
        for n, d in sizes
    )
    sinks = torch.randn(heads, generator=random).to(device) if sunk else None
    leaves = [x.requires_grad_() for x in (q, k, v, *([sinks] if sinks is not None else []))]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    bounds = Boundaries(1, int(ends[-1]), cu_seqlens, max(LENGTHS))
    call = Call(q, k, v, bounds, sinks=sinks, **options)
    name = choose(call) if backend is None else backend
    out = BACKENDS[name](call)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    return name, [x.detach().float() for x in found]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error relative to the largest value of each, at least a tenth of all."""
    sizes = [float(x.abs().max()) for x in expected]
    off = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    return max(e / max(s, 0.1 * max(sizes)) for e, s in zip(off, sizes, strict=True))


def kernels(setup: Setup, save: Callable[[Section], None]) -> Section:
    """Outputs and gradients of the chosen backend, compared with one segment at a time."""
    section = Section("Outputs and gradients of the attention kernels")
    section.notes.append(
        f"Segments of {LENGTHS} tokens. Largest error relative to the largest value, of outputs "
        "and of gradients, sinks included, compared with one segment at a time in float32; the "
        "inputs are exact in bfloat16."
    )
    table = Table("Errors", {"case": "", "precision": "", "backend": "", "error": ".1e"})
    section.tables.append(table)
    worst = {torch.float32: 0.0, HALF: 0.0}
    cases = [(case, HALF) for case in KERNELS] + [(case, torch.float32) for case in SINGLE]
    for case, dtype in cases:
        options, kind = KERNELS[case], str(dtype).removeprefix("torch.")
        if setup.late("kernels"):
            section.notes.append(f"{case}, {kind}: skipped for want of time.")
            continue
        try:
            _, expected = kernel_case(setup.device, torch.float32, "segments", **options)
            name, found = kernel_case(setup.device, dtype, None, **options)
        except Exception as error:
            section.notes.append(f"{case}, {kind} failed: {first_line(error)}")
            worst[dtype] = np.inf
            continue
        off = largest_error(found, expected)
        table.add(case, kind, name, off)
        worst[dtype] = max(worst[dtype], off)
        save(section)
    for dtype, limit in ((torch.float32, 2e-5), (HALF, 2e-2)):
        kind = str(dtype).removeprefix("torch.")
        section.targets.append(
            Target(
                f"{kind}: all cases run, errors at most {limit:.0e}",
                f"largest {worst[dtype]:.1e}",
                worst[dtype] <= limit,
            )
        )
    setup.free()
    return section


# Gradients ------------------------------------------------------------------------------------


def gradients(setup: Setup, save: Callable[[Section], None]) -> Section:
    """The gradient of a step of a small model, packed and padded, compared with float32."""
    shape = TINY if setup.quick else SMALL
    lengths = draw_lengths(24, 30 if setup.quick else 300, 100 if setup.quick else 1000)
    budget = sum(lengths)  # one micro-batch: FlexAttention compiles for each width
    section = Section("The gradient of a step")
    section.notes.append(
        f"A Llama of {shape['num_hidden_layers']} layers, hidden size {shape['hidden_size']}; "
        f"{len(lengths)} samples of at most {max(lengths)} tokens. Difference to float32 on "
        f"sdpa, one sample at a time. {PER_PARAMETER}"
    )
    table = Table("Errors", {"layout": "", "attention": "", "precision": "", "error": ".1e"})
    section.tables.append(table)
    model = build(shape, setup.device, HALF)

    def gradient(recipe: Recipe, implementation: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model.to(dtype)
        model.set_attn_implementation(implementation)
        model.zero_grad()
        batches = make_batches(lengths, recipe, shape["vocab_size"])
        runner = Runner(model=model, loss=loss_of(model), forward=states, device=setup.device)
        runner.run(batches)
        return gradient_of(model)

    alone = Recipe(layout=Packed(samples=1))
    packed, padded = Recipe(layout=Packed(max_tokens=budget)), Recipe(layout=Padded(samples=4))
    expected = gradient(alone, "sdpa", torch.float32)
    errors = {}
    for layout, recipe, name, dtype in (
        ("packed", packed, "evenstep", torch.float32),
        ("padded", padded, "sdpa", HALF),
        ("padded", padded, "evenstep", HALF),
        ("packed", packed, "evenstep", HALF),
    ):
        off = worst_parameter(gradient(recipe, name, dtype), expected)
        kind = str(dtype).removeprefix("torch.")
        errors[layout, name, kind] = off
        table.add(layout, name, kind, off)
    exact = errors["packed", "evenstep", "float32"]
    half, base = errors["packed", "evenstep", "bfloat16"], errors["padded", "sdpa", "bfloat16"]
    section.targets += [
        Target("float32: packed on evenstep within 1e-5", f"{exact:.1e}", exact <= 1e-5),
        Target(
            "bfloat16: packed on evenstep at most 1.5× padded on sdpa",
            f"{half:.1e} compared with {base:.1e}",
            half <= 1.5 * base,
        ),
    ]
    setup.free()
    return section
