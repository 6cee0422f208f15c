"""The loss from hidden states on a GPU: time, memory and error of gradients, and whole steps.

`python benchmarks/gpu_head.py [--out FOLDER]` needs CUDA; `--quick` runs a small shape anywhere.

Every way computes the loss of the same (tokens, hidden) states in bfloat16 and the gradients of
states and weight. Errors are relative to gradients computed in float32 from the same inputs. Time
is the median of several runs, memory the peak above what was allocated before.

Whole steps are those of a Hugging Face Llama through `Runner`, with layers compiled: with its
default loss, which computes no logits, and with a forward that returns them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import HALF, LLAMA_1B, TINY, build, draw_lengths, make_batches
from evenstep import Cost, Packed, Recipe, make_plan
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import hf_kwargs
from evenstep.tensors import Batch, Collator, Extra, Head, cross_entropy, policy_gradient
from evenstep.train import Runner, compile_layers

GIB = 2**30
Loss = Callable[[Tensor, Batch, nn.Linear], Tensor]


def batch_of(tokens: int, vocabulary: int) -> Batch:
    """One row of sequences of 512 tokens with what a policy gradient needs."""
    lengths = [512] * (tokens // 512)
    plan = make_plan(lengths, Recipe(layout=Packed(max_tokens=tokens)))
    extras = {"old_log_probs": Extra(aligned="token"), "advantages": Extra(aligned="token")}
    torch.manual_seed(0)
    samples = [
        {
            "input_ids": torch.randint(0, vocabulary, (length,)),
            "old_log_probs": torch.full((length,), -12.0),
            "advantages": torch.randn(length),
        }
        for length in lengths
    ]
    return Collator(extras=extras)(plan[0, 0][0], samples)


def ways(tokens: int) -> dict[str, Loss]:
    """The ways to compute the loss, by name."""

    def plain(hidden: Tensor, batch: Batch, linear: nn.Linear) -> Tensor:
        logits = linear(hidden)[0]
        return functional.cross_entropy(logits, batch.labels[0], reduction="sum")

    def ours(chunk: int | None, make: Callable[..., Any], **options: Any) -> Loss:
        def loss(hidden: Tensor, batch: Batch, linear: nn.Linear) -> Tensor:
            total: Tensor = make(head=Head(linear, chunk=chunk), **options)(hidden, batch).loss
            return total

        return loss

    chunks = [size for size in (2048, 4096) if size <= tokens]
    every: dict[str, Loss] = {"plain": plain, "plain, compiled": torch.compile(plain)}
    every |= {"Head": ours(None, cross_entropy), "Head, clipped ratio": ours(None, policy_gradient)}
    every["Head, clipped ratio and entropy"] = ours(None, policy_gradient, entropy_weight=0.01)
    return every | {f"Head, chunk {chunk:,}": ours(chunk, cross_entropy) for chunk in chunks}


def reference(hidden: Tensor, batch: Batch, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """The gradients of the plain loss in float32."""
    states = hidden.detach()[0].float()
    weight = linear.weight.detach().float()
    of_states, of_weight = torch.empty_like(states), torch.zeros_like(weight)
    for first in range(0, len(states), 1024):
        part = slice(first, first + 1024)
        logits = states[part] @ weight.T
        labels = batch.labels[0, part]
        counts = labels >= 0
        change = logits.softmax(-1)
        change[torch.arange(len(change), device=change.device), labels.clamp(min=0)] -= 1.0
        change *= counts[:, None]
        of_states[part] = change @ weight
        of_weight += change.T @ states[part]
    return of_states, of_weight


def measure(loss: Loss, hidden: Tensor, batch: Batch, linear: nn.Linear, runs: int) -> Any:
    """(milliseconds, GiB at peak, gradients of states and weight)."""
    cuda = hidden.is_cuda

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    seconds = []
    peak = 0
    for run in range(runs + 2):
        hidden.grad = linear.weight.grad = None
        gc.collect()
        wait()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        begin = time.perf_counter()
        loss(hidden, batch, linear).backward()
        wait()
        if run >= 2:
            seconds.append(time.perf_counter() - begin)
            peak = max(peak, torch.cuda.max_memory_allocated() - before if cuda else 0)
    assert hidden.grad is not None
    assert linear.weight.grad is not None
    return 1e3 * statistics.median(seconds), peak / 2**30, hidden.grad[0], linear.weight.grad


def error(ours: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm."""
    return float((ours.float() - expected).norm() / expected.norm())


# Whole steps --------------------------------------------------------------------------------------


def logits_of(model: Any, batch: Batch) -> Tensor:
    """A forward that returns logits."""
    logits: Tensor = model(**hf_kwargs(batch, model)).logits
    return logits


