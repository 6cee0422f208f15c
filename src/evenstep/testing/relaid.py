"""Relaid: a batch in which one segment has another length, laid out anew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import Segments, offsets_of
from evenstep.tensors.batch import Batch, Extra, RaggedTensor
from evenstep.tensors.collate import Collator


@dataclass(frozen=True, slots=True, eq=False)
class Relaid:
    """A batch with other tokens in one segment, and the slots of all others, in order."""

    batch: Batch
    others: Tensor


def relaid(batch: Batch, tile: int, tokens: Tensor) -> Relaid:
    """The batch with `tokens` in the segment of this tile; rows are as wide as needed.

    Extras per token are cut, or their last entry is repeated; other extras stay.
    """
    here = batch.to("cpu")
    tiles = (here.sample_ids >= 0).nonzero()[:, 0].tolist()
    samples = [_sample(here, number, at) for number, at in enumerate(tiles)]
    changed = tiles.index(tile)
    samples[changed] = _resized(here, samples[changed], tokens.cpu())
    lengths = np.array([len(sample["input_ids"]) for sample in samples], np.int64)
    rows = (here.cu_seqlens[:-1].numpy()[tiles] // here.width).astype(np.int64)
    offsets = offsets_of(np.bincount(rows, minlength=here.rows).astype(np.int64))
    used = np.add.reduceat(np.append(lengths, 0), offsets[:-1]) * (np.diff(offsets) > 0)
    number = np.arange(len(samples))
    micro = MicroBatch(
        segments=Segments(number, np.zeros(len(samples), np.int64), lengths),
        row_offsets=offsets,
        width=max(here.width, int(used.max())),
        sample_lengths=lengths,
    )
    found = Collator(extras=_declared(here))(micro, samples)
    ids = torch.where(found.sample_ids < 0, -1, here.sample_ids[tiles][found.sample_ids.clamp(0)])
    others = found.token_mask & (found.sample_ids[found.segment_ids] != changed)
    moved = replace(found, sample_ids=ids, aligned=dict(here.aligned)).to(batch.device)
    return Relaid(moved, others.to(batch.device))


def _declared(batch: Batch) -> dict[str, Extra]:
    found = {}
    for name, extra in batch.extras.items():
        aligned: Any = {"label": "token"}.get(batch.aligned[name], batch.aligned[name])
        values = extra.values if isinstance(extra, RaggedTensor) else extra
        shape = tuple(values.shape[2 if aligned == "token" else 1 :])
        found[name] = Extra(aligned=aligned, dtype=values.dtype, shape=shape)
    return found


def _sample(batch: Batch, number: int, tile: int) -> dict[str, Tensor]:
    """Tokens and extras of one segment."""
    begin = int(batch.cu_seqlens[tile])
    slots = slice(begin, begin + int(batch.seqlens[tile]))
    sample = {"input_ids": batch.tokens.flatten()[slots]}
    for name, extra in batch.extras.items():
        if isinstance(extra, RaggedTensor):
            sample[name] = extra.values[extra.offsets[number] : extra.offsets[number + 1]]
        elif batch.aligned[name] == "sequence":
            sample[name] = extra[number]
        else:
            sample[name] = extra.flatten(0, 1)[slots]
    return sample


def _resized(batch: Batch, sample: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    last = len(sample["input_ids"]) - 1
    index = torch.arange(len(tokens)).clamp(max=last)
    per_token = {name for name in batch.extras if batch.aligned[name] in ("token", "label")}
    resized = {name: v[index] if name in per_token else v for name, v in sample.items()}
    return {**resized, "input_ids": tokens}
