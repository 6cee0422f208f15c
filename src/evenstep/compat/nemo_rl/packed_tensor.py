"""PackedTensor: the media of each row of a batch, any number of tensors per row."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from evenstep.core.ragged import Ragged
from evenstep.errors import InputError


class PackedTensor:
    """A list of tensors per row, concatenated along `dim_to_pack` for the model.

    With `enable_deduplication`, rows that hold the same tensor share one copy: concatenating,
    slicing and copying keep each tensor once.

    >>> images = PackedTensor([torch.ones(2, 3), torch.zeros(1, 3)], dim_to_pack=0)
    >>> len(images), images.as_tensor().shape, len(images.slice([1]))
    (2, torch.Size([3, 3]), 1)
    """

    def __init__(
        self, tensors: Tensor | Sequence[Tensor | None], dim_to_pack: int | None = None
    ) -> None:
        """One row per tensor; None is a row without media."""
        rows = [tensors] if isinstance(tensors, Tensor) else tensors
        if not isinstance(rows, list | tuple) or len(rows) == 0:
            raise InputError(f"PackedTensor needs a tensor or a list of them, got {tensors!r}.")
        kept = [tensor for tensor in rows if tensor is not None]
        held = iter(range(len(kept)))
        self._set(kept, dim_to_pack, [[] if row is None else [next(held)] for row in rows], None)

    def _set(
        self,
        tensors: list[Tensor],
        dim: int | None,
        rows: Sequence[Sequence[int]],
        provenance: list[bytes] | None,
    ) -> None:
        ragged = Ragged.of(rows)
        self.tensors, self.dim_to_pack = tensors, dim
        self._row_offsets: list[int] = ragged.offsets.tolist()
        self._segment_indices: list[int] = ragged.values.tolist()
        self._segment_provenance = provenance  # one name per tensor, the same for all its copies

    @classmethod
    def _of(
        cls, parts: Sequence[PackedTensor], rows: Iterable[Sequence[tuple[int, int]]]
    ) -> PackedTensor:
        """New rows from the tensors of `parts`; row i lists (part, tensor). Names are merged."""
        shared = any(part.deduplication_enabled for part in parts)
        tensors: list[Tensor] = []
        number: dict[bytes, int] = {}  # without names, every use of a tensor is stored
        numbered: list[list[int]] = []
        for row in rows:
            numbered.append([])
            for part, at in row:
                names = parts[part]._segment_provenance
                name = names[at] if names is not None else _name() if shared else b""
                if name not in number or not shared:
                    number[name] = len(tensors)
                    tensors.append(parts[part].tensors[at])
                numbered[-1].append(number[name])
        made = cls.__new__(cls)
        made._set(tensors, parts[0].dim_to_pack, numbered, list(number) if shared else None)
        return made

    @property
    def deduplication_enabled(self) -> bool:
        """Whether rows share equal tensors."""
        return self._segment_provenance is not None

    def enable_deduplication(self) -> PackedTensor:
        """Share each of these tensors from now on, wherever it is repeated; returns itself."""
        if self._segment_provenance is None:
            self._segment_provenance = [_name() for _ in self.tensors]
        return self

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._row_offsets) - 1

    def logical_segment_counts_by_row(self) -> list[int]:
        """The number of tensors of each row."""
        return [len(self._segments(row)) for row in range(len(self))]

    def as_tensor(self, device: Any = None) -> Tensor | None:
        """All rows as one tensor; None without media."""
        if not self._segment_indices:
            return None
        tensors = [self.tensors[at].to(device) for at in self._segment_indices]
        return torch.cat(tensors, dim=self.dim_to_pack or 0)

    def to(self, device: Any) -> PackedTensor:
        """Move the tensors to `device` in place; returns itself."""
        self.tensors = [tensor.to(device) for tensor in self.tensors]
        return self

    def to_dtype(self, dtype: torch.dtype) -> PackedTensor:
        """A copy with floating-point tensors in `dtype`; other tensors stay as they are."""
        made = self.slice(range(len(self)))
        cast = [item.to(dtype) if item.is_floating_point() else item for item in made.tensors]
        changed = any(new is not old for new, old in zip(cast, made.tensors, strict=True))
        made.tensors = cast
        if changed and made.deduplication_enabled:  # other values, so other names
            made._segment_provenance = [_name() for _ in cast]
        return made

    def slice(self, indices: Sequence[int] | Tensor) -> PackedTensor:
        """These rows, in this order."""
        rows = [range(len(self))[int(row)] for row in indices]
        return self._of([self], ([(0, at) for at in self._segments(row)] for row in rows))

    @classmethod
    def empty_rows_like(cls, other: PackedTensor, num_rows: int) -> PackedTensor:
        """`num_rows` rows without media."""
        return cls._of([other], [[]] * num_rows)

    @classmethod
    def concat(cls, parts: Sequence[PackedTensor]) -> PackedTensor:
        """The rows of all `parts`.

        >>> one = PackedTensor(torch.ones(1, 2), dim_to_pack=0).enable_deduplication()
        >>> both = PackedTensor.concat([one, one])
        >>> len(both), len(both.tensors), both.as_tensor().shape
        (2, 1, torch.Size([2, 2]))
        """
        dims = sorted({str(part.dim_to_pack) for part in parts})
        if len(dims) != 1:
            raise InputError(f"cannot concatenate {len(parts)} PackedTensors packed along {dims}.")
        return cls._of(
            parts,
            (
                [(number, at) for at in part._segments(row)]
                for number, part in enumerate(parts)
                for row in range(len(part))
            ),
        )

    @classmethod
    def merge_segments(cls, parts: Sequence[PackedTensor]) -> PackedTensor:
        """One row with the tensors of all `parts`."""
        joined = cls.concat(parts)
        return cls._of([joined], [[(0, at) for at in joined._segment_indices]])

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedTensor:
        """A copy of the tensors too, unless they are shared."""
        copy = self.slice(range(len(self)))
        if not self.deduplication_enabled:
            copy.tensors = [deepcopy(tensor, memo) for tensor in copy.tensors]
        return copy

    def _segments(self, row: int) -> list[int]:
        """The tensors of a row, as indices of `tensors`."""
        return self._segment_indices[self._row_offsets[row] : self._row_offsets[row + 1]]


def _name() -> bytes:
    """A name for a tensor that holds in all processes."""
    return uuid.uuid4().bytes
