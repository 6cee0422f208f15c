"""The trainer: what checkpoints cost, and beside TRL's SFTTrainer on the same data and model.

    python -m benchmarks.trainer                # both, on the CPU; writes results/trainer.md
    python -m benchmarks.trainer trl --repeats 1
    python -m benchmarks.trainer checkpoints --gpu --config CONFIG.JSON

TRL runs with its padding, and with its packing. On a CPU, its packed rows have no attention within
samples (that needs flash attention), so its loss is another one there. Figures are CPU seconds of
both processes: the difference between a long and a short run, so that starting is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from evenstep import Packed, Padded, Recipe, Steps
from evenstep.config import (
    ModelSettings,
    OptimizerSettings,
    Settings,
    StreamSettings,
    TrainerSettings,
)
from evenstep.data import Corpus, write_token_file
from evenstep.demo.run import samples
from evenstep.trainer import train

RESULTS = Path(__file__).parent / "results"
SHORT, LONG, EACH, LONGEST, BUDGET = 2, 12, 32, 1024, 4096
LR, RANKS = 1e-3, 2


# Beside TRL ---------------------------------------------------------------------------------------


def write_inputs(folder: Path) -> None:
    """Functions of the Python standard library as bytes, and the weights that all begin with."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = [each["input_ids"][:LONGEST].tolist() for each in samples(LONG * EACH)]
    text = "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")


