"""Measure the accuracy in half precision and the speed of every attention backend on a GPU.

    python benchmarks/gpu_attention.py                        writes benchmarks/results
    python benchmarks/gpu_attention.py --device cpu --quick   a small version, writes nothing

Every section runs the same samples packed, padded and one at a time. The reference is single
precision, one sample at a time, on inputs that are exact in half precision.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks import tables
from benchmarks.gradients import PER_PARAMETER, worst_parameter
from benchmarks.models import first_line
from benchmarks.tables import Section, Table, Target
from evenstep import Packed, Padded, Recipe, Topology, make_plan
from evenstep.core.layout import Layout
from evenstep.demo.decoder import Decoder, DecoderShape
from evenstep.tensors import cross_entropy, segment_attention
from evenstep.tensors.batch import Batch, Boundaries
from evenstep.tensors.collate import Collator
from evenstep.tensors.segment_attention import Call, attention, block_mask, choose
from evenstep.train import compile_layers

ROOT = Path(__file__).resolve().parents[1]
HALF = torch.bfloat16
LIMIT = 2e-2
"""Largest error of outputs and gradients, relative to the largest value (bfloat16 has 8 bits)."""
FACTOR = 2.0
"""Largest error relative to that of SDPA in half precision, one sample at a time."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The device, and whether to run the small version."""

    device: str
    quick: bool

    @property
    def backends(self) -> list[str]:
        """Backends for packed batches with gradients on this device."""
        return ["varlen", "flex"] if self.device == "cuda" else ["segments", "mask"]

    def free(self) -> None:
        """Clear compiled kernels and cached memory."""
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def make_batch(lengths: list[int], recipe: Recipe, device: str) -> Iterator[Batch]:
    """The micro-batches of one step on one rank."""
    random = torch.Generator().manual_seed(0)
    samples = [{"input_ids": torch.randint(0, 1000, (n,), generator=random)} for n in lengths]
    for micro in make_plan(lengths, recipe)[0, 0]:
        yield Collator()(micro, samples).to(device)


