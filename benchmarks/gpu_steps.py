"""Measure whole steps on a GPU: gradients, throughput and prefetching in every layout.

    python benchmarks/gpu_steps.py                        writes benchmarks/results
    python benchmarks/gpu_steps.py --device cpu --quick   a small version, writes nothing

Every step holds the same samples, padded to the maximum length, dynamically batched and packed,
and runs through stream, plan, collator and runner.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import tables
from benchmarks.gradients import PER_PARAMETER, gradient_of, worst_parameter
from benchmarks.tables import Cell, Section, Table, Target
from evenstep import Cost, Packed, Padded, Recipe, Steps
from evenstep.core.layout import Layout
from evenstep.data.dataset import InMemory
from evenstep.data.planned import PlannedStream
from evenstep.demo.decoder import Decoder, DecoderShape
from evenstep.tensors.collate import Collator
from evenstep.tensors.losses import cross_entropy
from evenstep.train.normalization import SequenceMean, TokenMean
from evenstep.train.runner import Runner

ROOT = Path(__file__).resolve().parents[1]
PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
"""Dense bfloat16 FLOP/s, from the data sheets."""


class Slow:
    """A source that sleeps for each token."""

    def __init__(self, source: InMemory, seconds: float) -> None:
        self.source, self.seconds = source, seconds

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def lengths_of(self, items: Any) -> Any:
        return self.source.lengths_of(items)

    def __getitem__(self, item: int) -> Any:
        sample: Any = self.source[item]
        time.sleep(self.seconds * len(sample["input_ids"]))
        return sample


def corpus(count: int, median: int, longest: int, vocab: int, spread: float = 1.0) -> InMemory:
    """Samples of log-normal lengths."""
    rng = np.random.default_rng(0)
    lengths = (median * np.exp(rng.normal(0, spread, count))).astype(int).clip(2, longest)
    return InMemory([{"input_ids": rng.integers(0, vocab, n)} for n in lengths])


def layouts(budget: int, longest: int) -> dict[str, Layout]:
    return {
        "padded to the longest": Padded(max_tokens=budget, pad_to=longest),
        "dynamically batched": Padded(max_tokens=budget),
        "packed": Packed(max_tokens=budget),
    }


def gradients(device: str, quick: bool) -> Section:
    """One step in every layout and mode, compared with one sample at a time."""
    source = corpus(24, 60, 256, 97)
    labels = source.lengths_of(np.arange(len(source))) - 1
    shape = DecoderShape(vocab=97, hidden=64, layers=2)
    table = Table(
        "Compared with one sample at a time", dict.fromkeys(("denominator", "layout", "mode"), "")
    )
    table.columns["relative error"] = ".1e"
    worst = 0.0
    for normalization in (TokenMean(), SequenceMean()):
        alone = Padded(max_tokens=256, pad_to=256)
        reference = _gradient(source, alone, device, shape, normalization, "deferred", labels)
        for name, layout in layouts(512, 256).items():
            for mode in ("known", "deferred"):
                found = _gradient(source, layout, device, shape, normalization, mode, labels)
                off = worst_parameter(found, reference)
                table.add(normalization.name, name, mode, off)
                worst = max(worst, off)
    return Section(
        "The gradient of a step, float32",
        [f"Difference to one sample at a time. {PER_PARAMETER}"],
        tables=[table],
        targets=[
            Target("relative error at most 1e-6 in every layout", f"{worst:.1e}", worst <= 1e-6)
        ],
    )


def _gradient(
    source: InMemory, layout: Layout, device: str, shape: DecoderShape, normalization: Any,
    mode: Any, labels: Any,
) -> dict[str, Tensor]:  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(shape).to(device)
    stream = PlannedStream(source, Recipe(layout=layout), loss_tokens=labels, shuffle=False)
    runner = Runner(
        model=model, loss=cross_entropy(), normalization=normalization, mode=mode, device=device
    )
    for step in stream:
        runner.run(step)
    return gradient_of(model)


def training(device: str, quick: bool) -> Section:
    """Several steps of a decoder in bfloat16: tokens/s, MFU and loss."""
    sizes: dict[str, Any] = {"hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 4, "ffn": 2816}
    vocab, longest, budget, steps, samples = 32_000, 8192, 32_768, 8, 128
    if quick:
        sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 64}
        vocab, longest, budget, steps, samples = 101, 64, 128, 3, 8
    source = corpus(steps * samples, longest // 8, longest, vocab)
    labels = source.lengths_of(np.arange(len(source))) - 1
    cost = Cost.of_model(**sizes, vocab=vocab)
    peak = PEAK.get(torch.cuda.get_device_name()) if device == "cuda" else None
    rows: list[tuple[Cell, ...]] = []
    losses: list[list[float]] = []
    speed: dict[str, float] = {}
    for name, layout in layouts(budget, longest).items():
        torch.manual_seed(0)
        model = Decoder(DecoderShape(vocab=vocab, **sizes)).to(device, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        recipe = Recipe(layout=layout, steps=Steps(samples=samples), cost=cost)
        stream = PlannedStream(source, recipe, loss_tokens=labels)
        runner = Runner(
            model=model, loss=cross_entropy(), device=device, collate=Collator(pin_memory=True),
            cost=cost, peak_flops=peak,
        )  # fmt: skip
        results = []
        for step in stream:
            results.append(runner.run(step))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        steady = results[2:] or results
        seconds = sum(result.timings.total for result in steady)
        speed[name] = sum(result.tokens for result in steady) / seconds
        mfu = [result.mfu for result in steady if result.mfu is not None]
        losses.append([result.loss for result in results])
        rows.append(
            (
                name,
                f"{speed[name]:,.0f}",
                f"{speed[name] / speed['padded to the longest']:.2f}×",
                f"{np.mean([r.padding for r in results]):.1%}",
                f"{np.mean(mfu):.1%}" if mfu else "",
                f"{sum(r.timings.wait for r in steady) / seconds:.1%}",
                f"{losses[-1][0]:.5f}",
                f"{losses[-1][-1]:.5f}",
            )
        )
    spread = float(np.ptp(np.array(losses), axis=0).max())
    header = {
        "layout": "", "tokens/s": "", "×": "", "padding": "", "MFU": "",
        "waiting for data": "", "first loss": "", "last loss": "",
    }  # fmt: skip
    gained = speed["packed"] / speed["padded to the longest"]
    return Section(
        "Training a decoder, bfloat16",
        [
            f"{steps} steps of {samples} log-normal samples of at most {longest:,} tokens, at most "
            f"{budget:,} slots per micro-batch; {sizes}. MFU counts FLOPs of real tokens."
        ],
        tables=[Table("Layouts", header, rows)],
        targets=[
            Target("packed is faster than padded", f"{gained:.2f}×", gained > 1),
            Target("losses agree up to bfloat16 rounding", f"{spread:.1e}", spread < 2e-2),
        ],
    )


def prefetching(device: str, quick: bool) -> Section:
    """Preparation as slow as compute, with and without prefetching."""
    source = corpus(64 if quick else 256, 400, 1024, 101)
    sizes: dict[str, Any] = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1408}
    if quick:
        sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 64}
    rows: list[tuple[Cell, ...]] = []
    ratios = {}
    model = Decoder(DecoderShape(vocab=101, **sizes)).to(device, torch.bfloat16)
    recipe = Recipe(layout=Packed(max_tokens=8192))

    def run(given: Any, ahead: int) -> Any:
        runner = Runner(model=model, loss=cross_entropy(), device=device, prefetch=ahead)
        model.zero_grad()
        return runner.run(next(iter(PlannedStream(given, recipe))))

    run(source, 1)
    compute = run(source, 1).timings.total  # without waiting
    slow = Slow(source, compute / int(source.lengths_of(np.arange(len(source))).sum()))
    for ahead in (0, 1, 2):
        found = run(slow, ahead).timings
        larger = max(found.prepare, compute)
        ratios[ahead] = found.total / larger
        rows.append(
            (str(ahead), f"{found.prepare:.3f}", f"{compute:.3f}", f"{found.wait:.3f}",
             f"{found.total:.3f}", f"{ratios[ahead]:.2f}×", f"{found.first:.3f}")
        )  # fmt: skip
    header = {
        "prefetch": "", "prepare (s)": "", "compute (s)": "", "wait (s)": "", "total (s)": "",
        "total / larger": "", "first forward (s)": "",
    }  # fmt: skip
    return Section(
        "Prefetching",
        ["A source as slow as the model; total time over the larger of prepare and compute."],
        tables=[Table("One step", header, rows)],
        targets=[
            Target("prefetch=1 below 1.15× the larger", f"{ratios[1]:.2f}×", ratios[1] < 1.15)
        ],
    )


SECTIONS = {"gradients": gradients, "training": training, "prefetching": prefetching}


def main(arguments: list[str] | None = None) -> int:
    """Run the sections and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--quick", action="store_true", help="run a small version; write nothing")
    parser.add_argument("--out", type=Path, help="folder for results (default: benchmarks/results)")
    options = parser.parse_args(arguments)
    if options.out is None and not options.quick:
        options.out = ROOT / "benchmarks" / "results"
    torch.backends.cuda.matmul.allow_tf32 = False
    console = Console(width=None if sys.stdout.isatty() else 140)
    found = {}
    for name, section in SECTIONS.items():
        start = time.perf_counter()
        found[name] = section(options.device, options.quick)
        tables.show(found[name], console)
        console.print(f"{name}: {time.perf_counter() - start:.0f} s\n")
    if options.out:
        _write(options.out, options.device, found)
    return 0


def _write(folder: Path, device: str, found: dict[str, Section]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }
    data = {"machine": about, "sections": {name: s.to_dict() for name, s in found.items()}}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    (folder / "gpu_steps.json").write_text(text + "\n", encoding="utf-8")
    texts = [
        "# Steps on a GPU",
        "Written by `python benchmarks/gpu_steps.py`.",
        tables.markdown_table(Table("Machine", {"": "", " ": ""}, [*about.items()])),
        *(tables.markdown(section) for section in found.values()),
    ]
    (folder / "gpu_steps.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
