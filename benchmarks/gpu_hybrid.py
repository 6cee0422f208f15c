"""Measure a hybrid model of 1B parameters on a GPU, padded and packed.

    python benchmarks/gpu_hybrid.py                        writes benchmarks/results
    python benchmarks/gpu_hybrid.py --device cpu --quick   a small version, writes nothing

A Qwen3-Next shape with dense feed-forward layers and random weights. Three of four layers carry
state. Every row runs the same samples forward and backward through `Runner`, with the kernels of
`evenstep.integrations.packed_kernels`, which also skip the padding of padded rows, or with the
reference kernels of transformers; packed, those run on rows of one segment each. A row that fails
is reported with its error, and the others run. Results are written after each.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import hf_forward, support_of
from evenstep.integrations.mixers import Mode, mixers_of, row_groups
from evenstep.train.runner import Runner

ROOT = Path(__file__).resolve().parents[1]
LATE = 215.0
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
    mode: Mode = "kernels"  # those of Evenstep; "rows" for those of transformers
    checkpointed: bool = False  # layers are computed again in the backward

    @property
    def kernels(self) -> str:
        return "evenstep" if self.mode == "kernels" else "transformers"


FOUR = "random batches of 4"


def rows_of(setup: Setup, budget: int) -> list[Row]:
    four = Recipe(layout=Padded(samples=4), balance="none")
    packed, dynamic = (Recipe(layout=kind(max_tokens=budget)) for kind in (Packed, Padded))
    wide, padded = (Recipe(layout=kind(max_tokens=4 * budget)) for kind in (Packed, Padded))
    rows = [
        Row("packed", packed),
        Row("dynamic", dynamic),
        Row("dynamic", dynamic, "rows"),
        Row(FOUR, four),
        Row("packed, checkpointed", wide, checkpointed=True),
        Row("dynamic, checkpointed", padded, checkpointed=True),
        Row(FOUR, four, "rows"),
        Row("packed", packed, "rows"),
        Row(f"{FOUR}, checkpointed", four, checkpointed=True),
    ]
    return rows[:5] if setup.quick else rows


def build(shape: dict[str, Any], setup: Setup) -> Any:
    torch.manual_seed(0)
    with torch.device(setup.device):
        config = transformers.Qwen3NextConfig(**shape)
        model = transformers.Qwen3NextForCausalLM._from_config(
            config, attn_implementation="sdpa", dtype=HALF if setup.device == "cuda" else None
        )
    return model.to(setup.device).train()


def padding_of(batches: list[Any], row: Row) -> float:
    """Slots that the delta rule runs over those of tokens."""
    if row.mode == "kernels":
        return 1.0
    slots = tokens = 0
    for batch in batches:
        lengths = batch.seqlens[batch.seqlens > 0].tolist()
        tokens += sum(lengths)
        if isinstance(row.recipe.layout, Padded):
            slots += batch.rows * batch.width
            continue
        groups = row_groups(lengths, batch.rows * batch.width)
        slots += sum(len(group) * max(lengths[k] for k in group) for group in groups)
    return slots / tokens


def measure(row: Row, model: Any, lengths: list[int], setup: Setup) -> list[Any]:
    """Micro-batches, tokens, slots over tokens of the model and of the delta rule, seconds and
    thousand tokens per second of one pass over the samples."""
    batches = make_batches(lengths, row.recipe, model.config.vocab_size)
    support_of(model)
    for module in mixers_of(model).values():
        module._evenstep_mixer.mode = row.mode
    if row.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    forward = hf_forward(model, outputs="hidden")
    runner = Runner(model=model, loss=loss_of(model), forward=forward, device=setup.device)
    model.zero_grad()
    runner.run([max(batches, key=lambda batch: batch.rows * batch.width)])
    model.zero_grad()
    setup.wait()
    begin = time.perf_counter()
    runner.run(batches)
    setup.wait()
    seconds, tokens = time.perf_counter() - begin, sum(lengths)
    slots = sum(batch.rows * batch.width for batch in batches) / tokens
    rate = tokens / seconds / 1e3
    return [len(batches), tokens, slots, padding_of(batches, row), seconds, rate]


def speed(setup: Setup, budget: int, save: Any) -> Section:
    """Tokens per second of the hybrid model in every layout."""
    lengths = draw_lengths(*((8, 20, 40) if setup.quick else (256, 1182, 8192)))
    model = build(TINY if setup.quick else SHAPE, setup)
    use_attention(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    section = Section(f"A Qwen3-Next of {count / 1e9:.2f}B parameters, forward and backward")
    section.notes.append(
        f"{len(lengths)} log-normal samples, {sum(lengths):,} tokens, mean "
        f"{np.mean(lengths):,.0f}, longest {max(lengths):,}. Micro-batches of {budget:,} slots, "
        f"four times as many with checkpointing. Attention of Evenstep in all rows."
    )
    columns = {
        "layout": "", "kernels": "", "micro-batches": ",", "tokens": ",", "slots": ".2f",
        "delta rule": ".2f", "s": ".2f", "k tokens/s": ".1f", "GB": ".1f",
    }  # fmt: skip
    table = Table("One pass", columns)
    section.tables.append(table)
    seen: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows_of(setup, budget):
        if time.perf_counter() - setup.begin > LATE:
            section.notes.append(f"{row.name}, {row.kernels}: skipped for want of time.")
            continue
        model.zero_grad()
        setup.free()
        try:
            figures = measure(row, model, lengths, setup)
        except Exception as error:
            traceback.print_exc()
            section.notes.append(f"{row.name}, {row.kernels} failed: {first_line(error)}")
            continue
        seen[row.name, row.kernels] = (figures[-1], setup.peak)
        print(row.name, row.kernels, figures, f"{setup.peak:.1f} GB", flush=True)
        table.add(row.name, row.kernels, *figures, setup.peak)
        save(section)
    section.targets.extend(targets_of(seen))
    return section


def targets_of(seen: dict[tuple[str, str], tuple[float, float]]) -> list[Target]:
    """Packed rows with our kernels against padded ones with the same and with others."""
    targets = []
    for ending in ("", ", checkpointed"):
        ours = seen.get((f"packed{ending}", "evenstep"))
        for name, least in ((FOUR, OVER_RANDOM), ("dynamic", OVER_DYNAMIC)):
            for kernels in ("evenstep", "transformers"):
                other = seen.get((f"{name}{ending}", kernels))
                if ours is None or other is None:
                    continue
                gain, which = ours[0] / other[0], f"{name}{ending}, kernels of {kernels}"
                targets.append(
                    Target(f"packed at least {least}× {which}", f"{gain:.2f}×", gain >= least)
                )
                if name == "dynamic":
                    text = f"{ours[1]:.1f} and {other[1]:.1f} GB"
                    target = f"peak memory at most that of {which}"
                    targets.append(Target(target, text, ours[1] <= other[1]))
    return targets


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
