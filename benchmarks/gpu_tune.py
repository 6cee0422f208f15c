"""Compare what `evenstep tune` predicts with a 1B model on a GPU: memory and step time.

    python benchmarks/gpu_tune.py                        writes benchmarks/results
    python benchmarks/gpu_tune.py --device cpu --quick   a small version, writes nothing

The constants of `report/simulation/device.py` are fitted to other models (`FITTED`), never to this
one. Set up as the trainer does: FSDP2 with one rank, bfloat16, AdamW, without torch.compile.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
import transformers
from rich.console import Console

from benchmarks import tables
from benchmarks.gpu_runs import Case, Measured, measure, one_rank
from benchmarks.tables import Section, Table, Target
from evenstep import Topology
from evenstep.core.cost import Gpu
from evenstep.core.models import PRESETS, ModelConfig, ModelSize
from evenstep.report.simulation.device import cluster_of
from evenstep.report.simulation.memory import memory_of
from evenstep.report.simulation.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
MODEL, GPU = "llama-3.2-1b", "h200"
FITTED = ("qwen3-0.6b", "qwen2.5-1.5b", "llama-3.2-3b", "qwen3-4b", "llama-3-8b with 8 layers")
MEMORY, TIME = 0.15, 0.20
"""Targets: how far predictions may be off."""
CASES = (
    *(Case(MODEL, budget) for budget in (4096, 8192, 16384)),
    *(Case(MODEL, budget, True) for budget in (8192, 16384, 32768)),
)
TINY: dict[str, Any] = PRESETS[MODEL] | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
}


def predicted(case: Case, found: Measured, shape: dict[str, Any]) -> tuple[float, float]:
    """(bytes, seconds of a step) as `evenstep tune` predicts them."""
    size = ModelSize.of(ModelConfig(shape, case.model))
    cluster = cluster_of(size, Gpu.named(GPU), Topology(), checkpointing=case.checkpointing)
    slots = max(int(plan.slots.max()) for plan in found.plans)
    memory = memory_of(
        size, Topology(), slots=slots, micro_batches=case.waves, checkpointing=case.checkpointing
    )
    times = [float(simulate(plan, cluster).time.mean()) for plan in found.plans]
    return memory.peak, float(np.mean(times))


def compare(device: str, quick: bool) -> Section:
    """Every budget, with and without recomputed activations."""
    shape = TINY if quick else PRESETS[MODEL]
    cases = (Case(MODEL, 256), Case(MODEL, 256, True)) if quick else CASES
    columns = {
        "budget": ",", "recompute": "", "peak GB": ".2f", "predicted GB": ".2f",
        "memory off": "+.1%", "step ms": ".0f", "predicted ms": ".0f", "time off": "+.1%",
    }  # fmt: skip
    table = Table("Measured and predicted", columns)
    worst = {"memory": 0.0, "time": 0.0}
    with one_rank(device) as ranks:
        for case in cases:
            found = measure(case, ranks, shape)
            memory, step = predicted(case, found, shape)
            peak = max(found.peak, found.update_peak, 1)
            off = memory / peak - 1, step / found.step - 1
            recompute = "yes" if case.checkpointing else "no"
            gb, ms = (peak / 1e9, memory / 1e9), (1e3 * found.step, 1e3 * step)
            table.add(case.budget, recompute, *gb, off[0], *ms, off[1])
            worst["memory"] = max(worst["memory"], abs(off[0]))
            worst["time"] = max(worst["time"], abs(off[1]))
    count = found.parameters / 1e9
    return Section(
        f"{MODEL}, {count:.2f}B parameters, bfloat16, FSDP2 with one rank, AdamW",
        [
            "Steps of two packed micro-batches of log-normal samples, forward, backward, clipping "
            "and update; median of three steps. Peak: torch.cuda.max_memory_allocated. The "
            f"constants of the time were fitted to {', '.join(FITTED)}, not to this model.",
        ],
        tables=[table],
        targets=[
            _target("memory", worst["memory"], MEMORY),
            _target("step time", worst["time"], TIME),
        ],
    )


def _target(what: str, off: float, most: float) -> Target:
    return Target(f"{what} within {most:.0%}", f"{off:.1%}", off <= most)


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--quick", action="store_true", help="run a small version; write nothing")
    parser.add_argument("--out", type=Path, help="folder for results (default: benchmarks/results)")
    options = parser.parse_args(arguments)
    if options.out is None and not options.quick:
        options.out = ROOT / "benchmarks" / "results"
    section = compare(options.device, options.quick)
    tables.show(section, Console(width=None if sys.stdout.isatty() else 140))
    if options.out:
        _write(options.out, options.device, section)
    return 0


def _write(folder: Path, device: str, section: Section) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "Python": platform.python_version(),
    }
    data = {"machine": about, "sections": {"tune": section.to_dict()}}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    (folder / "gpu_tune.json").write_text(text + "\n", encoding="utf-8")
    texts = [
        "# Tune on a GPU",
        "Written by `python benchmarks/gpu_tune.py`.",
        tables.markdown_table(Table("Machine", {"": "", " ": ""}, [*about.items()])),
        tables.markdown(section),
    ]
    (folder / "gpu_tune.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
