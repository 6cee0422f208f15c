"""Tokenizers by name: a folder of Hugging Face files, or bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenstep.errors import ConfigError, FileError

BYTES = 256


def check_folder(folder: str | None) -> None:
    """Raise unless the folder exists; None needs none."""
    if folder is not None and not Path(folder).is_dir():
        raise FileError(f"data.tokenizer: {folder} is not a folder. Give that of a tokenizer.")


def load_tokenizer(folder: str | None) -> Any:
    """The Hugging Face tokenizer in a folder; None for None, which means UTF-8 bytes.

    Nothing is downloaded and no code of the folder is run.
    """
    if folder is None:
        return None
    check_folder(folder)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            'data.tokenizer needs transformers. Install it with pip install "evenstep[hf]".'
        ) from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise FileError(f"data.tokenizer: {folder} holds no tokenizer ({reason}).") from None


def vocabulary(tokenizer: Any) -> int:
    """One more than the largest token id.

    >>> vocabulary(None)
    256
    """
    return BYTES if tokenizer is None else len(tokenizer)
