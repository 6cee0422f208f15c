"""The loss from hidden states on a GPU: time, memory and error of gradients.

`python benchmarks/gpu_head.py [--out FOLDER]` needs CUDA; `--quick` runs a small shape anywhere.

Every way computes the loss of the same (tokens, hidden) states in bfloat16 and the gradients of
states and weight. Errors are relative to gradients computed in float32 from the same inputs. Time
is the median of several runs, memory the peak above what was allocated before.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep import Packed, Recipe, make_plan
from evenstep.tensors import Batch, Collator, Extra, Head, cross_entropy, policy_gradient

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

    chunks = [size for size in (1024, 2048, 3072, 4096, 8192) if size <= tokens]
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
        del linear, hidden, batch, expected
    if not arguments.quick:
        file(rows, arguments.out)


def file(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write the figures as JSON and as a page."""
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_head.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "gpu_head.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
