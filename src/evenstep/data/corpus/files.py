"""The files of a corpus: folders and globs -> paths, and the format that their names tell."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from evenstep.data.corpus.formats import FORMATS, Format
from evenstep.data.corpus.saved_dataset import is_saved_dataset
from evenstep.data.sources.files import matches, refuse_compressed
from evenstep.errors import ConfigError, FileError


def corpus_files(paths: Iterable[str]) -> list[Path]:
    """All files that the paths name, each once: a folder's in the order of their names.

    A saved Hugging Face dataset is named by its folder, and a Megatron pair by its `.idx` file.
    """
    found: dict[Path, None] = {}
    for path in paths:
        new = [file for each in matches(path) for file in _files(each)]
        if not new:
            raise FileError(f"data.paths: {path} has no files. Check the path.")
        for file in new:
            refuse_compressed(file)
        found.update(dict.fromkeys(new))
    return list(found)


def format_of(files: list[Path]) -> Format:
    """The format of the files by their names; all must have the same.

    >>> format_of([Path("a.jsonl"), Path("b.jsonl")])
    'jsonl'
    """
    kinds = {_format(file): file for file in files}
    if len(kinds) > 1:
        named = " and ".join(f"{file.name} ({kind})" for kind, file in kinds.items())
        raise ConfigError(
            f"data.paths mix formats: {named}. Set data.format, or name files of one format."
        )
    (kind,) = kinds
    return kind


def statuses(files: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """Every file on disk with its size and dates: those of a dataset, both of a Megatron pair."""
    found: list[Path] = []
    for file in files:
        data = file.with_suffix(".bin") if file.suffix == ".idx" else file
        found += sorted(file.iterdir()) if file.is_dir() else dict.fromkeys([file, data])
    return [(path, path.stat()) for path in found if path.exists()]


def _format(file: Path) -> Format:
    return "dataset" if file.is_dir() else FORMATS.get(file.suffix.lower(), "text")


def _files(path: Path) -> list[Path]:
    if is_saved_dataset(path):
        return [path]
    if path.is_dir():
        return [file for each in sorted(path.iterdir()) if _shown(each) for file in _files(each)]
    if path.is_file():
        return [_index(path)]
    # Megatron's tools name both files by what they share.
    index = path.with_name(f"{path.name}.idx")
    return [index] if index.is_file() else []


def _shown(path: Path) -> bool:
    """Whether a file of a folder counts: hidden ones do not, nor linked folders (may be cycles)."""
    return not path.name.startswith(".") and not (path.is_symlink() and path.is_dir())


def _index(path: Path) -> Path:
    """The `.idx` file of a `.bin` file, if there is one; any other file as it is."""
    index = path.with_suffix(".idx")
    return index if path.suffix == ".bin" and index.is_file() else path
