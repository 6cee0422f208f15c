"""`python -m evenstep.demo.chats FOLDER`: ten chats and all that is needed to train on them.

    FOLDER/chats.jsonl  ten questions with their answers
    FOLDER/pairs.jsonl  the same questions, each with the answer to prefer and another one
    FOLDER/start        a tokenizer of these texts, and the config.json of a small Llama
    FOLDER/run.yaml     a run of `evenstep train` that learns the answers by heart

Nothing is downloaded.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evenstep.lazy import need

QUESTIONS = {
    "Which planet is the largest?": ("Jupiter, by far.", "Saturn."),
    "What is the capital of Norway?": ("Oslo.", "Bergen, I believe."),
    "How many legs has a spider?": ("Eight legs.", "Six."),
    "Who wrote Hamlet?": ("William Shakespeare did.", "Nobody knows."),
    "What boils at 100 degrees?": ("Water, at sea level.", "Milk and honey."),
    "Which metal is liquid at room temperature?": ("Mercury.", "Lead or tin."),
    "What is seven times eight?": ("Fifty-six.", "Fifty-four."),
    "Which ocean is the deepest?": ("The Pacific Ocean.", "The Atlantic."),
    "What do bees make?": ("Honey and wax.", "Silk."),
    "How many days has a leap year?": ("366 days.", "360, more or less."),
}
"""Each with the answer that is learnt, and one that is worse."""

TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message.role }}>"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<end>{% endgeneration %}"
    "{% else %}{{ message.content }}<end>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

RUN = """\
layout: {max_tokens: 512}
steps: {samples: 10}
stream: {max_num_steps: 60}
data: {paths: chats.jsonl, format: chat, tokenizer: start}
model: {path: start/config.json}   # of a model with weights: its folder
optimizer: {lr: 1e-2, schedule: linear, warmup_steps: 5}
trainer: {out: run}
"""


def chat(question: str, answer: str) -> list[dict[str, str]]:
    """The messages of one chat."""
    said = {"user": question, "assistant": answer}
    return [{"role": role, "content": content} for role, content in said.items()]


def write_chats(folder: Path) -> None:
    """Write the files of a run into a folder."""
    need("transformers", extra="cli,hf", package="evenstep.demo.chats")
    folder.mkdir(parents=True, exist_ok=True)
    chats: list[Any] = [
        {"messages": chat(question, good)} for question, (good, _) in QUESTIONS.items()
    ]
    pairs: list[Any] = [
        {"prompt": question, "chosen": good, "rejected": bad}
        for question, (good, bad) in QUESTIONS.items()
    ]
    for name, rows in {"chats.jsonl": chats, "pairs.jsonl": pairs}.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    texts = [text for question, answers in QUESTIONS.items() for text in (question, *answers)]
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(folder / "start")
    model_config(tokenizer).save_pretrained(folder / "start")
    (folder / "run.yaml").write_text(RUN, "utf-8")


def train_tokenizer(texts: Iterable[str], size: int = 512) -> Any:
    """A byte-level BPE tokenizer of these texts, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<end>", "<system>", "<user>", "<assistant>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<end>",
        pad_token="<end>",
        extra_special_tokens=special[1:],
        chat_template=TEMPLATE,
    )


def model_config(tokenizer: Any) -> Any:
    """The config of a Llama with about 200,000 weights."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


if __name__ == "__main__":
    parser = ArgumentParser("evenstep.demo.chats", description="Ten chats to train on.")
    parser.add_argument("folder", nargs="?", default="tiny", type=Path, help="default: tiny")
    target = parser.parse_args().folder
    write_chats(target)
    print(f"{len(QUESTIONS)} chats, a tokenizer and a model: evenstep train {target / 'run.yaml'}")
