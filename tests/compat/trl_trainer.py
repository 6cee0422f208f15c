"""TRL's async GRPO trainer on processes of this machine, with fixed rollouts instead of a server.

    python -m tests.compat.trl_trainer   8 groups of 16 answers on 8 processes, both batchers

What cannot run here is replaced: the rollout worker, by one that puts fixed rollouts into the
trainer's queue; the flash attention that TRL downloads, by a function of the same arguments that
computes one segment at a time; and the name of the GPU, which only a metric needs.
"""

from __future__ import annotations

import os
import queue
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evenstep import Cost
from evenstep.compat.trl import FixedCountBatcher, TokenBudgetBatcher
from tests.train.processes import free_port, results_of

VOCABULARY = 64


class Rollouts:
    """TRL's `RolloutWorkerProtocol`: all rollouts are there when training begins."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples * 2:  # the loader reads a micro-batch ahead
            fields = {**sample, "prompt": [], "completion": [], "model_version": 0, "metrics": {}}
            self.rollout_buffer.put(RolloutSample(**fields))

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def update_model_version(self, model_version: int) -> None:
        pass

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("all rollouts were used")


class NoTransfer:
    """TRL's `WeightTransferProtocol` without a server."""

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None:
        pass

    def destroy(self) -> None:
        pass


class Flash:
    """The function of flash-attn 3 that TRL calls, one segment at a time."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, longest: int,
        longest_k: int, *, softmax_scale: float, causal: bool, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        assert causal
        assert window_size == (-1, -1)
        out = []
        for slots, keys in zip(pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True):
            query, key, value = (
                part[slice(*bounds)].transpose(0, 1)
                for part, bounds in ((q, slots), (k, keys), (v, keys))
            )
            first = key.shape[1] - query.shape[1]
            for begin in range(0, query.shape[1], 1024):
                part = query[:, begin : begin + 1024]
                count = first + begin + part.shape[1]
                seen = torch.ones(part.shape[1], count, dtype=torch.bool).tril(first + begin)
                mixed = functional.scaled_dot_product_attention(
                    part[None], key[None, :, :count], value[None, :, :count], attn_mask=seen,
                    scale=softmax_scale,
                )  # fmt: skip
                out.append(mixed[0].transpose(0, 1))
        return torch.cat(out)


class Dealt(TokenBudgetBatcher):
    """The samples of each of our micro-batches, dealt to rows in turn."""

    def __iter__(self) -> Any:
        from trl.experimental.async_grpo.packing import TreeRow

        for rows in super().__iter__():
            dealt = [TreeRow() for _ in rows]
            samples = [sample for row in rows for sample in row.samples]
            for number, sample in enumerate(samples):
                dealt[number % len(dealt)].add(sample)
            yield dealt


BATCHERS: dict[str, dict[str, Any]] = {
    "trl": {},
    "evenstep": {"FixedCountBatcher": FixedCountBatcher, "TokenBudgetBatcher": TokenBudgetBatcher},
    "dealt": {"TokenBudgetBatcher": Dealt},
}


def save_model(folder: Path, layers: int) -> None:
    """A small model and its tokenizer, as files that TRL loads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=layers, num_key_value_heads=layers, head_dim=8,
        max_position_embeddings=32_768,
        eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(
        folder
    )


