"""The files of a corpus: folders and globs -> paths, and the format that their names tell."""

from __future__ import annotations

from collections.abc import Iterable
from glob import glob, has_magic
from pathlib import Path

from evenstep.data.corpus.formats import FORMATS, Format
from evenstep.errors import ConfigError, FileError


def files_of(paths: Iterable[str]) -> list[Path]:
    """All files that the paths name, each once: a folder's in the order of their names."""
    found: dict[Path, None] = {}
    for path in paths:
        # Path.glob takes no absolute patterns.
        matched = sorted(glob(path, recursive=True)) if has_magic(path) else [path]  # noqa: PTH207
        new = [file for each in matched for file in _files(Path(each))]
        if not new:
            raise FileError(f"data.paths: {path} has no files. Check the path.")
        found.update(dict.fromkeys(new))
    return list(found)


def format_of(files: list[Path]) -> Format:
    """The format of the files by their names; all must have the same.

    >>> format_of([Path("a.jsonl"), Path("b.jsonl")])
    'jsonl'
    """
    kinds = {FORMATS.get(file.suffix.lower(), "text"): file for file in files}
    if len(kinds) > 1:
        named = " and ".join(f"{file.name} ({kind})" for kind, file in kinds.items())
        raise ConfigError(
            f"data.paths mix formats: {named}. Set data.format, or name files of one format."
        )
    (kind,) = kinds
    return kind


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file())
        return sorted(file for file in inside if not _hidden(file.relative_to(path)))
    return [path] if path.is_file() else []


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
