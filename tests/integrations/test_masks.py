"""Loss masks in trainers: read under every name, refused if nothing reads them or all are zero."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

from evenstep import Packed, PlannedStream, Recipe, Steps, make_plan
from evenstep.data import ChatEncoder, Corpus, InMemory, MeasuredMapped, TokenFileWriter
from evenstep.errors import ConfigError, InputError
from evenstep.integrations.accelerate import accelerate_loader
from evenstep.integrations.trainer import EvenstepMixin
from evenstep.tensors import Collator
from tests.integrations.loops import VOCAB, PlannedTrainer, arguments_of, parameters, tiny_model
from tests.internals import check_some_loss

# As most models have it: nothing says what the assistant generates.
ORDINARY = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' ; ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
CHATS = [
    [
        {"role": "user", "content": " ".join(["hi"] * (1 + n % 3))},
        {"role": "assistant", "content": " ".join(["hello", "you"] * (1 + n % 4))},
    ]
    for n in range(12)
]


def tokenizer_of(template: str = ORDINARY) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["?", "<eos>", "user", "assistant", ":", ";", "hi", "hello", "you"]
    raw = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, chat_template=template, pad_token="?", eos_token="<eos>"
    )


def without_marks() -> list[dict[str, Any]]:
    """What the tokenizer returns for an ordinary template: masks of zeros."""
    tokenizer = tokenizer_of()
    return [
        dict(
            tokenizer.apply_chat_template(
                chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        )
        for chat in CHATS
    ]


def trainer_of(folder: Path, samples: Any, kind: Any = PlannedTrainer, **changes: Any) -> Any:
    changes = {"num_train_epochs": 1, "optim": "sgd", **changes}
    recipe = changes.pop("recipe", Recipe(layout=Packed(max_tokens=64)))
    arguments = arguments_of(TrainingArguments, folder, **changes)
    return kind(tiny_model(), arguments, train_dataset=samples, recipe=recipe)


def random_samples(name: str | None, seed: int = 0, hidden: bool = False) -> list[dict[str, Any]]:
    """Samples of which the first half of the tokens is a prompt; `name` is the mask's."""
    rng, found = np.random.default_rng(seed), []
    for length in rng.integers(4, 20, 24):
        tokens, mask = rng.integers(1, VOCAB, length), np.arange(length) >= length // 2
        sample = {"input_ids": tokens.tolist()}
        if name == "labels":
            sample["labels"] = np.where(mask, tokens, -100).tolist()
        elif name is not None:
            sample[name] = [0] * length if hidden else mask.astype(int).tolist()
        found.append(sample)
    return found


@pytest.mark.parametrize("name", ["completion_mask", "response_mask", "token_mask", "action_mask"])
def test_the_trainer_reads_loss_masks_under_any_name(tmp_path: Path, name: str) -> None:
    runs = {}
    for key in ("labels", name):
        trainer = trainer_of(tmp_path / key, datasets.Dataset.from_list(random_samples(key)))
        trainer.train()
        runs[key] = parameters(trainer.model)
    assert runs[name] == runs["labels"]


def test_the_trainer_refuses_a_mask_that_nothing_reads(tmp_path: Path) -> None:
    samples = datasets.Dataset.from_list(random_samples("prompt_mask"))
    with pytest.raises(InputError, match="'prompt_mask' looks like a mask, but nothing reads it"):
        trainer_of(tmp_path, samples).train()


@pytest.mark.parametrize(
    "column",
    [{"decoder_attention_mask": [1] * 5}, {"pixel_attention_mask": [[1, 0]]}, {"has_mask": "yes"},
     {"bool_mask": [0.5] * 5}, {"short_mask": [0, 1]}],
)  # fmt: skip
def test_the_trainer_drops_columns_that_cannot_be_masks_of_tokens(
    tmp_path: Path, column: dict[str, Any]
) -> None:
    samples = [{"input_ids": [1, 2, 3, 4, 5], **column}] * 2
    trainer_of(tmp_path, samples, max_steps=1).train()


