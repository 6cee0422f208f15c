"""Datasets that are not sources."""

from typing import Any


class MapStyle:
    """A map-style dataset: a length, and items by index."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, item: int) -> Any:
        return {"input_ids": [item]}