def run_ours(folder: Path, out: Path, steps: int, kind: str) -> None:
    """Train as the trainer does, in the order of the file."""
    layout: Any = Packed(max_tokens=BUDGET) if kind == "packed" else Padded(max_tokens=BUDGET)
    settings = Settings(
        recipe=Recipe(layout=layout, steps=Steps(samples=EACH)),
        data=Corpus(paths=str(folder / "rows.jsonl")),
        model=ModelSettings(path=str(folder / "model")),
        stream=StreamSettings(max_num_steps=steps, shuffle=False),
        optimizer=OptimizerSettings(
            lr=LR, schedule="constant", betas=(0.9, 0.999), weight_decay=0.0
        ),
        trainer=TrainerSettings(out=str(out), save_every=steps),
    )
    train(settings)
    if os.environ["RANK"] == "0":
        lines = (out / "log.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        (out / "losses.json").write_text(json.dumps(losses))


def run_trl(folder: Path, out: Path, steps: int, kind: str) -> None:
    """Train as SFTTrainer does: 4 samples per device and micro-batch, or packed rows."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    packed = kind == "packed"
    options = SFTConfig(
        output_dir=str(out), max_steps=steps, learning_rate=LR, lr_scheduler_type="constant",
        per_device_train_batch_size=1 if packed else 4,
        gradient_accumulation_steps=4, train_sampling_strategy="sequential",
        max_length=BUDGET if packed else LONGEST, packing=packed, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, max_grad_norm=1.0, disable_tqdm=True, eos_token=None,
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=options,
        train_dataset=Dataset.from_list(rows),
        processing_class=_byte_tokenizer(PreTrainedTokenizerFast),
    )
    trainer.train()
    if os.environ["RANK"] == "0":
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        (out / "losses.json").write_text(json.dumps(losses))
        (out / "rows.json").write_text(json.dumps(len(trainer.train_dataset)))


def _byte_tokenizer(kind: Any) -> Any:
    from tokenizers import Tokenizer, models

    words = {f"<{n}>": n for n in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    return kind(tokenizer_object=tokenizer, eos_token="<0>", pad_token="<0>")


def measured(folder: Path, system: str, kind: str, steps: int) -> tuple[float, list[float], int]:
    """(CPU seconds of all processes, losses, rows that were trained on)."""
    out = Path(tempfile.mkdtemp(dir=folder))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    worker = ["-m", "benchmarks.trainer", "worker", system, kind, str(folder), str(out), str(steps)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *launcher, *worker], check=True, env=_environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    losses = json.loads((out / "losses.json").read_text())
    rows = json.loads((out / "rows.json").read_text()) if (out / "rows.json").exists() else 0
    shutil.rmtree(out)
    return seconds, losses, rows


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def beside_trl(repeats: int) -> dict[str, Any]:
    """CPU seconds per step and losses of both, taking turns."""
    folder = Path(tempfile.mkdtemp())
    write_inputs(folder)
    systems = [
        ("evenstep", "packed"),
        ("evenstep", "dynamic"),
        ("trl", "padded"),
        ("trl", "packed"),
    ]
    times: dict[str, list[float]] = {" ".join(each): [] for each in systems}
    losses: dict[str, list[float]] = {}
    rows = 0
    for _ in range(repeats):
        for system, kind in systems:
            short, _, _ = measured(folder, system, kind, SHORT)
            long, curve, count = measured(folder, system, kind, LONG)
            name = f"{system} {kind}"
            times[name].append((long - short) / (LONG - SHORT))
            losses[name] = curve
            rows = max(rows, count if kind == "packed" else 0)
    tokens = [
        len(json.loads(line)["input_ids"])
        for line in (folder / "rows.jsonl").read_text().splitlines()
    ]
    shutil.rmtree(folder)
    step_tokens = sum(tokens) / LONG
    packed_tokens = sum(tokens) / rows * RANKS * 4 if rows else step_tokens
    return {
        "repeats": repeats,
        "cpu_seconds_per_step": {name: statistics.median(each) for name, each in times.items()},
        "tokens_per_step": {
            name: packed_tokens if name == "trl packed" else step_tokens for name in times
        },
        "losses": losses,
    }


# What checkpoints cost ----------------------------------------------------------------------------


def saving(repeats: int, gpu: bool, config: str | None) -> dict[str, Any]:
    """The share of a run with a checkpoint every 20 steps that they take."""
    import torch

    folder = Path(tempfile.mkdtemp())
    steps, length, each = (41, 4096, 16) if gpu else (41, 512, 8)
    random = np.random.default_rng(0)
    rows = [random.integers(0, 256, length).astype(np.uint16) for _ in range(256)]
    write_token_file(folder / "rows.tokens", rows, dtype=np.uint16)
    sizes: dict[str, Any] = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384}
    model = ModelSettings(path=config) if config else ModelSettings(**sizes)

    def run(every: int) -> tuple[float, float, float]:
        """(CPU seconds, seconds of the steps after the first, seconds that the loop waited)."""
        out = folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        settings = Settings(
            recipe=Recipe(layout=Packed(max_tokens=4 * length), steps=Steps(samples=each)),
            data=Corpus(paths=str(folder / "rows.tokens")),
            model=model,
            stream=StreamSettings(max_num_steps=steps),
            trainer=TrainerSettings(
                out=str(out),
                save_every=every,
                keep=1,
                precision="bfloat16" if gpu else "float32",
                checkpointing=False,
            ),
        )
        began, wall = time.process_time(), time.perf_counter()
        outcome = train(settings)
        return time.process_time() - began, time.perf_counter() - wall, outcome.saving

    run(10**6)  # compiles
    pairs = [(run(10**6), run(20)) for _ in range(repeats)]
    shutil.rmtree(folder)
    return {
        "steps": steps,
        "threads": torch.get_num_threads(),
        "cpu_seconds": [[plain[0], saved[0]] for plain, saved in pairs],
        "wall_seconds": [[plain[1], saved[1]] for plain, saved in pairs],
        # Both write one at the end and wait for it.
        "waited_seconds": [[plain[2], saved[2]] for plain, saved in pairs],
    }


# Results ------------------------------------------------------------------------------------------


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Trainer benchmark", "", "Written by `python -m benchmarks.trainer`.", ""]
    lines += ["|  |   |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in machine.facts().items()]
    if "trl" in results:
        lines += ["", *_trl_lines(results["trl"])]
    if "checkpoints" in results:
        lines += ["", *_checkpoint_lines(results["checkpoints"])]
    return "\n".join(lines) + "\n"


def _trl_lines(trl: dict[str, Any]) -> list[str]:
    lines = [
        "## Beside TRL's SFTTrainer",
        "",
        f"{LONG * EACH:,} functions of the Python standard library as bytes (at most {LONGEST:,}), "
        f"a Llama of 0.5 million weights, {RANKS} CPU processes, float32, {EACH} samples per step "
        f"in the same order, AdamW with a constant learning rate of {LR:g}. TRL pads 4 samples "
        f"per device and micro-batch, or packs rows of {BUDGET:,} with 4 per device and step, "
        f"which makes steps of other samples, attended across samples. CPU seconds per step are "
        f"those of both processes, without starting, of {LONG - SHORT} steps; medians of "
        f"{trl['repeats']}, systems take turns.",
        "",
        "|  | tokens per step | CPU s per step | tokens per CPU s | first loss | last loss | "
        "largest difference in the loss of a step from evenstep packed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    base = np.array(trl["losses"]["evenstep packed"])
    for name, seconds in trl["cpu_seconds_per_step"].items():
        curve = np.array(trl["losses"][name])
        same = name != "trl packed"
        gap = f"{np.abs(curve - base).max():.1e}" if same else "other samples"
        tokens = trl["tokens_per_step"][name]
        lines.append(
            f"| {name} | {tokens:,.0f} | {seconds:.2f} | {tokens / seconds:,.0f} | {curve[0]:.4f} "
            f"| {curve[-1]:.4f} | {gap} |"
        )
    return lines


def _checkpoint_lines(saved: dict[str, Any]) -> list[str]:
    costs = sorted(every / plain - 1 for plain, every in saved["cpu_seconds"])
    lines = [
        "## Checkpoints",
        "",
        f"Runs of {saved['steps']} steps with a checkpoint every 20 steps and at the end, and with "
        f"one at the end only, taking turns: {len(costs)} pairs with {saved['threads']} thread of "
        f"torch, medians. The cost is what the former takes more: {costs[0]:+.2%} to "
        f"{costs[-1]:+.2%} of the CPU seconds in single pairs. Wall time depends on what else runs "
        f"on the machine.",
        "",
        "|  | end only | every 20 steps | cost |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in ("cpu_seconds", "wall_seconds", "waited_seconds"):
        plain, every = (statistics.median(column) for column in zip(*saved[name], strict=True))
        whole = statistics.median(pair[0] for pair in saved["wall_seconds"])
        ratio = (every - plain) / (whole if name == "waited_seconds" else plain)
        text = name.replace("_", " ")
        lines.append(f"| {text} | {plain:.2f} | {every:.2f} | {ratio:.2%} |")
    return lines


def main() -> None:
    """Run one part or both, and file the results on a CPU; a part keeps those of the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=["trl", "checkpoints", "worker"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--config")
    options = parser.parse_args()
    if options.part == "worker":
        system, kind, folder, out, steps = options.rest
        run = run_ours if system == "evenstep" else run_trl
        run(Path(folder), Path(out), int(steps), kind)
        return
    stored = RESULTS / "trainer.json"
    results: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    if options.part in (None, "trl"):
        results["trl"] = beside_trl(options.repeats)
    if options.part in (None, "checkpoints"):
        results["checkpoints"] = saving(options.repeats, options.gpu, options.config)
    print(page(results))
    if not options.gpu:
        stored.write_text(json.dumps(results, indent=1) + "\n")
        stored.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
