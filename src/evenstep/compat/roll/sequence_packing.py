"""Sequence packing of ROLL: the rows of one rank in packs of about equal work.

Unlike there, the cap on the tokens of a pack is hard, and all ranks have the same number of packs,
also those with fewer rows than packs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from evenstep.compat.over_ranks import most_over_ranks
from evenstep.compat.rank_packs import WORK, packs_of
from evenstep.compat.roll.data_proto import BatchError, DataProto
from evenstep.core.layout import Packed
from evenstep.core.ragged import IntArray, rounded_up
from evenstep.core.recipe import Recipe
from evenstep.core.text import one_of
from evenstep.errors import ConfigError, PlanError
from evenstep.planning.planner import make_plan

_UNIT = 16  # rows are padded to a multiple of this

Algorithm = Literal["none", "load_balance"]


@dataclass(kw_only=True)
class SequencePackingConfig:
    """The keys of `sequence_packing_args`.

    >>> SequencePackingConfig(algorithm="load_balance", max_packed_sequence_length_train=8192)
    SequencePackingConfig(algorithm='load_balance', max_packed_sequence_length_train=8192, \
max_packed_sequence_length_forward=None, min_num_micro_batches_train=1, \
min_num_micro_batches_forward=1)
    """

    algorithm: Algorithm = "none"
    max_packed_sequence_length_train: int | None = None
    max_packed_sequence_length_forward: int | None = None
    min_num_micro_batches_train: int = 1
    min_num_micro_batches_forward: int = 1

    def __post_init__(self) -> None:
        one_of("algorithm", self.algorithm, Algorithm)


class LoadBalancePacker:
    """Rows of one rank in packs of about equal work, at most so many tokens each.

    >>> LoadBalancePacker.calculate_workload(100)
    2467600.0
    """

    def __init__(self, config: SequencePackingConfig | None = None) -> None:
        self.config = SequencePackingConfig() if config is None else config

    @staticmethod
    def calculate_workload(seqlen: int) -> float:
        """The modelled work of a row: 24576 · L + L²."""
        return float(WORK.of_lengths(np.array([seqlen]))[0])

    def make_micro_batch_iter_for_sequence_packing(
        self,
        mini_batch: DataProto,
        tp_size: int,
        cp_size: int,
        vp_size: int,
        is_train: bool = False,
        dp_group: Any = None,
        micro_batch_size: int | None = None,
    ) -> Iterator[Any]:
        """The micro-batches of this rank; all ranks of `dp_group` have equally many.

        Their rows are in `meta_info["partition_indices"]`, and those of all in
        `mini_batch.meta_info["partition_indices_list"]`. A micro-batch without rows has
        `is_padding_batch`. `micro_batch_size` has no effect, as in ROLL.
        """
        unit = math.lcm(_UNIT, 2 * cp_size * tp_size if cp_size > 1 else tp_size)
        lengths = mini_batch.batch["attention_mask"].sum(-1).cpu().numpy()
        sizes = rounded_up(np.maximum(lengths, 1).astype(np.int64), unit)
        packs = self._packs(sizes, vp_size, is_train, dp_group)
        mini_batch.meta_info["partition_indices_list"] = packs
        for number, rows in enumerate(packs):
            chosen = mini_batch.select_idxs(rows) if rows else mini_batch.slice(0, 0)
            chosen.meta_info = {
                **mini_batch.meta_info,
                "micro_batch_idx": number,
                "is_padding_batch": not rows,
                "partition_indices": rows,
                "num_micro_batchs": len(packs),
                "mini_batch_size": len(mini_batch),
            }
            yield chosen

    def _packs(
        self, sizes: IntArray, vp_size: int, is_train: bool, dp_group: Any
    ) -> list[list[int]]:
        """The rows of each pack, as many packs as on every rank."""
        phase = "train" if is_train else "forward"
        name = f"max_packed_sequence_length_{phase}"
        most = getattr(self.config, name)
        if most is None:
            raise ConfigError(f"{name} is missing, and packs have at most so many tokens. Set it.")
        recipe = Recipe(layout=Packed(max_tokens=most), cost=WORK)
        try:
            own = max(make_plan(sizes, recipe).num_micro_batches, 1)
        except PlanError as error:
            raise BatchError(str(error)) from None
        own = max(own, getattr(self.config, f"min_num_micro_batches_{phase}"))
        count = rounded_up(_most_over_ranks(own, dp_group), max(vp_size, 1))
        filled = min(count, len(sizes))
        packs = packs_of(sizes, recipe, filled) if filled else []
        return packs + [[] for _ in range(count - filled)]

    @staticmethod
    def restore_results_order(
        results: Mapping[str, Tensor], partition_indices_list: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """Results in the order of packs -> in the order of rows. Numbers are left as they are."""
        order = torch.tensor([row for rows in partition_indices_list for row in rows])
        back = torch.argsort(order)
        return {
            name: value.index_select(0, back.to(value.device)) if value.ndim else value
            for name, value in results.items()
        }


def make_micro_batch_iter_for_sequence_packing(
    mini_batch: DataProto,
    tp_size: int,
    cp_size: int,
    vp_size: int,
    is_train: bool = False,
    dp_group: Any = None,
    micro_batch_size: int | None = None,
    config: SequencePackingConfig | None = None,
) -> Iterator[Any]:
    """The micro-batches of a rank: packs of equal work, or `micro_batch_size` rows in order.

    for micro_batch in make_micro_batch_iter_for_sequence_packing(batch, 1, 1, 1, config=config):
        ...
    """
    used = SequencePackingConfig() if config is None else config
    if used.algorithm == "load_balance":
        return LoadBalancePacker(used).make_micro_batch_iter_for_sequence_packing(
            mini_batch, tp_size, cp_size, vp_size, is_train, dp_group
        )
    return _in_order(mini_batch, micro_batch_size)


def restore_results_order(
    results: Mapping[str, Tensor],
    partition_indices_list: Sequence[Sequence[int]],
    config: SequencePackingConfig | None = None,
) -> dict[str, Tensor]:
    """Results of micro-batches, joined -> in the order of rows.

    >>> config = SequencePackingConfig(algorithm="load_balance")
    >>> restore_results_order({"loss": torch.tensor([10, 20])}, [[1], [0]], config)["loss"].tolist()
    [20, 10]
    """
    if config is None or config.algorithm == "none":
        return dict(results)
    return LoadBalancePacker.restore_results_order(results, partition_indices_list)


def _in_order(mini_batch: DataProto, size: int | None) -> Iterator[Any]:
    if size is None or size < 1:
        raise ConfigError(f"algorithm 'none' needs a micro_batch_size of 1 or more, got {size}.")
    count = -(-len(mini_batch) // size)
    mini_batch.meta_info.update(partition_indices_list=[], num_micro_batchs=count)
    for number in range(count):
        yield mini_batch.slice(number * size, min((number + 1) * size, len(mini_batch)))


def _most_over_ranks(count: int, group: Any) -> int:
    """The largest count of all ranks of the group."""
    return most_over_ranks([count], group)[0]
