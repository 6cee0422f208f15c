"""Measure a Hugging Face model of 1B parameters on a GPU, padded and packed.

    python benchmarks/gpu_models.py                        writes benchmarks/results
    python benchmarks/gpu_models.py --device cpu --quick   a small version, writes nothing

Random weights, real shapes. Every row runs the same samples forward and backward through `Runner`.
A row that fails is reported with its error, and the others run. Results are written after each.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
import transformers
from rich.console import Console
from torch import Tensor

from benchmarks import tables
from benchmarks.model_checks import gradients, kernels
from benchmarks.models import (
    HALF,
    LLAMA_1B,
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
from evenstep import Cost, Packed, Padded, Recipe
from evenstep.integrations import hf_attention
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import hf_kwargs
from evenstep.tensors.batch import Batch
from evenstep.tensors.segment_attention import BACKENDS, attend
from evenstep.train.runner import Runner

ROOT = Path(__file__).resolve().parents[1]
FLOP_RATE, GAIN = 360.0, 2.5
"""Targets: model TFLOP/s packed, and times the padded row."""

# Speed ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A layout and an attention implementation."""

    name: str
    recipe: Recipe
    attention: str
    part: int | None = None  # micro-batches that are timed; None for all
    compiled: bool = False
    backend: str | None = None


def speed_rows(setup: Setup, compiled: bool) -> list[Row]:
    budget = 256 if setup.quick else 32768
    four = Recipe(layout=Padded(samples=4), balance="none")
    dynamic = Recipe(layout=Padded(max_tokens=budget))
    packed = Recipe(layout=Packed(max_tokens=budget))
    rows = [
        Row("random batches of 4, padded", four, "sdpa"),
        Row("packed", packed, "evenstep"),
        Row("dynamic, padded", dynamic, "sdpa"),
        Row("packed", packed, "sdpa", part=2),
    ]
    if setup.device == "cuda":
        rows += [
            Row("dynamic, padded", dynamic, "evenstep"),
            Row("packed", packed, "flex_attention"),
            Row("packed, on FlexAttention", packed, "evenstep", backend="flex"),
        ]
    if compiled:
        rows.append(Row("packed, compiled", packed, "evenstep", compiled=True))
    return rows


def measure(row: Row, model: Any, lengths: list[int], cost: Cost, setup: Setup) -> list[Any]:
    """Seconds, model TFLOP/s, slots and micro-batches of one pass over the samples."""
    batches = make_batches(lengths, row.recipe, model.config.vocab_size)
    batches = batches[: row.part] if row.part else batches
    if row.attention == "evenstep":
        use_attention(model)
    else:
        model.set_attn_implementation(row.attention)
    forward = states
    if row.compiled:
        compiled = torch.compile(model.base_model)

        def forward(model: Any, batch: Batch) -> Tensor:
            hidden: Tensor = compiled(**hf_kwargs(batch)).last_hidden_state
            return hidden

    runner = Runner(model=model, loss=loss_of(model), forward=forward, device=setup.device)
    largest = sorted(batches, key=lambda batch: batch.rows * batch.width)
    # Kernels of attention are compiled for one width and then for any.
    for batch in [largest[0], largest[-1]] if row.part is None else [largest[-1]]:
        model.zero_grad()
        runner.run([batch])
    taken = []
    for _ in range(2 if row.attention == "evenstep" else 1):
        model.zero_grad()
        setup.wait()
        begin = time.perf_counter()
        runner.run(batches)
        setup.wait()
        taken.append(time.perf_counter() - begin)
    real = np.concatenate([b.seqlens[b.seqlens > 0].numpy() for b in batches])
    rate = float(cost.of_lengths(real).sum()) / min(taken) / 1e12
    slots = sum(batch.rows * batch.width for batch in batches)
    return [len(batches), int(real.sum()), int(real.sum()) / slots, min(taken), rate]


