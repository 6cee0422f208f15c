"""The largest numbers over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def most_over_ranks(numbers: Sequence[int], group: Any) -> list[int]:
    """The largest of each number over the ranks of the group, by one all-reduce.

    Without a group, the numbers themselves.
    """
    if group is None or not dist.is_initialized():
        return list(numbers)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    found = torch.tensor(list(numbers), device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in found.tolist()]
