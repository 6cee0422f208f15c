"""The same samples in every kind of source, with a transform that is told id, epoch and seed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from evenstep import Step
from evenstep.data import (
    Draw,
    InMemory,
    Iterated,
    Jsonl,
    Mapped,
    MeasuredMapped,
    TokenFile,
    write_token_file,
)
from tests.internals import item_and_part

Items: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""The lengths of each item's samples; None if it cannot be read."""

_FOLDER = tempfile.TemporaryDirectory(prefix="evenstep-sources-")


class Rows:
    """A map-style dataset that is not a source."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Any:
        return self.rows[item]


def made(item: int, lengths: tuple[int, ...] | None) -> Any:
    """A sample, or several. `input_ids` are the item's number; one without them is unreadable."""
    if lengths is None:
        return {}
    found = [{"input_ids": [item] * n, "images": n % 4} for n in lengths]
    return found[0] if len(found) == 1 else found


def drawn(row: Any, *, sample_id: int, epoch: int, seed: int) -> Any:
    """Note in every sample what the transform was told."""
    several = [row] if isinstance(row, dict) else row
    noted = [{**sample, "draw": (sample_id, epoch, seed)} for sample in several]
    return noted[0] if len(noted) == 1 else noted


@lru_cache(maxsize=4)
def source_of(kind: str, items: Items) -> Any:
    """Items as a source of this kind."""
    rows = [made(item, lengths) for item, lengths in enumerate(items)]
    return SOURCES[kind](rows)


def check_draws(step: Step, epoch: int, seed: int) -> None:
    """Raise unless the samples of a step were drawn with their id, and this epoch and seed."""
    for k in range(len(step)):
        for sample_id, sample in step.read(k)[1].items():
            expected = Draw(item_and_part(sample_id)[0], epoch, seed)
            if sample is not None and "draw" in sample:
                assert sample["draw"] == expected, f"{sample['draw']} instead of {expected}"


def _folder() -> Path:
    for old in Path(_FOLDER.name).iterdir():
        shutil.rmtree(old)
    return Path(tempfile.mkdtemp(dir=_FOLDER.name))


def _jsonl(rows: list[Any]) -> Jsonl:
    """Two files, one of which may be empty, found by a pattern."""
    folder = _folder()
    for name, part in (("a", rows[: len(rows) // 3]), ("b", rows[len(rows) // 3 :])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    return Jsonl(f"{folder}/*.jsonl", transform=drawn)


def _tokens(rows: list[Any]) -> Any:
    """Two token files; samples in memory if there are items that such files cannot hold."""
    if not all(isinstance(row, dict) and row for row in rows):
        return InMemory(rows)
    folder, half, columns = _folder(), len(rows) // 2, {"images": "i4"}
    for name, part in (("a", rows[:half]), ("b", rows[half:])):
        filled = [{**row, "images": [row["images"]] * len(row["input_ids"])} for row in part]
        write_token_file(folder / f"{name}.tokens", filled, columns=columns)
    return TokenFile([folder / "a.tokens", f"{folder}/b*"])


SOURCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "memory": InMemory,
    "dataset": Rows,
    "mapped": lambda rows: Mapped(rows, transform=drawn),
    "jsonl": _jsonl,
    "tokens": _tokens,
    "sequential": lambda rows: Iterated(rows, transform=drawn, fingerprint="cases"),
}
MEASURED: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "dataset": Rows,
    "mapped": lambda rows: MeasuredMapped(rows, transform=drawn),
    "jsonl": lambda rows: MeasuredMapped(_jsonl(rows)),
    "tokens": _tokens,
}
SOURCES |= {f"measured {kind}": make for kind, make in MEASURED.items()}
