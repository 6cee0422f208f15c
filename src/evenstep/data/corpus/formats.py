"""The formats of the files of a corpus."""

from __future__ import annotations

from typing import Literal, TypeAlias

Format: TypeAlias = Literal["text", "jsonl", "chat", "parquet", "dataset", "tokens", "megatron"]

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".tokens": "tokens",
    ".idx": "megatron",
}
"""By the end of a file's name; others are text. A folder that a Hugging Face dataset was saved to
is a dataset."""

TOKENIZED: tuple[Format, ...] = ("tokens", "megatron")
"""Formats of tokens, which no tokenizer makes."""
