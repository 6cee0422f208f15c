"""Spans: the columns of a padded tensor that hold the tokens of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenstep.core.ragged import IntArray, frozen
from evenstep.errors import ConfigError, InputError
from evenstep.planning.kernels import kernel

Side: TypeAlias = Literal["left", "right"]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Row i has its tokens in the columns `starts[i]` up to `starts[i] + lengths[i]` of `width`."""

    starts: IntArray
    lengths: IntArray
    width: int

    @classmethod
    def of_mask(cls, mask: Tensor, side: Side | None) -> Spans:
        """The spans of the ones of an attention mask, (rows, width); checks the padding side."""
        if mask.ndim != 2:
            raise InputError(
                f"attention_mask has shape {tuple(mask.shape)}; expected (rows, width). Pass a "
                f"mask of tokens, not of pairs of tokens."
            )
        held = mask.detach().cpu()
        ones = held == 1
        if not bool((ones == (held != 0)).all()):
            odd = held[~ones & (held != 0)][0].item()
            raise InputError(
                f"attention_mask holds {odd:g}; expected 0 or 1. A row is one sequence: unpack "
                f"packed rows first."
            )
        rows, width = mask.shape
        starts, lengths = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        wrong = find_spans(ones.contiguous().view(torch.uint8).numpy(), starts, lengths)
        if wrong >= 0:
            raise InputError(
                f"the attention_mask of row {wrong} has zeros between ones; expected padding "
                f"before or after the tokens only. To ignore tokens in the loss, set their "
                f"'loss_mask' to 0."
            )
        if side is not None:
            _check_side(starts, lengths, width, side)
        return cls(frozen(starts), frozen(lengths), width)

    @classmethod
    def of_lengths(cls, lengths: Any, rows: int, width: int, side: Side | None) -> Spans:
        """The spans of rows of these lengths, all padded on one side."""
        if side is None:
            raise ConfigError(
                "lengths do not say on which side rows are padded. Set padding_side='left' or "
                "'right', or pass an attention_mask."
            )
        given = lengths.detach().cpu().numpy() if isinstance(lengths, Tensor) else lengths
        found = np.asarray(given)
        if found.shape != (rows,) or found.dtype.kind not in "iu":
            raise InputError(
                f"lengths must be {rows} integers, one per row; got shape {found.shape} and dtype "
                f"{found.dtype}."
            )
        outside = np.flatnonzero((found < 0) | (found > width))
        if len(outside):
            row = int(outside[0])
            raise InputError(
                f"row {row} has length {found[row]}; expected 0 to {width}, the width of the rows."
            )
        starts = width - found if side == "left" else np.zeros(rows, np.int64)
        return cls(frozen(starts), frozen(found), width)

    @property
    def run_lengths(self) -> IntArray:
        """The tokens of each row when it runs: an empty row runs as one padding token."""
        return np.maximum(self.lengths, 1)

    def take(self, rows: IntArray) -> Spans:
        """The spans of some rows."""
        return Spans(frozen(self.starts[rows]), frozen(self.lengths[rows]), self.width)


def _check_side(starts: IntArray, lengths: IntArray, width: int, side: Side) -> None:
    expected = width - lengths if side == "left" else np.zeros_like(starts)
    wrong = np.flatnonzero((starts != expected) & (lengths > 0))
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"padding_side is {side!r}, but row {row} has its tokens in columns {starts[row]} to "
            f"{starts[row] + lengths[row] - 1} of {width}. Leave padding_side out to detect the "
            f"side of each row."
        )


@kernel
def find_spans(ones: NDArray[np.uint8], starts: IntArray, lengths: IntArray) -> int:
    """Fill the first one of each row and the number of ones; return a row with a gap, else -1.

    [[0, 1, 1], [1, 0, 0]] -> starts [1, 0], lengths [2, 1]
    """
    width = ones.shape[1]
    for row in range(ones.shape[0]):
        here = ones[row]
        first, end = 0, width
        while first < width and here[first] == 0:
            first += 1
        while end > first and here[end - 1] == 0:
            end -= 1
        count = 0
        for column in range(first, end):
            if here[column]:
                count += 1
        if count != end - first:
            return row
        starts[row] = first if count else 0
        lengths[row] = count
    return -1
