"""TRL's SFTTrainer on planned steps: packed chats with loss on the assistant's tokens.

    python examples/trl_sft.py        20 seconds on two cores

A class of two lines and a `recipe=` replace TRL's batches and its packing. TRL still tokenizes the
chats and builds labels. The tokenizer and the tiny Llama are made on the spot. It trains in padded
batches of 4 and packed, on the same 16 chats per step, and TRL logs the same losses.
"""

from __future__ import annotations

import inspect
import tempfile
import textwrap
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
)
from trl import SFTConfig, SFTTrainer

from evenstep import Packed, Padded, Recipe, Steps, make_plan
from evenstep.integrations.trainer import EvenstepMixin

STEP = Steps(samples=16)
RECIPES = {
    "padded batches of 4": Recipe(layout=Padded(samples=4), steps=STEP, balance="none"),
    "packed": Recipe(layout=Packed(max_tokens=1024), steps=STEP),
}
TEMPLATE = """{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}\
{% generation %}{{ message.content }}<end>{% endgeneration %}{% else %}{{ message.content }}\
{% endif %}{% endfor %}"""


class PlannedSFT(EvenstepMixin, SFTTrainer):  # type: ignore[misc]
    """All that an SFTTrainer needs."""


def made_chats() -> list[list[dict[str, str]]]:
    """Questions about functions of the standard library, answered by their docstrings."""
    asked = [
        (f"What does {module.__name__}.{name} do?", str(inspect.getdoc(function)))
        for module in (inspect, tempfile, textwrap, time)
        for name, function in inspect.getmembers(module, callable)
        if inspect.getdoc(function) and not name.startswith("_")
    ]
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer[:1200]}]
        for question, answer in asked
    ]


def made_tokenizer(chats: list[list[dict[str, str]]]) -> Any:
    """A byte-level BPE of 512 tokens with a chat template that marks the assistant's tokens."""
    learnt = ByteLevelBPETokenizer()
    texts = [message["content"] for chat in chats for message in chat]
    special = ["<pad>", "<end>", "<user>", "<assistant>"]
    learnt.train_from_iterator(texts, 512, special_tokens=special, show_progress=False)
    named = {"pad_token": "<pad>", "eos_token": "<end>"}
    named["chat_template"] = TEMPLATE
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(learnt.to_str()), **named)


def train(folder: str, recipe: Recipe, samples: Dataset, tokenizer: Any) -> list[float]:
    """Train, and return the loss of each step as TRL logs it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, **sizes)
    arguments = SFTConfig(
        folder,
        assistant_only_loss=True,
        max_length=None,  # the recipe's overflow= says what happens to long samples
        gradient_accumulation_steps=4,  # micro-batches of a step, at most
        learning_rate=3e-3,
        max_steps=10,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = PlannedSFT(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=samples,
        processing_class=tokenizer,
        recipe=recipe,
    )
    trainer.remove_callback(PrinterCallback)  # the table below is shorter
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    chats = made_chats()
    tokenizer = made_tokenizer(chats)
    samples = Dataset.from_list([{"messages": chat} for chat in chats])
    lengths = [len(tokenizer.apply_chat_template(chat)["input_ids"]) for chat in chats]
    print(f"{len(chats)} chats of {min(lengths)} to {max(lengths)} tokens")
    print(f"{'':20}  padding  seconds  first and last loss  loss differs by")
    base: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in RECIPES.items():
            started = time.perf_counter()
            losses = train(folder, recipe, samples, tokenizer)
            seconds = time.perf_counter() - started
            base = base or losses
            padding = make_plan(lengths, recipe).stats()["padding_ratio"]
            print(
                f"{name:20}  {padding:7.1%}  {seconds:7.1f}  {losses[0]:9.3f} {losses[-1]:9.3f}  "
                f"{np.abs(np.subtract(losses, base)).max():15.1e}"
            )


if __name__ == "__main__":
    main()