def test_steps_of_samples_with_one_token_are_no_error(tmp_path: Path) -> None:
    samples = [{"input_ids": [1]}, {"input_ids": [2]}]
    recipe = Recipe(layout=Packed(max_tokens=1))
    trainer = trainer_of(tmp_path, samples, recipe=recipe, gradient_accumulation_steps=1)
    before = parameters(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 2
    assert parameters(trainer.model) == before
    stream = PlannedStream(InMemory(samples), replace(recipe, steps=Steps(micro_batches=1)))
    model = tiny_model()
    for batch in accelerate_loader(Accelerator(cpu=True), stream, model=model):
        assert model(**batch).loss.item() == 0


def test_trl_decides_whether_its_completion_mask_is_used(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    class PlannedSFT(EvenstepMixin, SFTTrainer):  # type: ignore[misc]
        pass

    rows = [{"prompt": "hi you ", "completion": "hello " * (1 + n % 4)} for n in range(8)]
    counted = {}
    for only in (True, False):
        options = {"bf16": False, "max_length": None, "completion_only_loss": only}
        arguments = arguments_of(SFTConfig, tmp_path / str(only), **options)
        trainer = PlannedSFT(
            tiny_model(),
            arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer_of(),
            recipe=Recipe(layout=Packed(max_tokens=512)),
        )
        (batch, *_) = trainer.get_train_dataloader()
        counted[only] = int((batch["shift_labels"] != -100).sum())
    # Each completion is its words and the end of the text; each prompt adds one more label.
    completions = sum(2 + n % 4 for n in range(8))
    assert counted == {True: completions, False: completions + 8}


def test_masks_of_zeros_stop_the_trainer_before_it_trains(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, without_marks())
    fault = "none of the first 12 samples .*has a loss token.*'assistant_masks' is 0 .*generation"
    with pytest.raises(InputError, match=fault):
        trainer.train()
    encoded = [ChatEncoder(tokenizer_of()).encode(chat) for chat in CHATS]
    trainer = trainer_of(tmp_path / "encoded", encoded)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert min(losses) > 0


@pytest.mark.parametrize("endless", [False, True])
def test_a_step_without_loss_tokens_stops_the_trainer(tmp_path: Path, endless: bool) -> None:
    samples = [*random_samples("loss_mask"), *random_samples("loss_mask", hidden=True)]
    steps = {"gradient_accumulation_steps": 1}
    layout = Recipe(layout=Packed(samples=1, max_tokens=64))
    found: Any = samples
    if endless:
        dataset = datasets.Dataset.from_list(samples)
        found, steps["max_steps"] = dataset.to_iterable_dataset(), 100
    trainer = trainer_of(tmp_path, found, recipe=layout, **steps)
    with pytest.raises(InputError, match="no token of this step counts in the loss, on any proc"):
        trainer.train()
    assert trainer.state.global_step < 48


def test_masks_of_zeros_stop_accelerate() -> None:
    accelerator, model = Accelerator(cpu=True), tiny_model()
    recipe = Recipe(layout=Packed(max_tokens=64), steps=Steps(micro_batches=1))
    with pytest.raises(InputError, match="none of the first 12 samples"):
        accelerate_loader(
            accelerator, PlannedStream(InMemory(without_marks()), recipe), model=model
        )
    samples = [*random_samples("loss_mask"), *random_samples("loss_mask", hidden=True)]
    single = Recipe(layout=Packed(samples=1, max_tokens=64), steps=Steps(micro_batches=1))
    loader = accelerate_loader(accelerator, PlannedStream(InMemory(samples), single), model=model)
    with pytest.raises(InputError, match="no token of this step counts in the loss"):
        list(loader)


def test_accumulation_that_changes_after_the_loader_was_made_is_refused() -> None:
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), tiny_model()
    recipe = Recipe(layout=Packed(max_tokens=64), steps=Steps(micro_batches=2))
    stream = PlannedStream(InMemory(random_samples("loss_mask")), recipe)
    batches = iter(accelerate_loader(accelerator, stream, model=model))
    next(batches)
    next(batches)
    accelerator.gradient_accumulation_steps = 4
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 4, but was 2 when"):
        next(batches)


def test_a_corpus_of_chats_without_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat[:1]}) + "\n" for chat in CHATS))
    corpus = Corpus(paths=str(path), format="chat")
    with pytest.raises(InputError, match="none of the first 12 samples"):
        corpus.stored(tmp_path / "chats.tokens")