def speed(setup: Setup, save: Callable[[Section], None], compiled: bool = False) -> Section:
    """Model TFLOP/s of the 1B model in every layout."""
    shape = TINY if setup.quick else LLAMA_1B
    lengths = draw_lengths(*((24, 40, 100) if setup.quick else (256, 1182, 8192)))
    model = build(shape, setup.device, HALF)
    cost = Cost.of_config(model.config)
    count = sum(p.numel() for p in model.parameters())
    section = Section(f"A Llama of {count / 1e9:.2f}B parameters, bfloat16, forward and backward")
    section.notes.append(
        f"{len(lengths)} log-normal samples, {sum(lengths):,} tokens, mean "
        f"{np.mean(lengths):,.0f}, longest {max(lengths):,}. Model TFLOP/s count real tokens "
        "only. The loss is a linear cross entropy in blocks of 4,096 slots, without logits. "
        "Packed rows hold at most 32,768 tokens. Without torch.compile unless it says so. × is "
        "relative to the first row."
    )
    columns = {
        "layout": "", "attention": "", "micro-batches": ",", "tokens": ",", "fill": ".0%",
        "s": ".2f", "TFLOP/s": ".1f", "×": ".2f", "GB": ".1f",
    }  # fmt: skip
    table = Table("One pass", columns)
    section.tables.append(table)
    rates: dict[tuple[str, str], float] = {}
    first = None
    for row in speed_rows(setup, compiled):
        if setup.late("speed"):
            section.notes.append(f"{row.name}, {row.attention}: skipped for want of time.")
            continue
        setup.free()
        run = attend if row.backend is None else BACKENDS[row.backend]
        try:
            with mock.patch.object(hf_attention, "attend", run):
                found = measure(row, model, lengths, cost, setup)
        except Exception as error:
            traceback.print_exc()
            section.notes.append(f"{row.name}, {row.attention} failed: {first_line(error)}")
            continue
        first = first or found[-1]
        rates[row.name, row.attention] = found[-1]
        table.add(row.name, row.attention, *found, found[-1] / first, setup.peak)
        save(section)
    mine = rates.get(("packed", "evenstep"), 0.0)
    gain = mine / rates.get(("random batches of 4, padded", "sdpa"), np.inf)
    section.targets += [
        Target(
            f"packed on evenstep at least {FLOP_RATE:.0f} model TFLOP/s",
            f"{mine:.1f}",
            mine >= FLOP_RATE,
        ),
        Target(f"at least {GAIN}× random batches of 4", f"{gain:.2f}×", gain >= GAIN),
    ]
    return section


# Running --------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[..., Section]] = {
    "gradients": gradients,
    "speed": speed,
    "kernels": kernels,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the sections and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--quick", action="store_true", help="run a small version; write nothing")
    parser.add_argument("--only", action="append", choices=list(SECTIONS))
    parser.add_argument("--compile", action="store_true", help="also run a compiled model")
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
    found: dict[str, Section] = {}
    for name in options.only or SECTIONS:

        def save(section: Section, name: str = name) -> None:
            found[name] = section
            if options.out:
                _write(options.out, setup, found)

        start = time.perf_counter()
        more = {"compiled": True} if name == "speed" and options.compile else {}
        try:
            save(SECTIONS[name](setup, save, **more))
        except Exception as error:
            traceback.print_exc()
            save(Section(f"{name} failed", [first_line(error)]))
        tables.show(found[name], console)
        console.print(f"{name}: {time.perf_counter() - start:.0f} s\n")
    return 0


def _write(folder: Path, setup: Setup, found: dict[str, Section]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = setup.device == "cuda"
    about = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "CUDA": str(torch.version.cuda) if on_gpu else "none",
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "Python": platform.python_version(),
    }
    data = {"machine": about, "sections": {name: s.to_dict() for name, s in found.items()}}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    (folder / "gpu_models.json").write_text(text + "\n", encoding="utf-8")
    texts = [
        "# Models of Hugging Face on a GPU",
        "Written by `python benchmarks/gpu_models.py`.",
        tables.markdown_table(Table("Machine", {"": "", " ": ""}, [*about.items()])),
        *(tables.markdown(section) for section in found.values()),
    ]
    (folder / "gpu_models.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