def slots_of(batch: Batch, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """For every real token of the batch: its slot, and its index in all samples concatenated."""
    begins = np.cumsum([0, *lengths])
    slots, tokens = [], []
    for tile, sample in enumerate(batch.sample_ids.tolist()):
        if sample >= 0:
            begin, size = int(batch.cu_seqlens[tile]), int(batch.seqlens[tile])
            slots.append(torch.arange(begin, begin + size))
            tokens.append(torch.arange(int(begins[sample]), int(begins[sample]) + size))
    return torch.cat(slots).to(batch.device), torch.cat(tokens).to(batch.device)


# Kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """Lengths of samples and the shape of the heads."""

    name: str
    lengths: list[int]
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    window: int | None = None
    topology: Topology = field(default_factory=Topology)
    static: bool = False

    def inputs(self, device: str) -> list[Tensor]:
        """q, k, v and the gradient of the output: (tokens, heads, dim), exact in half precision."""
        random = torch.Generator().manual_seed(1)
        total = sum(self.lengths)
        return [
            torch.randn(total, heads, self.dim, generator=random).to(HALF).float().to(device)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]


def kernel_cases(setup: Setup) -> list[Case]:
    lengths = [1, 700, 1, 129, 2048, 64, 333, 1, 5, 512]
    if setup.quick:
        lengths = [1, 70, 1, 19, 64, 5]
    return [
        Case("equal lengths", [lengths[1]] * 4),
        Case("unequal lengths, some of 1", lengths, static=True),
        Case("equal numbers of query and key heads", lengths, kv_heads=8),
        Case("7 query heads per key head", lengths, heads=14),
        Case("heads of 128", lengths, dim=128),
        Case("a window", lengths, window=10 if setup.quick else 100, static=True),
        Case("a window of 1", lengths, window=1),
        Case("aligned to 8", lengths, topology=Topology(cp=4), static=True),
        Case("single tokens", [1] * (20 if setup.quick else 200)),
    ]


def run_case(
    case: Case, recipe: Recipe, dtype: torch.dtype, backend: str, device: str
) -> list[Tensor]:
    """Outputs and gradients of q, k and v, for all tokens in sample order."""
    given = case.inputs(device)
    found = [torch.zeros_like(x) for x in (given[3], *given[:3])]
    for batch in make_batch(case.lengths, recipe, device):
        slots, tokens = slots_of(batch, case.lengths)
        laid = []
        for values in given:
            flat = values.new_zeros(batch.rows * batch.width, *values.shape[1:])
            flat[slots] = values[tokens]
            # (slots, heads, dim) -> (rows, heads, width, dim)
            grid = flat.unflatten(0, (batch.rows, batch.width)).transpose(1, 2)
            laid.append(grid.to(dtype).contiguous())
        q, k, v = (x.requires_grad_() for x in laid[:3])
        out = attention(q, k, v, batch, window=case.window, backend=backend)
        gradients = torch.autograd.grad(out, (q, k, v), laid[3])
        for into, values in zip(found, (out, *gradients), strict=True):
            into[tokens] = values.detach().transpose(1, 2).flatten(0, 1)[slots].float()
    return found


def errors(found: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
    """The largest error of outputs and of gradients, relative to the largest value of each.

    A gradient that is zero up to rounding (q and k of single tokens) is compared with a tenth of
    the largest one.
    """
    largest = [float(values.abs().max()) for values in expected]
    off = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    least = 0.1 * max(largest[1:])
    return off[0] / largest[0], max(
        error / max(size, least) for error, size in zip(off[1:], largest[1:], strict=True)
    )


def kernels(setup: Setup) -> Section:
    """Outputs and gradients of each backend compared with single precision."""
    section = Section("Outputs and gradients in bfloat16, compared with single precision")
    section.notes.append(
        "Largest error relative to the largest value, over real tokens. The reference is scaled "
        "dot product attention in single precision, one sample at a time; the baseline is the same "
        "in bfloat16."
    )
    table = Table("Errors", {"case": "", "run": "", "outputs": ".1e", "gradients": ".1e"})
    worst: dict[str, float] = {}
    factor: dict[str, float] = {}
    failed: set[str] = set()
    alone = Recipe(layout=Packed(samples=1))
    for case in kernel_cases(setup):
        expected = run_case(case, alone, torch.float32, "segments", setup.device)
        total = 8 * sum(-(-n // 8) for n in case.lengths)
        packed = Recipe(layout=Packed(max_tokens=total + 64), topology=case.topology)
        widest = max(case.lengths)
        padded = Recipe(layout=Padded(max_tokens=widest * len(case.lengths)))
        static = Recipe(
            layout=Packed(rows=2, pad_to=8 * (total // 16 + widest)), topology=case.topology
        )
        plain = "causal" if case.window is None else "segments"
        baseline = errors(run_case(case, alone, HALF, "segments", setup.device), expected)
        table.add(case.name, "one at a time", *baseline)
        runs = [(f"padded, {plain}", padded, plain)]
        for name in setup.backends:
            runs.append((f"packed, {name}", packed, name))
            if case.static:
                runs.append((f"packed static, {name}", static, name))
        for name, recipe, backend in runs:
            try:
                found = errors(run_case(case, recipe, HALF, backend, setup.device), expected)
            except Exception as error:  # continue with the other runs
                section.notes.append(f"{case.name}, {name} failed: {error}".splitlines()[0])
                failed.add(backend)
                continue
            table.add(case.name, name, *found)
            worst[backend] = max(worst.get(backend, 0.0), *found)
            ratio = max(a / max(b, 1e-3) for a, b in zip(found, baseline, strict=True))
            factor[backend] = max(factor.get(backend, 0.0), ratio)
    setup.free()
    section.tables.append(table)
    for name in setup.backends:
        goal = f"{name}: all cases run, errors at most {LIMIT:.0e} and {FACTOR:.0f}× the baseline"
        most, times = worst.get(name, np.inf), factor.get(name, np.inf)
        met = name not in failed and most <= LIMIT and times <= FACTOR
        section.targets.append(Target(goal, f"largest {most:.1e}, {times:.2f}× the baseline", met))
    return section


# Decoder --------------------------------------------------------------------------------------


def learn(
    model: Decoder, batches: Iterator[Batch], backend: str, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """The loss per label over all micro-batches, and its gradient by parameter."""
    work = list(batches)
    labels = sum(int((batch.labels != -100).sum()) for batch in work)
    named = Decoder(model.shape, backend).to(work[0].device, dtype)
    named.load_state_dict(model.state_dict())
    names, parameters = zip(*named.named_parameters(), strict=True)
    loss, gradient = (
        0.0,
        {n: torch.zeros_like(p, dtype=torch.float32) for n, p in named.named_parameters()},
    )
    for batch in work:
        logits = named(batch).float().flatten(0, 1)
        share = (
            nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / labels
        )
        # Summed in single precision, so the number of micro-batches adds no error.
        for name, part in zip(names, torch.autograd.grad(share, parameters), strict=True):
            gradient[name] += part
        loss += float(share.detach())
    return loss, gradient


def decoder(setup: Setup) -> Section:
    """Loss and gradient of a small model, packed compared with one sample at a time."""
    random = np.random.default_rng(0)
    count, mean = (12, 3.0) if setup.quick else (48, 6.0)
    lengths = [1, 1, *random.lognormal(mean, 1.0, count).astype(int).clip(1, 4096).tolist()]
    if setup.quick:
        shape = DecoderShape(vocab=1000, hidden=64, heads=4, kv_heads=2, ffn=96)
    else:
        shape = DecoderShape(vocab=1000, hidden=1024, layers=6, heads=16, kv_heads=4, ffn=2816)
    torch.manual_seed(0)
    # Weights are exact in bfloat16, so only the arithmetic differs.
    model = Decoder(shape).to(HALF).float()
    section = Section(f"A decoder of {shape.layers} layers with hidden size {shape.hidden}")
    section.notes.append(
        f"{len(lengths)} samples, {sum(lengths):,} tokens, lengths 1 to {max(lengths)}. "
        "Loss and gradient relative to single precision, one sample at a time. In single precision "
        f"all layouts must agree to 1e-5. {PER_PARAMETER}"
    )
    table = Table("Differences", {"run": "", "precision": "", "loss": ".1e", "gradient": ".1e"})
    budget = max(2 * max(lengths), 1024 if setup.quick else 16384)
    layouts: dict[str, Layout] = {
        "one at a time": Packed(samples=1),
        "packed": Packed(max_tokens=budget),
        "packed static": Packed(rows=2, pad_to=budget // 2),
        "dynamic": Padded(max_tokens=budget),
    }

    def difference(layout: str, backend: str, dtype: torch.dtype) -> tuple[float, float]:
        batches = make_batch(lengths, Recipe(layout=layouts[layout]), setup.device)
        loss, gradient = learn(model, batches, backend, dtype)
        return abs(loss / expected[0] - 1), worst_parameter(gradient, expected[1])

    recipe = Recipe(layout=layouts["one at a time"])
    expected = learn(model, make_batch(lengths, recipe, setup.device), "segments", torch.float32)
    single = 0.0
    for layout in ("packed", "packed static", "dynamic"):
        found = difference(layout, "segments", torch.float32)
        table.add(f"{layout}, segments", "float32", *found)
        single = max(single, *found)
    section.targets.append(
        Target("float32: layouts agree to 1e-5", f"largest {single:.1e}", single <= 1e-5)
    )
    baseline = difference("one at a time", "segments", HALF)
    table.add("one at a time, segments", "bfloat16", *baseline)
    table.add("dynamic, causal", "bfloat16", *difference("dynamic", "causal", HALF))
    for name in setup.backends:
        for layout in ("packed", "packed static"):
            found = difference(layout, name, HALF)
            table.add(f"{layout}, {name}", "bfloat16", *found)
            section.targets.append(
                Target(
                    f"{layout}, {name}: gradient error at most {FACTOR:.0f}× one at a time",
                    f"{found[1]:.1e} compared with {baseline[1]:.1e}",
                    found[1] <= FACTOR * baseline[1],
                )
            )
        setup.free()
    section.tables.append(table)
    return section


# Time -----------------------------------------------------------------------------------------


def best(call: Callable[[], Any], device: str, runs: int) -> float:
    """Milliseconds of the best run after two warm-up runs."""
    times = []
    for number in range(runs + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def speed(setup: Setup) -> Section:
    """Forward and backward of the attention of one layer on the same samples in each layout."""
    budget = 512 if setup.quick else 32768
    heads, kv_heads, dim = (4, 2, 16) if setup.quick else (32, 8, 128)
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < budget:
        mean = 4.0 if setup.quick else 6.5
        lengths.append(min(round(random.lognormal(mean, 1.0)) + 1, budget // 4))
    lengths[-1] -= sum(lengths) - budget
    section = Section("Time of one layer's attention, forward and backward")
    section.notes.append(
        f"{len(lengths)} samples of log-normal lengths, {budget:,} tokens, maximum "
        f"length {max(lengths):,}; {heads} heads of {dim}, {kv_heads} key heads, bfloat16, causal. "
        "Best of several runs without compilation; × is relative to the first row."
    )

    def timed(recipe: Recipe, backend: str) -> tuple[float, int]:
        batches = list(make_batch(lengths, recipe, setup.device))
        calls = []
        for batch in batches:
            q, k, v, gradient = (
                torch.randn(batch.rows, n, batch.width, dim, device=setup.device, dtype=HALF)
                for n in (heads, kv_heads, kv_heads, heads)
            )
            leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
            calls.append((batch, leaves, gradient))

        def step() -> None:
            for batch, (q, k, v), gradient in calls:
                out = attention(q, k, v, batch, backend=backend)
                torch.autograd.grad(out, (q, k, v), gradient)

        slots = sum(batch.rows * batch.width for batch in batches)
        found = best(step, setup.device, 2 if setup.quick else 10)
        return found, slots

    packed = Recipe(layout=Packed(max_tokens=budget))
    runs = [(f"packed, {name}", packed, name) for name in setup.backends]
    if "segments" not in setup.backends:
        runs.append(("packed, segments", packed, "segments"))
    widest = max(lengths)
    runs.append(("dynamic, causal", Recipe(layout=Padded(max_tokens=budget)), "causal"))
    runs.append(
        (
            "all padded, causal",
            Recipe(layout=Padded(max_tokens=widest * len(lengths))),
            "causal",
        )
    )
    table = Table("Times", {"run": "", "slots": ",", "ms": ".2f", "×": ".2f"})
    first = None
    for name, recipe, backend in runs:
        found, slots = timed(recipe, backend)
        first = first or found
        table.add(name, slots, found, found / first)
        setup.free()
    section.tables.append(table)
    section.tables.append(_mask_times(lengths, packed, setup))
    return section


def _mask_times(lengths: list[int], packed: Recipe, setup: Setup) -> Table:
    """Time to build the block mask from boundaries, and entry by entry as torch does."""
    batch = next(make_batch(lengths, packed, setup.device))
    runs = 2 if setup.quick else 5
    ours = best(lambda: block_mask(batch), setup.device, runs)
    rule, width = block_mask(batch).mask_mod, batch.width
    theirs = best(
        lambda: create_block_mask(rule, 1, None, width, width, device=setup.device),
        setup.device,
        runs,
    )
    table = Table("Building a block mask", {"method": "", "ms": ".2f", "×": ".2f"})
    table.add("block_mask (evenstep)", ours, 1.0)
    table.add("create_block_mask (torch)", theirs, theirs / ours)
    return table


# Single precision -----------------------------------------------------------------------------


def single(setup: Setup) -> Section:
    """What `attention` chooses in float32: its time beside FlexAttention, errors of both."""
    total, dim = (512, 16) if setup.quick else (32_768, 64)
    heads = 4 if setup.quick else 16
    columns = {
        "length": ",", "segments": ",", "chosen": "", "one by one ms": ".2f", "flex ms": ".2f",
        "one by one, error": ".1e", "flex, error": ".1e",
    }  # fmt: skip
    table = Table("Forward and backward", columns)
    names = ("segments", "flex" if setup.device == "cuda" else "mask")
    slower, largest = 0.0, 0.0
    for length in (total // 4, total // 16, 512, 256, 180, 64):
        lengths = [length] * (total // length)
        (batch,) = make_batch(lengths, Recipe(layout=Packed(max_tokens=total)), setup.device)
        random = torch.Generator(setup.device).manual_seed(0)
        shapes = ((batch.rows, n, batch.width, dim) for n in (heads, heads // 4, heads // 4, heads))
        q, k, v, gradient = (
            torch.randn(shape, device=setup.device, generator=random) for shape in shapes
        )

        def run(dtype: torch.dtype, name: str) -> list[Tensor]:
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]  # noqa: B023
            out = attention(leaves[0], leaves[1], leaves[2], batch, backend=name)  # noqa: B023
            gradients = torch.autograd.grad(out, leaves, gradient.to(dtype))  # noqa: B023
            return [out.detach(), *gradients]

        exact = run(torch.float64, "segments")
        off = [max(errors([x.double() for x in run(torch.float32, n)], exact)) for n in names]
        times = [
            best(partial(run, torch.float32, name), setup.device, 2 if setup.quick else 5)
            for name in names
        ]
        chosen = choose(Call(q, k, v, Boundaries.of(batch)))
        place = int(chosen != "segments")
        table.add(length, len(lengths), chosen, *times, *off)
        slower, largest = max(slower, times[place] / min(times)), max(largest, off[place])
    return Section(
        "Float32",
        [
            f"{total:,} tokens in segments of one length, {heads} heads of {dim}, {heads // 4} key "
            f"heads. Errors of outputs and gradients, the worst, relative to the largest value, "
            f"compared with float64."
        ],
        tables=[table],
        targets=[
            Target("what is chosen: errors at most 1e-5", f"{largest:.1e}", largest <= 1e-5),
            Target("what is chosen: at most 1.1x the faster", f"{slower:.2f}x", slower <= 1.1),
        ],
    )


# Kernels that are activated ---------------------------------------------------------------------


class Plain:
    """Flash attention as an implementation that torch can activate: one segment at a time."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.library: Any = torch.library.Library("aten", "IMPL")
        self.library.impl("_flash_attention_forward", self.forward, "CUDA")
        self.library.impl("_flash_attention_backward", self.backward, "CUDA")

    def remove(self) -> None:
        """Torch's own kernels run again."""
        self.library._destroy()

    def forward(self, *inputs: Any, scale: float) -> tuple[Tensor, ...]:
        """Fails if it is given a window."""
        self.calls["forward"] += 1
        q, k, v, cu_seqlens, cu_seqlens_k, *_, causal, _ = inputs
        tiles = segment_attention._tiles(cu_seqlens, cu_seqlens_k)
        found = segment_attention._tiles_forward(q, k, v, tiles, causal, 0, scale, 0.0)
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return *found, state, state.clone(), q.new_empty(0)

    def backward(self, *inputs: Any, scale: float) -> tuple[Tensor, ...]:
        """Fails if it is given a window."""
        self.calls["backward"] += 1
        tiles = segment_attention._tiles(*inputs[6:8])
        causal = inputs[11]
        return segment_attention._tiles_backward(*inputs[:6], tiles, causal, 0, scale, 0.0)


def activated(setup: Setup) -> Section:
    """Whether a decoder runs on what is activated in torch, and which of it is installed."""
    table = Table("Activated", {"": "", "calls": "", "gradients": ".1e"})
    if setup.device != "cuda" or not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return Section("Kernels that are activated", ["needs a GPU and torch 2.11"])
    registry, notes = torch.nn.attention, []
    plain: list[Plain] = []
    for name in registry.list_flash_attention_impls():
        try:
            registry.activate_flash_attention_impl(name)
            registry.restore_flash_attention_impl()
            notes.append(f"{name} is installed.")
        except Exception as error:
            notes.append(f"{name} cannot be activated: {first_line(error)}.")

    def register() -> Plain:
        plain.append(Plain())
        return plain[-1]

    registry.register_flash_attention_impl("plain", register_fn=register)
    (batch,) = make_batch([5, 700, 41], Recipe(layout=Packed(max_tokens=1024)), setup.device)
    exact, largest, calls = None, 0.0, []
    for name, active, compiled in (
        ("torch's own", False, False), ("activated", True, False), ("compiled", True, True),
    ):  # fmt: skip
        torch.manual_seed(0)
        model = Decoder(DecoderShape(vocab=1000)).to(setup.device, HALF)
        if compiled:
            compile_layers(model)
        if active:
            registry.activate_flash_attention_impl("plain")
        cross_entropy()(model(batch), batch).loss.backward()
        gradient = torch.cat([each.grad.flatten().double() for each in model.parameters()])
        exact = gradient if exact is None else exact
        off = float((gradient - exact).abs().max() / exact.abs().max())
        calls.append(dict(plain[-1].calls) if active else {})
        table.add(name, str(calls[-1]), off)
        largest = max(largest, off)
        if active:
            registry.restore_flash_attention_impl()
    used = all(each == {"forward": 2, "backward": 2} for each in calls[1:])
    return Section(
        "Kernels that are activated",
        notes,
        tables=[table],
        targets=[
            Target("each of 2 layers calls what is activated", str(calls[1:]), used),
            Target(f"gradients in bfloat16 within {LIMIT:.0e}", f"{largest:.1e}", largest <= LIMIT),
        ],
    )


# Running --------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Setup], Section]] = {
    "kernels": kernels,
    "decoder": decoder,
    "speed": speed,
    "single": single,
    "activated": activated,
}


def facts(setup: Setup) -> dict[str, str]:
    """Hardware, versions and tolerances."""
    on_gpu = setup.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "CUDA": str(torch.version.cuda) if on_gpu else "none",
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "precision": "bfloat16 compared with float32 (TF32 off)",
        "tolerance": f"{LIMIT:.0e} of the largest value, {FACTOR:.0f}× the error of the baseline",
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the sections and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--quick", action="store_true", help="run a small version; write nothing")
    parser.add_argument("--only", action="append", choices=list(SECTIONS))
    parser.add_argument("--out", type=Path, help="folder for results (default: benchmarks/results)")
    options = parser.parse_args(arguments)
    if options.out is None and not options.quick and not options.only:
        options.out = ROOT / "benchmarks" / "results"
    torch.backends.cuda.matmul.allow_tf32 = False
    # Above the recompilation limit FlexAttention runs unfused and materialises all scores.
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 64)
            break
    setup = Setup(options.device, options.quick)
    console = Console(width=None if sys.stdout.isatty() else 140)
    found = {}
    for name in options.only or SECTIONS:
        start = time.perf_counter()
        found[name] = SECTIONS[name](setup)
        tables.show(found[name], console)
        console.print(f"{name}: {time.perf_counter() - start:.0f} s\n")
    if options.out:
        _write(options.out, setup, found)
    return 0


def _write(folder: Path, setup: Setup, found: dict[str, Section]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = facts(setup)
    data = {"machine": about, "sections": {name: s.to_dict() for name, s in found.items()}}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    (folder / "gpu_attention.json").write_text(text + "\n", encoding="utf-8")
    texts = [
        "# Attention on a GPU",
        "Written by `python benchmarks/gpu_attention.py`.",
        tables.markdown_table(Table("Machine", {"": "", " ": ""}, [*about.items()])),
        *(tables.markdown(section) for section in found.values()),
    ]
    (folder / "gpu_attention.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
