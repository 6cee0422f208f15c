"""Batch: one micro-batch as tensors, and where its segments lie.

A *tile* is a run of consecutive slots of one row: a segment with its alignment padding, or the
tail padding of the row. Tiles cover every slot exactly once.

    a a a . | b b . . | . . . .      lengths 3 and 2, alignment 4, width 12: three tiles
    0         4         8       12   cu_seqlens
    0 1 2 3   0 1 2 3   0 1 2 3      places

Two numbers of a slot are equal unless `place_ids` says otherwise: `position_ids`, which the model
sees, and the place in the tile, which says what is padding and which token follows. The boundaries
of queries and of keys are equal unless `Keys` says otherwise. Both differ where samples share a
prefix (`Tree`), or ranks share a sample (`BatchExchange`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from evenstep.core.text import attempt, counted, fill, line, one_of
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.transport import Ranks, SumOverRanks, exchange, name_of

IGNORE_INDEX = -100

Alignment: TypeAlias = Literal["token", "sequence", "ragged"]
# label: token-aligned, shifted to the slot that predicts the token, as labels are
Aligned: TypeAlias = Alignment | Literal["label"]
Sharding: TypeAlias = Literal["context", "sequence"]
"""How a batch was sharded: by `shard_context` (zigzag) or `shard_sequence` (contiguous runs)."""

PER_SLOT = ("tokens", "targets", "labels", "position_ids", "segment_ids", "loss_weights")


class _Movable:
    """Base of dataclasses of tensors that are copied together."""

    __slots__ = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Copy to a device; `non_blocking` needs pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Copy to page-locked memory; `DataLoader(pin_memory=True)` calls this."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of the tensors until `stream`, which did not make them, has used it."""
        self._map(lambda tensor: tensor.record_stream(stream) or tensor)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, Mapping):
                return {key: changed(each) for key, each in value.items()}
            return value._map(change) if isinstance(value, _Movable) else value

        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        return replace(self, **{name: changed(getattr(self, name)) for name in names})  # type: ignore[type-var]


