"""Megatron: fields of `PackedSeqParams` for a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from evenstep.tensors.batch import Batch

__all__ = ["packed_seq_params"]


def packed_seq_params(batch: Batch) -> dict[str, Any]:
    """Keyword arguments for `PackedSeqParams(**packed_seq_params(batch))`; tokens are (1, slots).

    `cu_seqlens_q` counts real tokens only; `cu_seqlens_q_padded` holds the slots where sequences
    begin. The tail padding of a row is a sequence without real tokens. In an empty micro-batch
    padding counts as real, because kernels need at least one token. Flatten several rows of a
    static layout into one.

        lengths 3 and 2, aligned to 4, in a row of 12
        cu_seqlens_q         [0, 3, 5, 5]
        cu_seqlens_q_padded  [0, 4, 8, 12]
    """
    padded = batch.cu_seqlens
    real = padded if batch.is_empty else pad(batch.seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": batch.max_seqlen,
        "max_seqlen_kv": batch.max_seqlen,
    }
