"""The same texts in every format that a corpus reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.data import write_token_file
from tests.data.megatron_files import write_pair

TEXTS = ["hello there", "é", "", "a b c d e f", "x" * 40, " \n "]
COUNTS = [len(text.encode()) for text in TEXTS]


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def chat_of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]


def many_chats(path: Path, size: int) -> Path:
    """A file of chats of one to four turns, of about `size` bytes."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        while file.tell() < size:
            turns = [
                message
                for asked, answered in rng.integers(1, 60, (rng.integers(1, 5), 2)).tolist()
                for message in (
                    {"role": "user", "content": "why " * asked},
                    {"role": "assistant", "content": "because " * answered},
                )
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def tokenizer(folder: Path) -> Path:
    """A Hugging Face tokenizer of bytes, with an ordinary chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(bytes_)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template)
    fast.save_pretrained(folder)
    return folder


def texts(folder: Path) -> Path:
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number:02}.txt").write_text(text, newline="")
    (folder / "texts" / ".hidden").write_text("hidden")
    return folder / "texts"


def jsonl(folder: Path, field: str, value: Callable[[str], Any]) -> Path:
    path = folder / f"{field}.jsonl"
    path.write_text("\n\n".join(json.dumps({"id": 1, field: value(text)}) for text in TEXTS))
    return path


def parquet(folder: Path, field: str, value: Callable[[str], Any]) -> Path:
    import pyarrow
    from pyarrow import parquet

    path = folder / f"{field}.parquet"
    table = pyarrow.table({"id": [1] * len(TEXTS), field: [value(text) for text in TEXTS]})
    parquet.write_table(table, path, row_group_size=4)
    return path


def dataset(folder: Path, field: str, value: Callable[[str], Any]) -> Path:
    from datasets import Dataset

    path = folder / f"{field}-dataset"
    rows = {"id": [1] * len(TEXTS), field: [value(text) for text in TEXTS]}
    Dataset.from_dict(rows).with_format("numpy").save_to_disk(str(path))
    return path


def token_file(folder: Path) -> Path:
    path = folder / "a.tokens"
    write_token_file(path, [tokens_of(text) for text in TEXTS if text], dtype=np.uint8)
    return path


def megatron(folder: Path) -> Path:
    return write_pair(folder / "a_document", [tokens_of(text) for text in TEXTS], code=1)
