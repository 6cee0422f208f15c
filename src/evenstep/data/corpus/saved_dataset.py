"""SavedDataset: the rows of Hugging Face datasets on disk, which `save_to_disk` wrote."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from evenstep.data.sources.source import Sample
from evenstep.data.sources.text import RowDecoder
from evenstep.errors import ConfigError, FileError


class SavedDataset:
    """Rows of a saved dataset, decoded into samples. Every process opens it on first use."""

    def __init__(self, path: Path, decoder: RowDecoder) -> None:
        self._path, self._decoder = path, decoder

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_decoder": self._decoder}

    @property
    def fingerprint(self) -> str:
        """That of the dataset."""
        return str(self._rows._fingerprint)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        return self._decoder.decode(self._rows[item], f"{self._path}, row {item}")

    @cached_property
    def _rows(self) -> Any:
        return load_saved_dataset(self._path)


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder holds a saved dataset, or several by name."""
    one = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return one or (path / "dataset_dict.json").is_file()


def load_saved_dataset(path: Path) -> Any:
    """The dataset in a folder, memory-mapped. Rows are plain Python objects."""
    try:
        from datasets import load_from_disk
    except ImportError:
        raise ConfigError(
            f"reading {path} needs datasets, which is not installed. Install it with: "
            f"pip install 'evenstep[datasets]'."
        ) from None
    if (path / "dataset_dict.json").is_file():
        names = sorted(each.name for each in path.iterdir() if is_saved_dataset(each))
        raise FileError(
            f"{path} holds several datasets: {', '.join(names)}. Name one, such as "
            f"{path / names[0] if names else path}."
        )
    try:
        return load_from_disk(str(path)).with_format(None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise FileError(
            f"{path} is not a saved Hugging Face dataset ({reason}). Save one with save_to_disk."
        ) from None
