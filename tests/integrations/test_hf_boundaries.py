"""Boundaries from what transformers passes: who sees whom, for any rows."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep.errors import ConfigError
from tests.internals import Boundaries, Hints, _read, _traced

ROWS = st.lists(
    st.tuples(
        st.integers(0, 3), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 3)
    ),
    min_size=1,
    max_size=3,
)
"""Rows of left padding, the lengths of segments, right padding."""


def lay_out(rows: list[tuple[int, list[int], int]], one: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Padding mask, positions and the segment of each slot (-1 for padding), (rows, width) each."""
    width = max(left + sum(lengths[: 1 if one else None]) + right for left, lengths, right in rows)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    segments = torch.full((len(rows), width), -1)
    count = 0
    for row, (left, lengths, _) in enumerate(rows):
        at = left
        for length in lengths[: 1 if one else None]:
            mask[row, at : at + length] = True
            positions[row, at : at + length] = torch.arange(length)
            segments[row, at : at + length] = count
            at, count = at + length, count + 1
    return mask, positions, segments


def ends_of(segments: Tensor) -> Tensor:
    """Boundaries of segments and of padding, over all slots."""
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = begins.flatten().nonzero().flatten()
    return torch.cat((first, torch.tensor([segments.numel()]))).to(torch.int32)


def check(bounds: Boundaries, segments: Tensor) -> None:
    """Real tokens are in a tile with exactly the tokens of their segment."""
    tiles, flat = bounds.segment_ids.flatten(), segments.flatten()
    same = tiles[:, None] == tiles
    real = flat >= 0
    assert torch.equal(same[real], (flat[:, None] == flat)[real])
    ends = bounds.cu_seqlens
    assert ends.dtype == torch.int32
    assert ends[0] == 0
    assert ends[-1] == bounds.rows * bounds.width
    assert bounds.max_seqlen >= int(ends.diff().max())


def hints(segments: Tensor, **options: Any) -> Hints:
    rows, width = segments.shape
    return Hints(rows, width, torch.device("cpu"), **options)


@given(ROWS)
def test_a_mask_alone_separates_rows_from_their_padding(
    rows: list[tuple[int, list[int], int]],
) -> None:
    mask, positions, segments = lay_out(rows, one=True)
    for read in (_read, _traced):
        check(read(hints(segments, padding=mask)), segments)
        check(read(hints(segments, padding=mask.long(), positions=positions)), segments)


@given(ROWS)
def test_boundaries_or_positions_and_a_mask_separate_segments_and_padding(
    rows: list[tuple[int, list[int], int]],
) -> None:
    mask, positions, segments = lay_out(rows, one=False)
    ends = ends_of(segments)
    check(_read(hints(segments, cu_seqlens=ends.long(), padding=mask)), segments)
    check(_read(hints(segments, padding=mask, positions=positions)), segments)
    for read in (_read, _traced):
        found = read(hints(segments, cu_seqlens=ends, longest=int(ends.diff().max())))
        check(found, segments)


def test_positions_that_stand_still_in_an_image_do_not_divide_a_padded_row() -> None:
    """Cosmos3-Edge passes the temporal positions of its rows."""
    positions = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 3, 0, 1, 2, 3]])
    segments = torch.tensor([[0] * 8, [1] * 4 + [-1] * 4])

    check(_read(hints(segments, padding=segments >= 0, positions=positions)), segments)


def test_rows_may_share_positions_beside_a_mask() -> None:
    segments = torch.tensor([[0, 0, 0, -1], [1, 1, -1, -1]])

    check(_read(hints(segments, padding=segments >= 0, positions=torch.arange(4)[None])), segments)


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3))
def test_positions_alone_separate_segments(rows: list[list[int]]) -> None:
    _, positions, segments = lay_out([(0, lengths, 0) for lengths in rows], one=False)
    full = segments >= 0
    width = int(full.sum(1).min())  # no padding
    positions, segments = positions[:, :width], segments[:, :width]
    for read in (_read, _traced):
        check(read(hints(segments, positions=positions)), segments)
        four = positions.expand(4, -1, -1)
        check(read(hints(segments, positions=four)), segments)


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_padding_between_tokens_is_refused(mask: list[bool]) -> None:
    given_mask = torch.tensor([mask])
    tokens = [slot for slot, real in enumerate(mask) if real]
    whole = not tokens or tokens[-1] - tokens[0] + 1 == len(tokens)
    one = Hints(1, len(mask), torch.device("cpu"), padding=given_mask)
    if whole:
        check(_read(one), torch.where(given_mask, 0, -1))
        return
    with pytest.raises(ConfigError, match="padding between the tokens"):
        _read(one)


def test_with_a_mask_positions_that_stand_still_are_one_segment() -> None:
    positions = torch.tensor([[0, 1, 2, 2, 2, 4, 5, 0], [0, 1, 1, 1, 3, 0, 0, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1]]).bool()
    found = _read(Hints(2, 8, positions.device, padding=mask, positions=positions))
    # An image of three tokens, and padding; then segments of 5, 1 and 2 tokens.
    assert found.cu_seqlens.tolist() == [0, 7, 8, 13, 14, 16]


@pytest.mark.parametrize("inference", [True, False])
def test_boundaries_that_are_changed_in_place_are_read_again(inference: bool) -> None:
    with torch.inference_mode(inference):
        ends = torch.tensor([0, 3, 8])
        for second in (3, 5):
            ends[1] = second
            found = Hints(1, 8, ends.device, cu_seqlens=ends).boundaries()
            assert found.cu_seqlens.tolist() == [0, second, 8]
