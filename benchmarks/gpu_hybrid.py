"""Measure a hybrid model of 1B parameters on a GPU, padded and packed.

    python benchmarks/gpu_hybrid.py                        writes benchmarks/results
    python benchmarks/gpu_hybrid.py --device cpu --quick   a small version, writes nothing

A Qwen3-Next shape with dense feed-forward layers and random weights. Three of four layers carry
state; packed, they run on rows of one segment each. Every row runs the same samples forward and
backward through `Runner`, with the same kernels. A row that fails is reported with its error, and
the others run. Results are written after each.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
import transformers
from rich.console import Console

from benchmarks import tables
from benchmarks.models import HALF, Setup, draw_lengths, first_line, loss_of, make_batches
from benchmarks.tables import Section, Table, Target
from evenstep import Packed, Padded, Recipe
from evenstep.integrations import mixers
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import hf_forward, supports_packing
from evenstep.train.runner import Runner

ROOT = Path(__file__).resolve().parents[1]
LATE = 240.0
"""Seconds since the beginning after which no further row starts."""
OVER_RANDOM, OVER_DYNAMIC = 2.5, 1.1
"""Targets: times the tokens per second of random batches of 4, and of dynamic ones."""

SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "mlp_only_layers": list(range(16)),
    "num_experts": 0,
}
TINY = SHAPE | {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A layout, and how its forward runs."""

    name: str
    recipe: Recipe
    attention: str = "evenstep"
    checkpointed: bool = False  # layers are computed again in the backward
    step_slots: int = mixers.STEP_SLOTS


def rows_of(setup: Setup, budget: int) -> list[Row]:
    four = Recipe(layout=Padded(samples=4), balance="none")
    dynamic = Recipe(layout=Padded(max_tokens=budget))
    packed = Recipe(layout=Packed(max_tokens=budget))
    wide = 4 * budget
    rows = [
        Row("packed", packed),
        Row("dynamic, padded", dynamic),
        Row("random batches of 4, padded", four),
        Row("packed, checkpointed", Recipe(layout=Packed(max_tokens=wide)), checkpointed=True),
        Row("dynamic, checkpointed", Recipe(layout=Padded(max_tokens=wide)), checkpointed=True),
        Row("random batches of 4, checkpointed", four, checkpointed=True),
        Row("packed, few groups", packed, step_slots=32),
        Row("packed, many groups", packed, step_slots=1),
        Row("dynamic, padded", dynamic, attention="sdpa"),
    ]
    return rows[:4] if setup.quick else rows


def build(shape: dict[str, Any], setup: Setup) -> Any:
    torch.manual_seed(0)
    with torch.device(setup.device):
        config = transformers.Qwen3NextConfig(**shape)
        model = transformers.Qwen3NextForCausalLM._from_config(
            config, attn_implementation="sdpa", dtype=HALF if setup.device == "cuda" else None
        )
    return model.to(setup.device).train()


def padding_of(batches: list[Any], row: Row) -> float:
    """Slots that mixers run over those of tokens, of packed rows."""
    slots = tokens = 0
    for batch in batches:
        lengths = batch.seqlens[batch.seqlens > 0].tolist()
        tokens += sum(lengths)
        if isinstance(row.recipe.layout, Padded):
            slots += batch.rows * batch.width
            continue
        with mock.patch.object(mixers, "STEP_SLOTS", row.step_slots):
            groups = mixers.row_groups(lengths, batch.rows * batch.width)
        slots += sum(len(group) * max(lengths[k] for k in group) for group in groups)
    return slots / tokens


def measure(row: Row, model: Any, lengths: list[int], setup: Setup) -> list[Any]:
    """Micro-batches, tokens, slots of mixers over tokens, seconds and thousand tokens per second
    of one pass over the samples."""
    batches = make_batches(lengths, row.recipe, model.config.vocab_size)
    if row.attention == "evenstep":
        use_attention(model)
    else:
        model.set_attn_implementation(row.attention)
    if row.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    forward = hf_forward(model, outputs="hidden")
    runner = Runner(model=model, loss=loss_of(model), forward=forward, device=setup.device)
    with mock.patch.object(mixers, "STEP_SLOTS", row.step_slots):
        model.zero_grad()
        runner.run([max(batches, key=lambda batch: batch.rows * batch.width)])
        model.zero_grad()
        setup.wait()
        begin = time.perf_counter()
        runner.run(batches)
        setup.wait()
        seconds = time.perf_counter() - begin
    return [
        len(batches), sum(lengths), padding_of(batches, row), seconds, sum(lengths) / seconds / 1e3
    ]  # fmt: skip