FORWARDS: dict[str, Any] = {"default": None, "logits": logits_of}


def compiled_llama(vocabulary: int, device: str, quick: bool, **options: Any) -> Any:
    """A model of 1B parameters with this vocabulary, in bfloat16, whose layers are compiled."""
    shape = {**(TINY if quick else LLAMA_1B), "vocab_size": vocabulary, **options}
    model = use_attention(build(shape, device, HALF))
    if device == "cuda":
        compile_layers(model)
    return model


def run_steps(runner: Runner, batches: list[Batch], times: int) -> tuple[float, float]:
    """(seconds of the fastest of some steps, GiB at peak)."""
    cuda = torch.cuda.is_available()
    seconds = []
    for _ in range(times):
        runner.model.zero_grad()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        runner.run(batches)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), torch.cuda.max_memory_allocated() / GIB if cuda else 0.0


def whole_steps(vocabulary: int, device: str, quick: bool) -> list[dict[str, Any]]:
    """Model TFLOP/s and memory of packed steps, with each forward."""
    lengths = draw_lengths(*((24, 40, 100) if quick else (256, 1182, 8192)))
    model = compiled_llama(vocabulary, device, quick, tie_word_embeddings=False)
    budget = 256 if quick else 32_768
    batches = make_batches(lengths, Recipe(layout=Packed(max_tokens=budget)), vocabulary)
    by_size = sorted(batches, key=lambda batch: batch.width)
    flops = float(Cost.of_config(model.config).of_lengths(torch.tensor(lengths).numpy()).sum())
    rows = []
    for name, forward in FORWARDS.items():
        runner = Runner(model=model, loss=cross_entropy(), forward=forward, device=device)
        for batch in (by_size[0], by_size[-1], by_size[0]):
            runner.run([batch])
        seconds, peak = run_steps(runner, batches, 3)
        row = {"vocabulary": vocabulary, "loss": name, "s": seconds}
        rows.append(row | {"TFLOP/s": flops / seconds / 1e12, "GiB": peak})
        print(f"{vocabulary:>8,} {name:8} {seconds:.3f} s {flops / seconds / 1e12:.1f} model "
              f"TFLOP/s {peak:.2f} GiB", flush=True)  # fmt: skip
    return rows