def test_a_corpus_of_token_files_keeps_their_masks(tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / f"{number}.tokens"
        with TokenFileWriter(path, columns={"response_mask": np.uint8}) as writer:
            writer.append({"input_ids": [5, 6, 7], "response_mask": [0, number, 1]})
    stored = Corpus(paths=str(tmp_path / "*.tokens")).stored(tmp_path / "all.joined")
    assert [stored[n]["response_mask"].tolist() for n in range(2)] == [[0, 0, 1], [0, 1, 1]]


def test_one_labelled_sample_of_a_thousand_is_enough() -> None:
    def source(labelled: int, count: int) -> InMemory:
        masks = [[0, int(n == labelled)] for n in range(count)]
        return InMemory([{"input_ids": torch.tensor([1, 2]), "loss_mask": m} for m in masks])

    check_some_loss(source(999, 1200))
    check_some_loss(InMemory([{"input_ids": [1]}]))
    with pytest.raises(InputError, match="none of the first 1000 samples"):
        check_some_loss(source(1000, 1200))
    with pytest.raises(InputError, match="none of the first 7 samples"):
        check_some_loss(source(-1, 7))


class Parts:
    """Items that are several samples."""

    fingerprint = "parts"

    def __init__(self, items: list[list[dict[str, Any]]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, item: int) -> list[dict[str, Any]]:
        return self.items[item]


def test_samples_are_counted_not_items() -> None:
    hidden, trained = ({"input_ids": [1, 2], "loss_mask": [0, n]} for n in range(2))
    check_some_loss(Parts([[hidden] * 2, [trained]]))
    check_some_loss(Parts([[hidden] * 998, [hidden, trained]]))
    with pytest.raises(InputError, match="none of the first 1000 samples"):
        check_some_loss(Parts([[hidden] * 999, [hidden, trained]]))
    single = [{"input_ids": [1]}] * 999
    check_some_loss(InMemory([*single, hidden, trained]))
    with pytest.raises(InputError, match="none of the first 1 samples of two or more tokens"):
        check_some_loss(InMemory([*single, hidden]))


@pytest.mark.parametrize(
    "column",
    [
        {"labels": None},
        {"labels": [1]},
        {"loss_mask": [0]},
        {"loss_masking_spans": None},
        {"loss_mask": torch.ones(3, dtype=torch.bfloat16)},
        {"loss_mask": torch.ones(3, requires_grad=True)},
    ],
)
def test_malformed_samples_are_left_to_the_collator(column: dict[str, Any]) -> None:
    check_some_loss(InMemory([{"input_ids": [1, 2, 3], **column}]))
    malformed = not isinstance(next(iter(column.values())), torch.Tensor)
    batches = Collator()
    plan = make_plan([3], Recipe(layout=Packed(max_tokens=8)))
    samples = [{"input_ids": [1, 2, 3], **column}]
    if malformed:
        with pytest.raises(InputError, match="sample 0"):
            batches(plan[0, 0][0], samples)
    else:
        assert int(batches(plan[0, 0][0], samples).loss_tokens.sum()) == 2


def test_an_own_collate_of_accelerate_takes_any_samples() -> None:
    samples = MeasuredMapped([{"pixels": [1, 2, 3]}] * 4, lengths=[3] * 4)
    recipe = Recipe(layout=Packed(max_tokens=6), steps=Steps(micro_batches=1))

    def collate(micro: Any, samples: Any) -> dict[str, Any]:
        return {"labels": torch.ones((1, 4), dtype=torch.int64)}

    loader = accelerate_loader(
        Accelerator(cpu=True), PlannedStream(samples, recipe), collate=collate
    )
    assert len(list(loader)) == 2