def rollouts(seed: int, groups: int, each: int, prompt: int, median: float) -> list[dict[str, Any]]:
    """Groups of answers of log-normal lengths to one prompt, in the order of groups."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        question = rng.integers(2, VOCABULARY, prompt)
        for _ in range(each):
            count = max(int(rng.lognormal(np.log(median), 0.8)), 1)
            ids = np.concatenate((question, rng.integers(2, VOCABULARY, count)))
            samples.append(
                {
                    "input_ids": ids,
                    "completion_mask": (np.arange(len(ids)) >= prompt).astype(np.int64),
                    "old_log_probs": rng.normal(-np.log(VOCABULARY), 0.1, len(ids)).astype("f4"),
                    "advantage": float(rng.normal()),
                    "group_id": group,
                }
            )
    return samples


def train(
    rank: int, size: int, port: int, folder: str, samples: list[dict[str, Any]], batcher: str,
    budget: int, per_rank: int, steps: int,
) -> dict[str, Any]:  # fmt: skip
    """Run the trainer with a batcher of `BATCHERS`: losses, gradients and segments of each step."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
    from trl.experimental.async_grpo import async_grpo_trainer as trl_module

    packing._flash_attn = lambda: Flash
    trl_module.get_peak_flops_per_device = lambda *_: None
    for name, kind in BATCHERS[batcher].items():
        setattr(trl_module, name, kind)
    records: dict[str, Any] = {"losses": [], "gradients": [], "rows": []}

    class Recording(AsyncGRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            at = inputs["attention_mask"][0].bool()
            ends = inputs["tree_cu_seqlens_q"][0]
            ends = ends[ends >= 0].numpy()
            start = inputs["position_ids"][0][at].numpy()[ends[:-1]]
            records["rows"].append((start, np.diff(ends)))
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            records["losses"].append(float(loss))
            return loss

        def _clip_grad_norm(self, model: Any) -> Any:
            records["gradients"].append(
                {name: each.grad.clone() for name, each in model.named_parameters()}
            )
            return super()._clip_grad_norm(model)

    trainer = Recording(
        model=folder,
        args=AsyncGRPOConfig(
            output_dir=f"{folder}/out", max_steps=steps, per_device_train_batch_size=per_rank,
            gradient_accumulation_steps=1, token_budget=budget, report_to=[], use_cpu=True,
            bf16=False, save_strategy="no", learning_rate=1e-2, gradient_checkpointing=False,
            max_staleness=1000, logging_steps=1, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w2"] * 8}),
        rollout_worker=Rollouts(samples) if rank == 0 else None,
        weight_transfer=NoTransfer() if rank == 0 else None,
    )  # fmt: skip
    trainer.train()
    records["logs"] = [entry for entry in trainer.state.log_history if "loss" in entry]
    return records


def run(
    size: int, folder: Path, samples: list[dict[str, Any]], batcher: str, budget: int,
    per_rank: int, steps: int, layers: int = 2,
) -> list[dict[str, Any]]:  # fmt: skip
    """The records of each rank. A budget of 0 means `per_rank` samples on each rank."""
    folder.mkdir(exist_ok=True)
    save_model(folder / "model", layers)
    how = (free_port(), str(folder / "model"), samples, batcher, budget, per_rank, steps)
    return results_of(size, train, folder / "ranks", *how)


def measured(records: list[dict[str, Any]]) -> tuple[float, int]:
    """The slowest row over the mean one by the time of an 8B model, averaged over micro-batches,
    and the tokens of all."""
    cost, uneven, tokens = Cost.named("llama-3-8b"), [], 0
    for rows in zip(*(each["rows"] for each in records), strict=True):
        times = [
            float((cost.of_lengths(start + count) - cost.of_lengths(start)).sum())
            for start, count in rows
        ]
        uneven.append(max(times) / float(np.mean(times)))
        tokens += sum(int(count.sum()) for _, count in rows)
    return float(np.mean(uneven)), tokens


def main(ranks: int = 8, seeds: int = 8) -> None:
    """One optimizer step per seed."""
    samples = [
        {**each, "group_id": each["group_id"] + 1000 * seed}
        for seed in range(seeds)
        for each in rollouts(seed, groups=8, each=16, prompt=2000, median=500)
    ]
    raw = sum(len(sample["input_ids"]) for sample in samples)
    for batcher in ("trl", "evenstep"):
        with tempfile.TemporaryDirectory() as folder:
            records = run(ranks, Path(folder), samples, batcher, 0, 128 // ranks, seeds, layers=1)
        uneven, tokens = measured(records)
        losses = [round(entry["loss"], 6) for entry in records[0]["logs"]]
        text = f"lock-step {uneven:.3f}, {tokens:,} of {raw:,} tokens, {raw / tokens:.2f}x fewer"
        print(f"{batcher}: {text}; losses {losses}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
