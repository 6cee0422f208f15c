"""Results of rows, by row number -> tensors in the order, width and padding of a rollout batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from evenstep.core.ragged import IntArray, offsets_of, ranges_of
from evenstep.errors import InputError
from evenstep.tensors.batch import RaggedTensor
from evenstep.train.rollouts.spans import Spans


def places_of(rows: ArrayLike, held: IntArray) -> IntArray:
    """Where each of `rows` is in `held`, which is ascending. Raises if one is not there or twice.

    >>> places_of([7, 2], np.array([2, 5, 7])).tolist()
    [2, 0]
    """
    given = np.asarray(rows, np.int64)
    if len(held) and held[-1] == len(held) - 1:  # all rows
        at, known = given, (given >= 0) & (given < len(held))
    else:
        at = np.searchsorted(held, given)
        known = np.append(held, -1)[at] == given
    if not known.all():
        raise InputError(
            f"row {given[~known][0]} is not among the {len(held)} rows of this batch. Pass numbers "
            f"of rows that it holds."
        )
    if not (at[1:] > at[:-1]).all():
        ordered = np.sort(at)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            row = held[ordered[1:][twice][0]]
            raise InputError(f"row {row} is given twice. Pass each row once.")
    return at


def check_complete(at: IntArray, held: IntArray, spans: Spans) -> None:
    """Raise if a row that has tokens has no result."""
    missing = spans.lengths > 0
    missing[at] = False
    if missing.any():
        raise InputError(
            f"row {held[missing][0]} has no result. Join the results of all ranks and steps, or "
            f"restore those of selected rows (`batch.select(rows)`)."
        )


def pad_tokens(
    values: Sequence[Tensor] | RaggedTensor, at: IntArray, held: IntArray, spans: Spans, pad: float
) -> Tensor:
    """Values per token of the rows at `at` -> (rows, width, ...), each row where its tokens are."""
    if not len(held) and not isinstance(values, RaggedTensor) and not len(values):
        return torch.zeros((0, spans.width))
    if isinstance(values, RaggedTensor):
        found, joined = torch.diff(values.offsets).cpu().numpy(), values.values
    else:
        found, joined = np.array([len(value) for value in values], np.int64), _joined(values)
    _check_lengths(found, at, held, spans)
    length = spans.lengths[at]
    columns = ranges_of(spans.starts[at] + at * spans.width, length)
    target = torch.from_numpy(columns).to(joined.device)
    source = torch.from_numpy(ranges_of(offsets_of(found)[:-1], length)).to(joined.device)
    flat = joined.new_full((len(held) * spans.width, *joined.shape[1:]), pad)
    flat = flat.index_copy(0, target, joined.index_select(0, source))
    return flat.view(len(held), spans.width, *flat.shape[1:])


def pad_sequences(values: Tensor, at: IntArray, spans: Spans, pad: float) -> Tensor:
    """Values of the rows at `at`, (rows, ...) -> in the order of rows; empty rows get `pad`."""
    if len(values) != len(at):
        raise InputError(f"got {len(values)} values for {len(at)} rows. Pass one per row.")
    real = np.flatnonzero(spans.lengths[at] > 0)
    target, source = (torch.from_numpy(index).to(values.device) for index in (at[real], real))
    restored = values.new_full((len(spans.lengths), *values.shape[1:]), pad)
    return restored.index_copy(0, target, values.index_select(0, source))


def _joined(values: Sequence[Tensor]) -> Tensor:
    if not len(values):
        raise InputError("no results were given, so their dtype is unknown. Pass one per row.")
    return torch.cat(list(values))


def _check_lengths(found: IntArray, at: IntArray, held: IntArray, spans: Spans) -> None:
    if len(found) != len(at):
        raise InputError(f"got {len(found)} results for {len(at)} rows. Pass one per row.")
    expected = spans.lengths[at]
    # An empty row runs as one token.
    wrong = np.flatnonzero((found != expected) & ~((expected == 0) & (found == 1)))
    if len(wrong):
        row = wrong[0]
        raise InputError(
            f"row {held[at[row]]} has {expected[row]} tokens, but its result has {found[row]} "
            f"entries. Return one entry per token."
        )
