"""TRL itself with our functions in place of its own: SFTTrainer and the collator of async GRPO."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import Cost
from evenstep.compat.trl import FixedCountBatcher, TokenBudgetBatcher, pack_dataset
from tests.compat import trl_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # TRL and transformers warn about each other
]


def test_the_trainer_packs_with_our_function_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer
    from trl.trainer import sft_trainer

    calls = []

    def packing(*args: Any, **kwargs: Any) -> Any:
        calls.append((args[1:], kwargs))
        return pack_dataset(*args, **kwargs)

    monkeypatch.setattr(sft_trainer, "pack_dataset", packing)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, 64, n).tolist() for n in rng.integers(1, 40, 60)]
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        packing=True,
        max_length=32,
        max_steps=2,
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
    )
    packed = trainer.train_dataset[:]
    assert calls
    assert calls[0][0][:2] == (32, "bfd")
    assert max(map(sum, packed["seq_lengths"])) <= 32
    kept = sorted(token for row in rows for token in row[:32])
    assert sorted(token for row in packed["input_ids"] for token in row) == kept
    assert np.isfinite(trainer.train().training_loss)


def test_the_collator_of_async_grpo_takes_our_rows() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

    rng = np.random.default_rng(1)

    def sample(number: int, length: int) -> dict[str, Any]:
        return {
            "input_ids": rng.integers(2, 64, length),
            "completion_mask": (np.arange(length) > 0).astype(np.int64),
            "old_log_probs": -rng.random(length),
            "advantage": float(number % 3 - 1),
            "group_id": number // 4,
            "metrics": {"reward": 1.0},
        }

    samples = [sample(number, int(n)) for number, n in enumerate(rng.integers(2, 200, 80))]
    metrics: dict[str, list[Any]] = defaultdict(list)
    collate = DataCollatorForRollout(0, 4, metrics=metrics, token_budget=512)
    trained, held = 0, []
    for rows in TokenBudgetBatcher(samples, 4, 512, metrics):
        batch = collate.torch_call([rows])
        assert batch["input_ids"].shape[0] == 4
        tokens = batch["attention_mask"].sum(dim=1)
        assert int(tokens.min()) > 0
        assert int(tokens.max()) <= 512
        trained += int(batch["global_n_tokens"][0])
        assert torch.isfinite(batch["old_log_probs"]).all()
        held += [each for row in rows for each in row.samples]
    assert len(samples) - 4 < len(held) <= len(samples)
    assert trained == sum(len(each["input_ids"]) - 1 for each in held)
    assert max(metrics["batch/row_imbalance"]) < 1.5


def assert_same_updates(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Losses and gradients of each step agree, per parameter."""
    logs = [[entry["loss"] for entry in records[0]["logs"]] for records in (one, other)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)
    for ours, theirs in zip(one[0]["gradients"], other[0]["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            apart = float((gradient - theirs[name]).abs().max())
            assert apart <= 1e-4 * float(theirs[name].abs().max()), name


def test_the_trainer_of_async_grpo_makes_the_same_updates_with_our_rows(tmp_path: Path) -> None:
    samples = trl_trainer.rollouts(0, groups=6, each=4, prompt=24, median=8)
    theirs, ours = (
        trl_trainer.run(2, tmp_path / batcher, samples, batcher, budget=0, per_rank=4, steps=3)
        for batcher in ("trl", "evenstep")
    )
    assert_same_updates(ours, theirs)
    uneven, even = trl_trainer.measured(theirs), trl_trainer.measured(ours)
    assert even[0] < uneven[0]  # the slowest row
    assert even[1] < 1.1 * uneven[1]  # tokens


def test_the_trainer_of_async_grpo_runs_the_rows_of_our_budget(tmp_path: Path) -> None:
    samples = trl_trainer.rollouts(1, groups=8, each=4, prompt=24, median=8)
    budget = 96
    ours, dealt = (
        trl_trainer.run(2, tmp_path / batcher, samples, batcher, budget, per_rank=1, steps=3)
        for batcher in ("evenstep", "dealt")
    )
    assert_same_updates(ours, dealt)
    rows = [int(lengths.sum()) for records in ours for _, lengths in records["rows"]]
    assert max(rows) <= budget
    assert trl_trainer.measured(ours)[1] < 0.9 * trl_trainer.measured(dealt)[1]


def answers(seed: int, groups: int = 8, each: int = 16, prompt: int = 2000) -> list[dict[str, Any]]:
    """Groups of answers (log-normal, median 500) to one prompt."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        question = rng.integers(0, 32_000, prompt)
        for _ in range(each):
            count = max(int(rng.lognormal(np.log(500), 0.8)), 1)
            ids = torch.from_numpy(np.concatenate((question, rng.integers(0, 32_000, count))))
            samples.append(
                {
                    "input_ids": ids,
                    "completion_mask": (torch.arange(len(ids)) >= prompt).long(),
                    "old_log_probs": torch.zeros(len(ids)),
                    "advantage": 0.0,
                    "group_id": group,
                }
            )
    return samples


def measured(rows: list[Any]) -> tuple[float, float]:
    """The slowest row of TRL over the mean one, by the cost of an 8B model; raw over unique tokens,
    both from what TRL would run."""
    cost, times = Cost.named("llama-3-8b"), []
    for row in rows:
        packed = row.pack()
        ends = packed["tree_cu_seqlens_q"].numpy()
        start = packed["position_ids"].numpy()[ends[:-1]]
        cost_of_segments = cost.of_lengths(start + np.diff(ends)) - cost.of_lengths(start)
        times.append(float(cost_of_segments.sum()))
    raw = sum(len(sample["input_ids"]) for row in rows for sample in row.samples)
    return max(times) / float(np.mean(times)), raw / sum(len(row.tokens) for row in rows)


def test_groups_keep_their_sharing_and_rows_become_even() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import FixedCountBatcher as Theirs

    figures = []
    for seed in range(8):
        samples = answers(seed)
        (theirs,), (ours,) = Theirs(samples, 8, 128), FixedCountBatcher(samples, 8, 128)
        figures.append((*measured(theirs), *measured(ours)))
    uneven, saved, even, kept = np.mean(figures, axis=0)
    print(f"lock-step {uneven:.3f} -> {even:.3f}, tokens saved {saved:.2f}x -> {kept:.2f}x")
    assert uneven > 1.25
    assert max(row[2] for row in figures) <= 1.13
    assert kept >= 0.93 * saved
    assert even * saved / kept <= 1.12  # repeated prompts count too


def test_rows_of_a_budget_hold_more_than_their_raw_tokens() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher as Theirs

    samples = answers(0, groups=24)
    ours = list(TokenBudgetBatcher(samples, 8, 16_384, defaultdict(list)))
    theirs = list(Theirs(samples, 8, 16_384, defaultdict(list)))
    assert len(ours) <= len(theirs) + 1  # TRL drops the last, unfinished one
    used = [len(row.tokens) for rows in ours for row in rows]
    assert max(used) <= 16_384
    # The last ones are dropped if they are fewer than the rows.
    assert len(samples) - sum(len(row.samples) for rows in ours for row in rows) < 8
    assert measured(ours[0])[0] < measured(theirs[0])[0]
