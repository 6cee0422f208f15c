"""The formats of the files of a corpus."""

from __future__ import annotations

from typing import Literal, TypeAlias

Format: TypeAlias = Literal["text", "jsonl", "chat", "parquet", "tokens"]

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".tokens": "tokens",
}
"""By the end of a file's name; others are text."""
