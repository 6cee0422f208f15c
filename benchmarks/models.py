"""What the benchmarks of Hugging Face models share: a model, samples, a loss without logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from evenstep import Recipe, make_plan
from evenstep.integrations.huggingface import hf_kwargs
from evenstep.tensors.batch import Batch
from evenstep.tensors.collate import Collator

HALF = torch.bfloat16
MOST = {"speed": 220.0, "kernels": 310.0}
"""Seconds since the beginning after which a section starts nothing more."""

LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
SMALL = LLAMA_1B | {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024}
SMALL |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
TINY = SMALL | {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}


@dataclass(slots=True)
class Setup:
    """The device, the size of the run and the seconds that it has taken."""

    device: str
    quick: bool
    begin: float = field(default_factory=time.perf_counter)

    def late(self, section: str) -> bool:
        return time.perf_counter() - self.begin > MOST[section]

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Clear compiled kernels and cached memory."""
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak(self) -> float:
        """GB allocated at most since the last `free`."""
        return torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else 0.0


# Loss -----------------------------------------------------------------------------------------


class LinearCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """The summed cross entropy of (n, hidden) states without keeping (n, vocabulary) logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, size: int) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for begin in range(0, len(hidden), size):
            part, wanted = hidden[begin : begin + size], labels[begin : begin + size]
            counts = wanted != -100
            logits = (part @ weight.T).float()
            norm = logits.logsumexp(1, keepdim=True)
            index = wanted.clamp(min=0)[:, None]
            total += ((norm - logits.gather(1, index))[:, 0] * counts).sum()
            logits.sub_(norm).exp_()  # probabilities, and then their gradient
            logits.scatter_add_(1, index, torch.full_like(norm, -1.0))
            logits.mul_(counts[:, None])
            slope = logits.to(hidden.dtype)
            d_hidden[begin : begin + size] = slope @ weight
            d_weight.addmm_(slope.T, part)
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), d_weight * grad.to(d_weight.dtype), None, None


def loss_of(model: Any, size: int = 4096) -> Callable[[Tensor, Batch], Tensor]:
    """A loss for `Runner` that takes the last hidden states."""

    def loss(hidden: Tensor, batch: Batch) -> Tensor:
        weight = model.get_output_embeddings().weight
        found: Tensor = LinearCrossEntropy.apply(
            hidden.flatten(0, 1), weight, batch.labels.flatten(), size
        )
        return found

    return loss


def states(model: Any, batch: Batch) -> Tensor:
    """The last hidden states of a batch."""
    hidden: Tensor = model.base_model(**hf_kwargs(batch)).last_hidden_state
    return hidden


# Models and samples ---------------------------------------------------------------------------


def build(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """A Llama with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        config = transformers.LlamaConfig(**shape)
        model = transformers.LlamaForCausalLM._from_config(
            config, attn_implementation="sdpa", dtype=dtype
        )
    return model.to(device, dtype).train()


def draw_lengths(count: int, mean: int, longest: int) -> list[int]:
    """Log-normal lengths of this mean, after clipping."""
    draws = np.exp(np.random.default_rng(0).normal(0, 1, count))
    low, high = 0.0, float(longest)
    for _ in range(60):
        scale = (low + high) / 2
        lengths = (draws * scale).astype(int).clip(2, longest)
        low, high = (scale, high) if lengths.mean() < mean else (low, scale)
    return [int(n) for n in lengths]


def make_batches(lengths: Sequence[int], recipe: Recipe, vocab: int) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    samples = [{"input_ids": torch.randint(0, vocab, (n,), generator=random)} for n in lengths]
    return [Collator()(micro, samples) for micro in make_plan(lengths, recipe)[0, 0]]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
