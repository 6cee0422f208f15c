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
            queries, count = query.shape[1], key.shape[1]
            seen = torch.ones(queries, count, dtype=torch.bool).tril(count - queries)
            mixed = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            out.append(mixed.transpose(0, 1))
        return torch.cat(out)


def save_model(folder: Path) -> None:
    """A small model and its tokenizer, as files that TRL loads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=8192,
        eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1"
    ).save_pretrained(folder)


def rollouts(
    seed: int, groups: int, each: int, prompt: int, median: float
) -> list[dict[str, Any]]:
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
    rank: int, size: int, port: int, folder: str, samples: list[dict[str, Any]], ours: bool,
    budget: int, per_rank: int, steps: int,
) -> dict[str, Any]:  # fmt: skip
    """Run the trainer; what each step saw, and the weights after it."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo import async_grpo_trainer as trl_module
    from trl.experimental.async_grpo import packing

    packing._flash_attn = lambda: Flash
    trl_module.get_peak_flops_per_device = lambda *_: None
    if ours:
        trl_module.TokenBudgetBatcher = TokenBudgetBatcher
        trl_module.FixedCountBatcher = FixedCountBatcher

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
    names = ("loss", "batch/packing_ratio", "batch/row_imbalance", "batch/forwarded_tokens_per_step")
    records["logs"] = [
        {name: entry[name] for name in names if name in entry}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return records


def run(
    size: int, folder: Path, samples: list[dict[str, Any]], ours: bool, budget: int, per_rank: int,
    steps: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """The records of each rank."""
    save_model(folder / "model")
    how = (free_port(), str(folder / "model"), samples, ours, budget, per_rank, steps)
    return results_of(size, train, folder / f"ranks-{ours}", *how)


def measured(records: list[dict[str, Any]], cost: Any) -> tuple[float, int]:
    """The slowest row over the mean one, averaged over micro-batches, and the tokens of all."""
    uneven, tokens = [], 0
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
    from evenstep import Cost

    samples = [
        {**each, "group_id": each["group_id"] + 1000 * seed}
        for seed in range(seeds)
        for each in rollouts(seed, groups=8, each=16, prompt=2000, median=500)
    ]
    raw = sum(len(sample["input_ids"]) for sample in samples)
    for ours in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            records = run(ranks, Path(folder), samples, ours, 0, 128 // ranks, seeds)
            uneven, tokens = measured(records, Cost.named("llama-3-8b"))
            print(f"{'evenstep' if ours else 'TRL':8}  lock-step {uneven:.3f}  tokens {tokens:,} of "
                  f"{raw:,}, {raw / tokens:.2f}x fewer", flush=True)  # fmt: skip
            for entry in records[0]["logs"]:
                print("   ", {name: round(value, 5) for name, value in entry.items()}, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