# Values that travel with the tokens ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """Declares a key of samples that a `Collator` adds to `Batch.extras`.

    token     one entry per token (advantages, old log-probs), laid out like the tokens
    sequence  one entry per sample (rewards, class labels), one per segment of the batch
    ragged    any number of entries (image patches), concatenated, with offsets

    >>> from evenstep.tensors import Collator
    >>> collate = Collator(extras={"reward": Extra(aligned="sequence")})
    """

    aligned: Alignment
    dtype: torch.dtype = torch.float32
    pad: float = 0.0
    shape: tuple[int, ...] = ()
    """Shape of one entry: () for a number, (8,) for a vector of eight."""

    def __post_init__(self) -> None:
        one_of("alignment", self.aligned, Alignment)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTensor(_Movable):
    """Concatenated entries of all segments; segment i has `values[offsets[i]:offsets[i + 1]]`.

    >>> ragged = RaggedTensor(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 3]))
    >>> ragged.values[ragged.offsets[0] : ragged.offsets[1]].tolist()
    [7, 8]
    """

    values: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Continuation(_Movable):
    """Per tile, the tokens that follow it where overflow='split' split its sample, with extras.

    sample a b c d e split at 3 -> segments [a b c] [d e]; d continues the first one

    The last slot of [a b c] predicts d. So the loss tokens of a sample, and every denominator, do
    not depend on where it was split.
    """

    counts: Tensor  # (tiles) int64: number of tokens held, 0 where the sample ends here
    values: Mapping[str, Tensor]  # (tiles, lookahead, ...) of tokens, targets and extras, by name

    @property
    def lookahead(self) -> int:
        """The most tokens held per tile."""
        return int(self.values["targets"].shape[1])


# Batches ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tree(_Movable):
    """What a batch holds besides its slots where samples share a prefix, which runs once.

        samples  a b c d | a b c e     slots  a b | c d | c e     keys  a b | a b c d | a b c e

    A model runs the slots. Losses, normalizations and results are of `samples`: the same samples
    whole and end to end, with labels, weights and extras of each.
    """

    samples: Batch
    slots: Tensor  # (tokens of samples) int64: the slot of each token

    def of_samples(self, values: Tensor) -> Tensor:
        """(1, slots, ...) values of the batch -> (1, tokens, ...) of the samples."""
        return values.flatten(0, 1).index_select(0, self.slots).unsqueeze(0)

    def of_slots(self, values: Tensor, count: int, fill: float) -> Tensor:
        """(1, tokens) values of the samples -> (1, count): the largest of those that share a slot.

        So a slot has its label where any of its samples has it in the loss.
        """
        spread = values.new_full((1, count), fill)
        return spread.scatter_reduce_(1, self.slots[None], values, "amax", include_self=False)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Keys(_Movable):
    """The keys of each tile, where a segment sees others in front of itself.

    Slots from rows × width on are those that other ranks send.
    """

    slots: Tensor  # (keys) int64: of each tile, the slots in front of its own, and its own
    cu_seqlens: Tensor  # (tiles + 1) int32: the keys of each tile
    max_seqlen: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchExchange(_Movable):
    """What ranks exchange in a wave that shares samples between them; see `core.plan.Exchange`.

    Every rank of the wave calls `join` in each attention layer, and `sum` alike.
    """

    slots: Tensor  # (sent) int64: those whose keys are sent, in the order of ranks
    sent: tuple[int, ...]  # to each rank
    received: tuple[int, ...]  # from each rank
    number: Tensor  # (tiles) int64: which sample of the wave, -1 for those that are whole
    sample_ids: tuple[int, ...]  # of the samples that the wave shares
    lengths: tuple[int, ...]  # of these samples
    digest: int  # the same on all ranks
    ranks: Ranks | None = None
    name: str = ""  # of the ranks, for operators

    def between(self, ranks: Any) -> BatchExchange:
        """The same between these ranks."""
        return replace(self, ranks=ranks, name=name_of(ranks))

    def join(self, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
        """k and v, (rows, heads, width, dim), and behind them what other ranks send.

        They become one row if other ranks send any. With none, the result still depends on the
        exchange, so that each rank takes part in its backward.
        """
        if not causal:
            raise ConfigError(
                "ranks share samples in this wave, whose tokens see only those before them, but "
                "this layer is not causal. Plan without sharing and context parallelism."
            )
        # (rows, heads, width, dim) -> (slots, heads, dim)
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (k, v)]
        self._connected()
        seen = exchange(*rows, self.slots, list(self.sent), list(self.received), self.name)
        parts = seen.split([x[0].numel() for x in rows], dim=1)
        if not sum(self.received):  # one row of zeros
            return k, v + parts[1].view(v.shape[1], 1, v.shape[3])
        k, v = (
            torch.cat((x, part.unflatten(1, x.shape[1:]))).transpose(0, 1)[None]
            for x, part in zip(rows, parts, strict=True)
        )
        return k, v

    def sum(self, by_tile: Tensor) -> Tensor:
        """(tiles, ...): values of tiles that are parts of one sample are summed over ranks."""
        shared = self.number >= 0
        count = len(self.sample_ids)
        row = torch.where(shared, self.number, count)
        table = by_tile.new_zeros((count + 1, *by_tile.shape[1:]))
        summed = SumOverRanks.apply(table.index_add(0, row, by_tile)[:-1], self._connected())
        shared = shared.view(-1, *(1,) * (by_tile.ndim - 1))
        return torch.where(shared, summed[row.clamp(max=count - 1)], by_tile)

    def _connected(self) -> Ranks:
        if self.ranks is None:
            raise InputError(
                "the samples of this batch are shared with other ranks. Run it with "
                "Runner(collective=Distributed()), or plan without sharing."
            )
        return self.ranks


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Slots(_Movable):
    """Base of `Batch` and `BatchShard`: tensors per slot and tensors per tile.

    A shard holds some slots of each row but describes the tiles of the whole batch: positions,
    tile numbers and lengths refer to the whole batch in both classes. Methods that need the next
    slot are in `Batch`.
    """

    tokens: Tensor  # (rows, width) int64
    targets: Tensor  # (rows, width) int64: prediction targets, not shifted
    labels: Tensor  # (rows, width) int64
    position_ids: Tensor  # (rows, width) int64: the positions that the model sees
    segment_ids: Tensor  # (rows, width) int64: the tile of each slot
    loss_weights: Tensor  # (rows, width) float32
    cu_seqlens: Tensor  # (tiles + 1) int32
    seqlens: Tensor  # (tiles) int64
    sample_ids: Tensor  # (tiles) int64
    starts: Tensor  # (tiles) int64
    loss_tokens: Tensor  # (tiles) int64: loss tokens of the tile's whole sample, 0 for a tail
    max_seqlen: int
    place_ids: Tensor | None = None  # (rows, width) int64: see `places`; None: the position_ids
    continuation: Continuation | None = None
    tree: Tree | None = None  # None if no slot is shared
    keys: Keys | None = None  # None if each segment sees itself alone
    exchange: BatchExchange | None = None  # None if ranks share no sample in this wave
    extras: Mapping[str, Tensor | RaggedTensor] = field(default_factory=dict)
    aligned: Mapping[str, Aligned] = field(default_factory=dict)  # of each extra

    @property
    def rows(self) -> int:
        """Number of rows, empty ones included. A shard has as many as its batch."""
        return int(self.tokens.shape[0])

    @property
    def width(self) -> int:
        """Slots per row; in a shard, those that it holds."""
        return int(self.tokens.shape[1])

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.tokens.device

    @property
    def is_empty(self) -> bool:
        """Whether the whole batch holds no real token."""
        return bool((self.sample_ids < 0).all())

    @property
    def places(self) -> Tensor:
        """(rows, width) int64: the place of each slot in its tile, from 0."""
        return self.position_ids if self.place_ids is None else self.place_ids

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Copy to a device; `non_blocking` needs pinned memory."""
        moved = _Movable.to(self, device, non_blocking)  # slots have made another class of this
        if self.device.type == "cpu" != moved.device.type:
            for here, there in zip(self._all_labels, moved._all_labels, strict=True):
                slots = _find_labels(here)
                slots = slots.pin_memory() if there.device.type == "cuda" else slots
                _note(there, slots.to(device, non_blocking=non_blocking))
        return moved

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of the tensors until `stream`, which did not make them, has used it."""
        _Movable.record_stream(self, stream)
        for labels in self._all_labels:
            if (slots := _noted(labels)) is not None:
                slots.record_stream(stream)

    @property
    def _all_labels(self) -> list[Tensor]:
        """Those of the slots and, where samples share a prefix, those of the samples."""
        return [self.labels] if self.tree is None else [self.labels, self.tree.samples.labels]

    @property
    def token_mask(self) -> Tensor:
        """(rows, width) bool: True for real tokens, False for padding."""
        flat = self.segment_ids.reshape(-1)
        return (self.places.reshape(-1) < self.seqlens[flat]).view_as(self.tokens)


_NOTES: MutableMapping[Tensor, tuple[int, Tensor]] = WeakIdKeyDictionary()
"""Of tensors that were copied to a device: their version then, and what the host knew of them."""


def _note(tensor: Tensor, known: Tensor) -> None:
    if not tensor.is_inference():  # these do not tell when they are changed
        _NOTES[tensor] = tensor._version, known


def _noted(tensor: Tensor) -> Tensor | None:
    """What `_note` was given, unless the tensor was changed since."""
    version, known = _NOTES.get(tensor, (None, None))
    return None if known is None or version != tensor._version else known


def _find_labels(labels: Tensor) -> Tensor:
    return (labels.flatten() != IGNORE_INDEX).nonzero()[:, 0]


def labelled_slots(labels: Tensor) -> Tensor:
    """(n) int64: the slots that have a label. The device is not waited for if the labels are those
    of a batch, as `Batch.to` copied them."""
    whole = labels if labels._base is None else labels._base
    slots = _noted(whole) if whole.numel() == labels.numel() else None
    return _find_labels(labels) if slots is None else slots


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class Batch(Slots):
    """One micro-batch: rows × width slots. Slots are numbered row by row and divided into tiles.

    A tile is a segment with its alignment padding, or the tail padding of a row. `cu_seqlens`
    holds the boundaries of the tiles and ends at rows × width. Per tile, `seqlens` is the number
    of real tokens (0 for a tail), `sample_ids` the sample (-1 for a tail) and `starts` the first
    token's index in the sample.

    `labels` are shifted: the label of a slot is the next token of its own sample, or -100 where
    there is none or it is masked; `loss_weights` is 0 there. Where a sample was split, the last
    slot of a segment predicts the first token of the next segment, which may be in another
    micro-batch. `continuation` holds these tokens; it is None if the batch needs none.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> batch.labels.tolist(), batch.cu_seqlens.tolist()
    ([[2, -100, -100]], [0, 2, 3])

    Where samples share a prefix, `tree` says how: `position_ids` then count on from the segment in
    front, `loss_weights` count the samples that predict the label, extras are those of `unshared`.
    Where ranks share a sample, `exchange` says what they exchange; `position_ids` count on, too.
    """

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Copy to a device; `non_blocking` needs pinned memory. What attention asks on the host is
        noted before the copy, so that it need not wait for the device."""
        moved = Slots.to(self, device, non_blocking)
        if self.device.type == "cpu" and moved.device.type != "cpu":
            here, there = Boundaries.of(self), Boundaries.of(moved)
            there.kept["one_per_row"], there.kept["full"] = here.one_per_row, self.is_full
            for ends, copied in zip(self._all_ends, moved._all_ends, strict=True):
                _note(copied, ends.clone())
        return moved

    @property
    def _all_ends(self) -> list[Tensor]:
        """The boundaries of the tiles, and those of their keys where they differ."""
        return [self.cu_seqlens] if self.keys is None else [self.cu_seqlens, self.keys.cu_seqlens]

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a real token."""
        kept = Boundaries.of(self).kept
        if "full" not in kept:
            kept["full"] = int(self.seqlens.sum()) == self.rows * self.width
        return bool(kept["full"])

    def between(self, ranks: Any) -> Batch:
        """The batch, whose wave exchanges keys between these ranks."""
        if self.exchange is None:
            return self
        tree, joined = self.tree, self.exchange.between(ranks)
        if tree is not None:
            tree = replace(tree, samples=tree.samples.between(ranks))
        return replace(self, exchange=joined, tree=tree)

    @property
    def unshared(self) -> Batch:
        """The samples whole and end to end, as losses see them; the batch itself without a tree."""
        return self if self.tree is None else self.tree.samples

    @property
    def next_tokens(self) -> Tensor:
        """(rows, width) int64: the token after each slot, in the loss or not; -100 for none."""
        following = self.unshared.ahead("tokens", fill=IGNORE_INDEX)
        if self.tree is None:
            return following
        return self.tree.of_slots(following, self.width, IGNORE_INDEX)

    def __repr__(self) -> str:
        """Sizes, fill and device in one line; for meta tensors, the shape only."""

        def contents() -> str:
            lengths = self.seqlens[self.sample_ids >= 0]
            if not len(lengths):
                return "empty"
            tokens, segments = int(lengths.sum()), counted(len(lengths), "segment")
            parts = (segments, counted(tokens, "token"), fill(tokens, self.rows * self.width))
            return ", ".join(parts)

        parts = (
            attempt(lambda: f"{counted(self.rows, 'row')} of {counted(self.width, 'slot')}"),
            attempt(contents),
            attempt(lambda: str(self.device)),
            f"extras {', '.join(self.extras)}" if self.extras else "",
        )
        return line("Batch", parts)

    def labels_at(self, distance: int = 1) -> Tensor:
        """Labels `distance` tokens ahead, for multi-token prediction.

        The last `distance` slots of each sample have no label. `labels_at(1)` is `labels`;
        `labels_at(0)` is the unshifted targets. For split samples, `Collator(lookahead=...)` must
        be at least `distance`.
        """
        if distance < 0:
            raise ConfigError(f"distance must be 0 or more, got {distance}.")
        return self.ahead("targets", distance, IGNORE_INDEX)

    def ahead(self, values: Tensor | str, distance: int = 1, fill: float = 0) -> Tensor:
        """Values shifted left by `distance` tokens within each sample; `fill` where none follows.

        segments [a b c] [d e] and distance 1 -> [b c .] [e .]

        `values` is "tokens", "targets", the name of a token-aligned extra, or any
        (rows, width, ...) tensor. By name, values continue in the next segment of a split sample.
        A tensor has no such continuation and ends with each segment.
        """
        ahead = self._ahead_at(slice(None), values, distance, fill)
        return ahead.view(self.rows, self.width, *ahead.shape[1:])

    def _ahead_at(
        self, slots: slice, values: Tensor | str, distance: int = 1, fill: float = 0
    ) -> Tensor:
        """What `ahead` returns at these slots, (n, ...): all of them, or those of one segment."""
        if self.tree is not None:
            raise InputError(
                "the samples of this batch share prefixes, so the token after a slot is that of a "
                "sample. Shift values of batch.unshared, or plan without prefixes."
            )
        column = self.column(values, distance) if isinstance(values, str) else values
        here, tiles = column.flatten(0, 1)[slots], self.segment_ids.flatten()[slots]
        left = self.seqlens[tiles] - self.places.flatten()[slots]  # tokens to the segment's end
        entry = (1,) * (here.ndim - 1)
        ahead = here.roll(-distance, 0).masked_fill_((left <= distance).view(-1, *entry), fill)
        after = self.continuation
        if after is None or not isinstance(values, str):
            return ahead
        index = torch.where(left > 0, distance - left, -1)  # padding has no continuation
        known = (index >= 0) & (index < after.counts[tiles])
        following = after.values[values][tiles, index.clamp(0, after.lookahead - 1)]
        return torch.where(known.view(-1, *entry), following, ahead)

    def column(self, name: str, distance: int = 1) -> Tensor:
        """The tokens, targets or token-aligned extra of that name, (rows, width, ...).

        Raises if values `distance` tokens ahead need more of a split sample than the batch holds.
        """
        columns = {"tokens": self.tokens, "targets": self.targets}
        columns |= {key: self.extras[key] for key, way in self.aligned.items() if way == "token"}
        if name not in columns:
            raise ConfigError(
                f"the extra {name!r} is aligned to {self.aligned.get(name)!r} and cannot be "
                f"shifted; expected one of the token-aligned columns {sorted(columns)}."
            )
        if self.continuation is not None and name not in self.continuation.values:
            raise InputError(
                f"{name!r} was added after collating, and this batch holds a split sample whose "
                f"next value of {name!r} is missing. Declare it in Collator(extras=...), or shift "
                f"it yourself and align it to 'label'."
            )
        if self.continuation is not None and distance > self.continuation.lookahead:
            raise ConfigError(
                f"a sample of this batch was split, and labels {distance} tokens ahead need more "
                f"than the {self.continuation.lookahead} tokens collated after the split. Set "
                f"Collator(lookahead={distance})."
            )
        return columns[name]

    def at_labels(self, *names: str) -> Batch:
        """The batch with these token-aligned extras shifted to the slots that predict their tokens.

        Losses shift extras themselves. Call this before sharding a batch for context or sequence
        parallelism, because the next token may then be on another rank.
        """
        extras, aligned = dict(self.extras), dict(self.aligned)
        for name in names:
            extras[name], aligned[name] = self.ahead(name), "label"
        return replace(self, extras=extras, aligned=aligned)

    @property
    def unshifted_labels(self) -> Tensor:
        """Labels for models that shift them (Hugging Face).

        The first label of each segment is ignored, so the last token of a segment does not predict
        the first token of the next. For a split sample this also drops the first label of every
        later segment, so the model has fewer labels than `loss_tokens`. `labels` has them all.
        """
        return self.labels_at(0).masked_fill(self.places == 0, IGNORE_INDEX)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchShard(Slots):
    """One rank's slots of a batch, rows × width / size, with the tiles of the whole batch.

    Labels are shifted before sharding, so they are correct at shard boundaries. Positions count
    from the start of the whole tile. `cu_seqlens` (with alignment) and `real_cu_seqlens` (without)
    describe the whole batch, as attention over gathered keys needs them; `local_cu_seqlens` and
    `local_seqlens` describe this shard. A shard is not a `Batch`: the token after a slot may be on
    another rank.

        shard = shard_context(batch, rank, size)
        logits = model(shard)  # (rows, width / size, vocabulary)
    """

    slot_ids: Tensor  # (rows, width / size) int64: slot numbers in the whole batch
    rank: int
    size: int
    sharding: Sharding
    """Which slots the ranks hold. Pass it to `restore_tokens` with the results of all ranks."""

    @property
    def real_cu_seqlens(self) -> Tensor:
        """(tiles + 1) int32: boundaries of the real tokens of the whole batch, without padding."""
        return functional.pad(self.seqlens.cumsum(0), (1, 0)).to(torch.int32)

    @property
    def local_cu_seqlens(self) -> Tensor:
        """(tiles + 1) int32: where each tile begins in this shard; it may have no slots here."""
        # Slots are in order: tiles [0 0 1 1 2] begin at [0, 2, 4] and end at 5.
        tiles = torch.arange(len(self.seqlens) + 1, device=self.device)
        return torch.searchsorted(self.segment_ids.reshape(-1), tiles).to(torch.int32)

    @property
    def local_seqlens(self) -> Tensor:
        """(tiles) int64: real tokens of each tile in this shard; they precede its padding."""
        before = functional.pad(self.token_mask.flatten().cumsum(0), (1, 0))  # each slot
        return before[self.local_cu_seqlens.long()].diff()

    def take(self, values: Tensor) -> Tensor:
        """This rank's slots of a (rows, width, ...) tensor of the whole batch.

        Example: `shard.take(batch.labels_at(2))` gives the labels two tokens ahead.
        """
        taken = values.flatten(0, 1).index_select(0, self.slot_ids.reshape(-1))
        return taken.view(*self.slot_ids.shape, *values.shape[2:])


# Where segments lie, for attention -------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Boundaries:
    """Rows × width slots, numbered row by row and divided into tiles that never cross rows.

    The queries of tile i attend to the keys of tile i of `keys`, aligned at their ends. These are
    the same boundaries, unless `seen` says that segments see others in front of themselves:

        queries  a b | c d      tiles of 2 and 2: the second segment also sees the first
        seen     a b | a b c d  tiles of 2 and 4
        index    0 1 | 0 1 2 3  the slots of these keys; None if they are gathered already

    Slots from rows × width on are the `received` ones, which other ranks send.

    What attention kernels derive from the boundaries is computed once and kept here, because all
    layers of a model use the same.

    >>> bounds = Boundaries(1, 5, torch.tensor([0, 3, 5], dtype=torch.int32), 3)
    >>> bounds.segment_ids.tolist(), bounds.lengths
    ([[0, 0, 0, 1, 1]], [3, 2])
    """

    rows: int
    width: int
    cu_seqlens: Tensor  # (tiles + 1) int32, from 0 to rows × width
    max_seqlen: int  # the longest tile, or more
    real: Tensor | None = None  # (tiles) bool: False for padding. None if there is no padding
    seen: Boundaries | None = None  # of the keys; None if each segment sees itself alone
    index: Tensor | None = None  # (keys) int64
    received: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, causal: bool = True) -> Boundaries:
        """The boundaries of a batch; the same object for the same batch. Without `causal`, the
        padding of a segment is a tile of its own: tokens would attend to it."""
        compiling = torch.compiler.is_compiling()
        bounds = None if compiling else _boundaries.get(batch)
        if bounds is None:
            # A compiled layer would be compiled again for a batch of one tile.
            real = None if compiling else batch.sample_ids >= 0
            kept = {"segment_ids": batch.segment_ids}
            bounds = cls(
                batch.rows, batch.width, batch.cu_seqlens, batch.max_seqlen, real, kept=kept
            )
            if (keys := batch.keys) is not None:
                received = 0 if batch.exchange is None else sum(batch.exchange.received)
                bounds = bounds.seeing(keys.slots, keys.cu_seqlens, keys.max_seqlen, received)
            if not compiling:
                _boundaries[batch] = bounds
        return bounds if causal else bounds._without_padding(batch.seqlens)

    def _without_padding(self, seqlens: Tensor) -> Boundaries:
        """Tiles of tokens and tiles of padding in turn; some are empty.

        cu_seqlens [0, 4, 8], seqlens [3, 4] -> [0, 3, 4, 8, 8]
        """
        if self.seen is not None:
            return self
        if "without_padding" not in self.kept:
            begins, ends = self.cu_seqlens[:-1], self.cu_seqlens[1:]
            inner = torch.stack((begins + seqlens.to(begins), ends), 1).flatten()
            both = Boundaries(self.rows, self.width, functional.pad(inner, (1, 0)), self.max_seqlen)
            if torch.compiler.is_compiling():
                return both
            self.kept["without_padding"] = both
        return cast(Boundaries, self.kept["without_padding"])

    def seeing(
        self, slots: Tensor, cu_seqlens: Tensor, longest: int, received: int = 0
    ) -> Boundaries:
        """The same queries with the keys of these slots, divided into tiles by `cu_seqlens`."""
        seen = Boundaries(1, len(slots), cu_seqlens, longest)
        kept = {name: self.kept[name] for name in ("segment_ids",) if name in self.kept}
        return replace(self, seen=seen, index=slots, received=received, kept=kept)

    @property
    def keys(self) -> Boundaries:
        """The boundaries of the keys: tile i of the queries sees tile i of these."""
        return self if self.seen is None else self.seen

    @property
    def tiles(self) -> int:
        """Number of tiles, empty ones included."""
        return int(self.cu_seqlens.shape[0]) - 1

    @property
    def segment_ids(self) -> Tensor:
        """(rows, width) int64: the tile of each slot."""
        if "segment_ids" not in self.kept:
            ends = self.cu_seqlens[1:]
            slots = torch.arange(self.rows * self.width, device=ends.device, dtype=torch.int32)
            tiles = torch.bucketize(slots, ends, right=True)
            self.kept["segment_ids"] = tiles.view(self.rows, self.width)
        return cast(Tensor, self.kept["segment_ids"])

    @property
    def lengths(self) -> list[int]:
        """Slots per tile, on the host. Waits for the device."""
        if "lengths" not in self.kept:
            self.kept["lengths"] = on_host(self.cu_seqlens).diff().tolist()
        return cast(list[int], self.kept["lengths"])

    @property
    def one_per_row(self) -> bool:
        """Whether every segment begins a row, so that only padding follows it there."""
        if "one_per_row" not in self.kept:
            begins = self.cu_seqlens[:-1]
            begins = begins if self.real is None else begins[self.real]
            self.kept["one_per_row"] = bool((begins % self.width == 0).all())
        return bool(self.kept["one_per_row"])


_boundaries: weakref.WeakKeyDictionary[Batch, Boundaries] = weakref.WeakKeyDictionary()


def on_host(cu_seqlens: Tensor) -> Tensor:
    """The same boundaries on the host, without waiting for the device if a `Batch` brought them."""
    ends = _noted(cu_seqlens)
    return cu_seqlens.cpu() if ends is None else ends


# What losses read ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One segment, or all slots of a batch or shard, with the same interface.

    A view of one segment holds its real tokens only. A view of all slots includes padding, where
    labels are -100 and weights 0. `segment_ids` starts at 0 in both: sum per sequence with
    `sum_by_segment`, and expand values per sequence to slots with `values[segment_ids]`.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors import Collator
    >>> plan = make_plan([2, 1], Recipe(layout=Packed(max_tokens=3)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2]}, {"input_ids": [3]}])
    >>> [view.tokens.tolist() for view in View.of_segments(batch)]
    [[1, 2], [3]]
    """

    source: Batch | BatchShard
    slots: slice
    tile: int | None  # None for all slots
    shared: Batch | None = None  # whose slots the outputs are of, if these are not of this view
    head: Any = None  # of the hidden states that the outputs are; None if they are logits

    @classmethod
    def of_all(cls, source: Batch | BatchShard) -> View:
        """A view of all slots, row by row."""
        return cls(source, slice(0, source.rows * source.width), None)

    @classmethod
    def of_segments(cls, batch: Batch) -> list[View]:
        """One view per segment, in the order of the batch."""
        # One transfer from the device for all segments.
        begin, length = batch.cu_seqlens[:-1].tolist(), batch.seqlens.tolist()
        real = (batch.sample_ids >= 0).nonzero().flatten().tolist()
        return [cls(batch, slice(begin[p], begin[p] + length[p]), p) for p in real]

    @property
    def tokens(self) -> Tensor:
        """(n) int64."""
        return self.flat(self.source.tokens)

    @property
    def labels(self) -> Tensor:
        """(n) int64, shifted: the next token, -100 where it is not in the loss."""
        return self.flat(self.source.labels)

    @property
    def loss_weights(self) -> Tensor:
        """(n) float32."""
        return self.flat(self.source.loss_weights)

    @property
    def position_ids(self) -> Tensor:
        """(n) int64."""
        return self.flat(self.source.position_ids)

    @property
    def segment_ids(self) -> Tensor:
        """(n) int64: the segment of each slot, starting at 0."""
        ids = self.flat(self.source.segment_ids)
        return ids if self.tile is None else torch.zeros_like(ids)

    @property
    def sample_ids(self) -> Tensor:
        """(n) int64: the sample of each slot, -1 for padding."""
        ids = self.flat(self.source.segment_ids)
        real = self.flat(self.source.token_mask)
        return torch.where(real, self.source.sample_ids[ids], -1)

    def flat(self, values: Tensor) -> Tensor:
        """The slots of this view of a (rows, width, ...) tensor, as (n, ...)."""
        return values.flatten(0, 1) if self.tile is None else values.flatten(0, 1)[self.slots]

    def extra(self, name: str) -> Tensor:
        """(n, ...): an extra per slot; a sequence-aligned one is repeated along its sequence."""
        aligned, value = self._declared(name, "token", "label", "sequence")
        return (
            self.by_segment(name)[self.segment_ids] if aligned == "sequence" else self.flat(value)
        )

    def ahead(self, name: str) -> Tensor:
        """(n, ...): an extra aligned to labels: slot i holds the value of token i + 1.

        Old log-probs and advantages are given per token, while the log-prob of a label is computed
        one slot before its token. Sequence-aligned extras are returned as by `extra`.
        """
        aligned, _ = self._declared(name, "token", "label", "sequence")
        if aligned != "token":
            return self.extra(name)
        if isinstance(self.source, BatchShard):
            raise InputError(
                f"the extra {name!r} must be shifted by one token, but in a batch shard the next "
                f"token may be on another rank. Shard batch.at_labels({name!r}) instead of batch."
            )
        return self.source._ahead_at(self.slots, name)

    def by_segment(self, name: str) -> Tensor:
        """A sequence-aligned extra, one entry per segment; in a view of all slots, per tile.

        Tiles of padding have 0. Entries are in the order of `sum_by_segment`.
        """
        _, value = self._declared(name, "sequence")
        real = self.source.sample_ids >= 0
        # tiles [a, tail, b] -> entries [0, -, 1]
        by_tile = value.new_zeros((len(real), *value.shape[1:]))
        by_tile.masked_scatter_(real.view(-1, *(1,) * (value.ndim - 1)), value)
        return by_tile if self.tile is None else by_tile[self.tile : self.tile + 1]

    def check_whole_samples(self) -> None:
        """Raise if the batch holds a part of a split sample. `sum_by_segment` is of whole samples
        where ranks share them."""
        split = (self.source.starts > 0) & (self.source.sample_ids >= 0)
        if self.source.continuation is not None:
            split = split | (self.source.continuation.counts > 0)
        if self.source.exchange is not None:
            split = split & (self.source.exchange.number < 0)
        if bool(split.any()):
            raise InputError(
                f"sample {int(self.source.sample_ids[split][0])} was split, but this loss is of "
                f"whole sequences. Set overflow to 'truncate' or 'drop', or raise max_tokens."
            )

    def ragged(self, name: str) -> RaggedTensor:
        """A ragged extra of the segments in this view."""
        value: RaggedTensor = self._declared(name, "ragged")[1]
        if self.tile is None:
            return value
        if self.source.sample_ids[self.tile] < 0:  # padding has no entries
            return RaggedTensor(value.values[:0], value.offsets.new_zeros(2))
        segment = int((self.source.sample_ids[: self.tile] >= 0).sum())
        begin, end = value.offsets[segment : segment + 2].tolist()
        offsets = value.offsets.new_tensor([0, end - begin])
        return RaggedTensor(value.values[begin:end], offsets)

    def sum_by_segment(self, values: Tensor) -> Tensor:
        """(n, ...) values -> sums per segment; in a view of all slots, per tile. 16-bit values are
        summed in float32, integers and bools in int64.

        Where ranks share a sample, its sum over all of them, with gradients. Then every rank of the
        wave must call it.
        """
        sums, exchange = self.sum_here(values), self.source.exchange
        return sums if exchange is None or self.tile is not None else exchange.sum(sums)

    def sum_here(self, values: Tensor) -> Tensor:
        """The same of this rank's segments alone."""
        if isinstance(self.source, BatchShard):
            raise InputError(
                "sum_by_segment needs whole sequences, but this view is of a batch shard. Join the "
                "outputs of all ranks first, or use a function of single tokens."
            )
        kind = torch.float32 if values.is_floating_point() else torch.int64
        values = values.to(torch.promote_types(values.dtype, kind))
        count = 1 if self.tile is not None else len(self.source.seqlens)
        sums = values.new_zeros((count, *values.shape[1:]))
        return sums.index_add(0, self.segment_ids, values)

    def _declared(self, name: str, *expected: Aligned) -> tuple[Aligned, Any]:
        """The alignment and the values of an extra; raises if it is not aligned as expected."""
        if name not in self.source.extras or name not in self.source.aligned:
            raise InputError(
                f"the batch has no extra {name!r}; it has "
                f"{', '.join(sorted(self.source.aligned)) or 'none'}. Declare it in "
                f"Collator(extras=...)."
            )
        aligned = self.source.aligned[name]
        if aligned not in expected:
            kind, reader = f"{aligned}-aligned", "extra"
            if aligned == "ragged":
                kind = reader = "ragged"
            raise ConfigError(
                f"the extra {name!r} is {kind}, but one that is aligned to {' or '.join(expected)} "
                f"is needed. Declare it so in Collator(extras=...), or read it with "
                f"view.{reader}({name!r})."
            )
        return aligned, self.source.extras[name]