def budgets(vocabulary: int, device: str, quick: bool) -> list[dict[str, Any]]:
    """The largest budget with each forward, from a line through two peaks, and steps with them.

    8 bytes per weight are set aside for the states of AdamW.
    """
    model = compiled_llama(vocabulary, device, quick)
    weights = sum(each.numel() for each in model.parameters())
    memory = torch.cuda.get_device_properties(0).total_memory / GIB if device == "cuda" else 1.0
    room = 0.95 * memory - 8 * weights / GIB

    def peak_of(forward: Any, slots: int) -> float:
        lengths = [1024 if not quick else 16] * (slots // (1024 if not quick else 16))
        batches = make_batches(lengths, Recipe(layout=Packed(max_tokens=slots)), vocabulary)
        runner = Runner(model=model, loss=cross_entropy(), forward=forward, device=device)
        return run_steps(runner, batches, 1)[1]

    rows: list[dict[str, Any]] = []
    for name, (low, high) in {"logits": (8192, 16384), "default": (16384, 32768)}.items():
        low, high = (low // 64, high // 64) if quick else (low, high)
        peak_of(FORWARDS[name], low)
        peaks = peak_of(FORWARDS[name], low), peak_of(FORWARDS[name], high)
        per_slot = (peaks[1] - peaks[0]) / (high - low) or 1.0
        limit = int((room - peaks[1]) / per_slot + high) // 1024 * 1024
        rows.append({"loss": name, "slots": limit, "GiB at": [low, high], "GiB": peaks})
        print(f"{vocabulary:>8,} {name:8} {limit:,} slots fit; {peaks[0]:.1f} GiB at {low:,}, "
              f"{peaks[1]:.1f} at {high:,}", flush=True)  # fmt: skip
    if device == "cuda":
        torch.cuda.empty_cache()
        for name, slots in (("logits", rows[0]["slots"]), ("default", 3 * rows[0]["slots"])):
            peak = peak_of(FORWARDS[name], slots)
            rows.append({"loss": name, "slots": slots, "ran": True, "GiB": [peak]})
            print(f"{vocabulary:>8,} {name:8} ran {slots:,} slots: {peak:.1f} GiB", flush=True)
    return rows


def check_synchronisations(hidden: Tensor, batch: Batch, linear: nn.Linear) -> None:
    """Print whether the loss waits for the device."""
    loss = cross_entropy(head=Head(linear))
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(hidden, batch).loss.backward()
        print("no synchronisation in the loss", flush=True)
    except RuntimeError as failure:
        print(f"the loss synchronises: {failure}", flush=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attempt(measured: dict[str, Any], name: str, function: Callable[[], Any]) -> None:
    """Keep what a part measures; print why if it fails."""
    try:
        measured[name] = function()
    except Exception as failure:
        traceback.print_exc()
        print(f"{name}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Measure all ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, width, vocabularies = 32_768, 2_048, [152_064, 32_000]
    if arguments.quick:
        tokens, width, vocabularies = 2_048, 64, [1_000]
    rows: list[dict[str, Any]] = []
    for vocabulary in vocabularies:
        torch.manual_seed(0)
        linear = nn.Linear(width, vocabulary, bias=False, device=device, dtype=torch.bfloat16)
        hidden = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16)
        hidden.requires_grad_()
        batch = batch_of(tokens, vocabulary).to(device)
        expected = reference(hidden, batch, linear)
        base = 0.0
        for name, loss in ways(tokens).items():
            try:
                ms, peak, *gradients = measure(loss, hidden, batch, linear, 5)
            except Exception as failure:
                print(f"{name}: {type(failure).__name__}: {failure}", flush=True)
                continue
            base = base or ms
            errors = [error(*pair) for pair in zip(gradients, expected, strict=True)]
            plain_loss = "ratio" not in name
            row = {"vocabulary": vocabulary, "way": name, "ms": ms, "ratio": ms / base}
            row |= {"GiB": peak, "errors": errors if plain_loss else None}
            rows.append(row)
            shown = "errors {:.1e} {:.1e}".format(*errors) if plain_loss else ""
            print(
                f"{vocabulary:>8,} {name:44} {ms:8.1f} ms {ms / base:6.3f} {peak:6.2f} GiB {shown}",
                flush=True,
            )
        if device == "cuda":
            check_synchronisations(hidden, batch, linear)
        del linear, hidden, batch, expected
    measured: dict[str, Any] = {"losses": rows}
    quick = arguments.quick
    for vocabulary in [101] if quick else [32_000, 152_064]:
        name = f"steps, {vocabulary:,}"
        attempt(measured, name, partial(whole_steps, vocabulary, device, quick))
        if not quick:
            file(measured, arguments.out)  # in case that a later part does not end
    attempt(measured, "budgets", lambda: budgets(101 if quick else 256_000, device, quick))
    if not quick:
        file(measured, arguments.out)


def file(measured: dict[str, Any], folder: Path) -> None:
    """Write the figures as JSON and as a page."""
    rows = measured["losses"]
    lines = [
        "# Loss from hidden states on a GPU",
        "",
        "Written by `python benchmarks/gpu_head.py` on an NVIDIA H200, torch 2.11, bfloat16: "
        "32,768 tokens, hidden size 2,048. Loss and gradients of states and weight; the gradient "
        "of the weight is summed in float32 by `Head`. Plain: logits and "
        "`torch.nn.functional.cross_entropy`. Errors are relative to gradients in float32 from the "
        "same inputs.",
        "",
        "| vocabulary | way | ms | of plain | GiB | error of states | error of weight |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        errors = row["errors"] or [None, None]
        shown = " | ".join("" if each is None else f"{each:.1e}" for each in errors)
        lines.append(
            f"| {row['vocabulary']:,} | {row['way']} | {row['ms']:.1f} | {row['ratio']:.3f} "
            f"| {row['GiB']:.2f} | {shown} |"
        )
    steps = [row for name, each in measured.items() if name.startswith("steps") for row in each]
    lines += [
        "",
        "Steps of a Hugging Face Llama of 1B parameters in bfloat16 through `Runner`, layers "
        "compiled: 256 log-normal samples, packed to 32,768 slots. `default` computes no logits.",
        "",
        "| vocabulary | loss | s | model TFLOP/s | GiB |",
        "| ---: | --- | ---: | ---: | ---: |",
        *(
            f"| {row['vocabulary']:,} | {row['loss']} | {row['s']:.3f} | {row['TFLOP/s']:.1f} "
            f"| {row['GiB']:.1f} |"
            for row in steps
        ),
    ]
    for row in measured.get("budgets", ()):
        how = "ran with" if row.get("ran") else "fits, by a line through two peaks:"
        peaks = ", ".join(f"{each:.1f}" for each in row["GiB"])
        lines += [
            "",
            f"Vocabulary 256,000, {row['loss']}: {how} {row['slots']:,} slots ({peaks} GiB).",
        ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_head.json").write_text(json.dumps(measured, indent=1) + "\n")
    (folder / "gpu_head.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
