"""DataProto: what is used of ROLL's batches."""

from __future__ import annotations

from typing import Any, Protocol

from evenstep.errors import InputError


class DataProto(Protocol):
    """Rows by tensor, with information about them."""

    batch: Any
    """Tensors by name, (rows, ...) each."""
    meta_info: dict[str, Any]

    def __len__(self) -> int: ...

    def slice(self, start: int | None = None, end: int | None = None) -> DataProto:
        """Some rows, as an object of its own that may share `meta_info`."""

    def reorder(self, indices: Any) -> None:
        """Put row `indices[i]` at i, in place."""

    def select_idxs(self, idxs: Any) -> DataProto:
        """The rows with these numbers."""


class BatchError(InputError, AssertionError):
    """Rows that do not fit; ROLL raises `AssertionError`."""
