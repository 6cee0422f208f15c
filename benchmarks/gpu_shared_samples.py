"""Samples that ranks share, on one GPU.

    python -m benchmarks.gpu_shared_samples            # about two minutes on an H200
    python -m benchmarks.gpu_shared_samples --tiny     # sizes for a CPU

cost      what a wave that shares costs a rank that shares nothing: attention with and without the
          exchange, forward and backward
gradient  one long sequence in four parts, each on a rank of its own (threads that take turns), and
          whole: how far the gradients of parameters are from those of float32
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from evenstep import Packed, Recipe, Topology, make_plan
from evenstep.demo import Decoder, DecoderShape
from evenstep.tensors import Collator, attention, cross_entropy
from tests.internals import BatchExchange, errors_of_parameters
from tests.shared_plans import plan_of_cells

LONGEST = 16_384
"""Tokens of a sequence that is compared with float32."""


class Idle:
    """A rank of a wave in which it neither sends nor receives."""

    def all_to_all(self, values: Any, sent: list[int], received: list[int]) -> Any:
        return values.new_empty(sum(received), values.shape[1])


def cost(device: str, tokens: int, length: int, repeats: int) -> None:
    """The median of the ratio of time with and without the exchange."""
    lengths = [length] * (tokens // length)
    plan = make_plan(lengths, Recipe(layout=Packed(max_tokens=tokens)))
    samples = [{"input_ids": np.zeros(length, np.int64)} for length in lengths]
    plain = Collator()(plan[0, 0][0], samples).to(device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    number = torch.full_like(plain.sample_ids, -1)
    ranks = Idle()
    exchange = BatchExchange(
        slots=none, sent=(0, 0), received=(0, 0), number=number, sample_ids=(7,), lengths=(9,),
        digest=0,
    ).between(ranks)  # fmt: skip
    shared = replace(plain, exchange=exchange)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = (32, 8, 8) if device == "cuda" else (4, 2, 2)
    q, k, v = (
        torch.randn(1, tokens, n, 128, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in heads
    )

    def timed(batch: Any) -> float:
        if device != "cuda":
            attention(q, k, v, batch).sum().backward()
            return 1.0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):  # layers
            attention(q, k, v, batch).backward(gradient)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 4

    gradient = torch.randn(1, heads[0], tokens, 128, device=device, dtype=dtype)
    for batch in (plain, shared) * 3:
        timed(batch)
    pairs = [(timed(plain), timed(shared)) for _ in range(repeats)]
    ratio = statistics.median(after / before for before, after in pairs)
    before = statistics.median(before for before, _ in pairs)
    print(f"cost: {tokens} tokens in segments of {length}: {before:.3f} ms, x {ratio:.4f}")


def gradient_of_parts(device: str, length: int, vocab: int) -> None:
    """The gradients of one sequence, whole and in four parts, compared with float32."""
    shape = DecoderShape(vocab=vocab, hidden=512, layers=2, heads=8, kv_heads=4, ffn=1024)
    torch.manual_seed(0)
    model = Decoder(shape).to(device)
    tokens = np.random.default_rng(0).integers(0, vocab, length)
    samples = [{"input_ids": tokens}]
    whole = make_plan([length], Recipe(layout=Packed(max_tokens=length)))
    # Level work: the first part is the longest.
    ends = (length * np.array([0.45, 0.67, 0.85, 1.0])).astype(int).tolist()
    starts = [0, *ends[:-1]]
    four = make_plan([length], Recipe(layout=Packed(max_tokens=length), topology=Topology(dp=4)))
    rows = [[(0, a, b - a, -1 if a == 0 else -2)] for a, b in zip(starts, ends, strict=True)]
    parts = plan_of_cells(four, [[row] for row in rows])
    half = device == "cuda"

    def run(plan: Any, autocast: bool, backend: str | None = None) -> dict[str, Any]:
        """Forwards of all ranks, one after the other, then their backwards from the last one on."""
        mine, losses = copy.deepcopy(model), []
        sent: dict[Any, Any] = {}
        for block in mine.blocks:
            block.attention.backend = backend
        ranks = [Loopback(rank, sent) for rank in range(plan.num_ranks)]
        for rank, loopback in enumerate(ranks):
            batch = Collator()(plan[0, rank][0], samples).to(device).between(loopback)
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                losses.append(cross_entropy()(mine(batch), batch).loss / (length - 1))
        for loopback in ranks:
            loopback.phase, loopback.calls = "backward", 0
        for loss in reversed(losses):
            loss.backward()
        return {name: p.grad.double().cpu() for name, p in mine.named_parameters()}

    if length > LONGEST:  # the kernel of float32 would need the whole matrix of scores
        apart = errors_of_parameters(run(parts, half), run(whole, half))
        print(
            f"gradient: {length} tokens, parts and whole in bfloat16 differ by {max(apart.values()):.2e}"
        )
        return
    exact = run(whole, False, "causal")
    errors = errors_of_parameters(run(whole, half), exact)
    in_parts = errors_of_parameters(run(parts, half), exact)
    ratios = {name: in_parts[name] / max(errors[name], 1e-12) for name in errors}
    name = max(ratios, key=lambda name: ratios[name])
    sizes = [b - a for a, b in zip(starts, ends, strict=True)]
    print(
        f"gradient: {length} tokens in parts of {sizes}: largest error of a parameter "
        f"{max(in_parts.values()):.2e} (whole {max(errors.values()):.2e}); largest ratio "
        f"{ratios[name]:.2f} ({name})"
    )


class Loopback:
    """A rank that runs after those in front of it, and its backward before theirs."""

    def __init__(self, rank: int, sent: dict[Any, Any]) -> None:
        self.rank, self.sent, self.phase, self.calls = rank, sent, "forward", 0

    def all_to_all(self, values: Any, sent: list[int], received: list[int]) -> Any:
        layer, self.calls = (self.phase, self.calls), self.calls + 1
        for rank, part in enumerate(values.split(sent)):
            self.sent[*layer, self.rank, rank] = part.clone()
        parts = [self.sent[*layer, rank, self.rank] for rank, count in enumerate(received) if count]
        assert [len(part) for part in parts] == [count for count in received if count]
        return torch.cat([values.new_empty(0, values.shape[1]), *parts])


def main() -> None:
    """Run both parts; a failure of one does not end the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny or not torch.cuda.is_available()
    device = "cpu" if tiny else "cuda"
    cases = [(64, 32, 2)] if tiny else [(32768, 4096, 20), (32768, 1024, 20), (131072, 32768, 6)]
    for tokens, length, repeats in cases:
        try:
            cost(device, tokens, length, repeats)
        except Exception:
            traceback.print_exc(file=sys.stdout)
    for length in (64,) if tiny else (8192, 131072):
        try:
            gradient_of_parts(device, length, 64 if tiny else 512)
        except Exception:
            traceback.print_exc(file=sys.stdout)


if __name__ == "__main__":
    main()
