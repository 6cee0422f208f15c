"""Rollouts as ROLL holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Data:
    """As ROLL's DataProto: slices share `meta_info`, and `reorder` works in place."""

    def __init__(self, batch: dict[str, Tensor], meta_info: dict[str, Any]) -> None:
        self.batch, self.meta_info = batch, meta_info

    def __len__(self) -> int:
        return len(self.batch["attention_mask"])

    def slice(self, start: int | None = None, end: int | None = None) -> Data:
        rows = slice(start, end)
        return Data({name: tensor[rows] for name, tensor in self.batch.items()}, self.meta_info)

    def select_idxs(self, idxs: list[int]) -> Data:
        return Data({name: tensor[idxs] for name, tensor in self.batch.items()}, self.meta_info)

    def reorder(self, indices: Tensor) -> None:
        self.batch = {name: tensor[indices] for name, tensor in self.batch.items()}


def rollouts(lengths: list[int], width: int) -> Data:
    """Row i holds i in every column; `response_mask` leaves out the first."""
    number = torch.arange(len(lengths))[:, None].expand(-1, width).clone()
    mask = (torch.arange(width) < torch.tensor(lengths, dtype=torch.int64)[:, None]).int()
    batch = {
        "input_ids": number,
        "attention_mask": mask,
        "response_mask": mask[:, 1:],
        "position_ids": number[:, None].expand(-1, 3, -1),
        "scores": torch.arange(len(lengths)),
    }
    return Data(batch, {"temperature": 0.9})