def speed(setup: Setup, budget: int, save: Any) -> Section:
    """Tokens per second of the hybrid model in every layout."""
    lengths = draw_lengths(*((8, 20, 40) if setup.quick else (256, 1182, 8192)))
    model = build(TINY if setup.quick else SHAPE, setup)
    count = sum(parameter.numel() for parameter in model.parameters())
    section = Section(f"A Qwen3-Next of {count / 1e9:.2f}B parameters, forward and backward")
    fast = [name for name in ("fla", "causal_conv1d") if find_spec(name)]
    section.notes.append(
        f"{len(lengths)} log-normal samples, {sum(lengths):,} tokens, mean "
        f"{np.mean(lengths):,.0f}, longest {max(lengths):,}. Micro-batches of {budget:,} slots, "
        f"four times as many with checkpointing. Kernels of linear attention: "
        f"{', '.join(fast) or 'the reference of transformers'}."
    )
    columns = {
        "layout": "", "attention": "", "micro-batches": ",", "tokens": ",", "mixer slots": ".2f",
        "s": ".2f", "k tokens/s": ".1f", "GB": ".1f",
    }  # fmt: skip
    table = Table("One pass", columns)
    section.tables.append(table)
    seen: dict[str, tuple[float, float]] = {}
    for row in rows_of(setup, budget):
        if time.perf_counter() - setup.begin > LATE:
            section.notes.append(f"{row.name}, {row.attention}: skipped for want of time.")
            continue
        model.zero_grad()
        setup.free()
        try:
            figures = measure(row, model, lengths, setup)
        except Exception as error:
            traceback.print_exc()
            section.notes.append(f"{row.name}, {row.attention} failed: {first_line(error)}")
            continue
        seen.setdefault(row.name, (figures[-1], setup.peak))
        print(row.name, row.attention, figures, f"{setup.peak:.1f} GB", flush=True)
        table.add(row.name, row.attention, *figures, setup.peak)
        save(section)
    try:
        print(supports_packing(model), flush=True)
    except Exception:
        traceback.print_exc()
    for kind in ("padded", "checkpointed"):
        ours = seen.get("packed" if kind == "padded" else "packed, checkpointed")
        random, dynamic = seen.get(f"random batches of 4, {kind}"), seen.get(f"dynamic, {kind}")
        if ours is None or random is None or dynamic is None:
            continue
        bounds = [("random batches of 4", random, OVER_RANDOM)]
        bounds += [("dynamic batches", dynamic, OVER_DYNAMIC)]
        for name, other, least in bounds:
            gain = ours[0] / other[0]
            target = f"packed at least {least}× {name}, {kind}"
            section.targets.append(Target(target, f"{gain:.2f}×", gain >= least))
        text = f"{ours[1]:.1f} and {dynamic[1]:.1f} GB"
        target = f"peak memory at most that of dynamic batches, {kind}"
        section.targets.append(Target(target, text, ours[1] <= dynamic[1]))
    return section


def main(arguments: list[str] | None = None) -> int:
    """Run all rows and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--quick", action="store_true", help="run a small version; write nothing")
    parser.add_argument("--budget", type=int, default=16384, help="slots of a micro-batch")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    setup = Setup(options.device, options.quick)

    def save(section: Section) -> None:
        if not options.quick:
            _write(options.out, setup, section)

    section = speed(setup, 64 if options.quick else options.budget, save)
    save(section)
    tables.show(section, Console(width=None if sys.stdout.isatty() else 140))
    return 0


def _write(folder: Path, setup: Setup, section: Section) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = setup.device == "cuda"
    about = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "Python": platform.python_version(),
    }
    text = json.dumps({"machine": about, "section": section.to_dict()}, indent=1)
    (folder / "gpu_hybrid.json").write_text(text + "\n", encoding="utf-8")
    texts = [
        "# A hybrid model on a GPU",
        "Written by `python benchmarks/gpu_hybrid.py`.",
        tables.markdown_table(Table("Machine", {"": "", " ": ""}, [*about.items()])),
        tables.markdown(section),
    ]
    (folder / "gpu_hybrid.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
