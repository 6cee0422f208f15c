"""Collectives of one rank, of threads and of processes."""

from pathlib import Path

import pytest
import torch

from evenstep.errors import ConfigError
from evenstep.testing import run_ranks
from evenstep.train import Alone, Collective, Distributed
from tests.train import on_ranks
from tests.train.processes import results_of


def test_alone_a_sum_is_what_was_given() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert (Alone().rank, Alone().size) == (0, 1)
    assert Alone().all_reduce_sum(tensor) is tensor


def test_threads_sum_in_the_order_of_ranks_and_agree_bit_for_bit() -> None:
    values = [1e16, 1.0, -1e16, 1.0]

    def run(ranks: Collective) -> list[float]:
        own = torch.tensor(values[ranks.rank], dtype=torch.float64)
        return [float(ranks.all_reduce_sum(own)) for _ in range(50)]

    expected = ((values[0] + values[1]) + values[2]) + values[3]
    assert run_ranks(4, run) == [[expected] * 50] * 4


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(3, lambda ranks: (ranks.rank, ranks.size)) == [(0, 3), (1, 3), (2, 3)]


def test_what_a_rank_gave_may_be_overwritten_and_what_it_got_is_its_own() -> None:
    def run(ranks: Collective) -> float:
        own = torch.ones(())
        total = ranks.all_reduce_sum(own)
        own += 5
        total += ranks.rank
        return float(total)

    assert run_ranks(3, run) == [3.0, 4.0, 5.0]


def test_an_error_on_one_rank_releases_the_others_and_names_it() -> None:
    def run(ranks: Collective) -> None:
        if ranks.rank == 1:
            raise ValueError("broken")
        ranks.all_reduce_sum(torch.ones(()))

    with pytest.raises(ValueError, match="broken") as caught:
        run_ranks(3, run)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]


def test_a_rank_that_stops_early_is_an_error_and_no_hang() -> None:
    def run(ranks: Collective) -> None:
        for _ in range(3 - ranks.rank):
            ranks.all_reduce_sum(torch.ones(()))

    with pytest.raises(RuntimeError, match="Real ranks would hang"):
        run_ranks(2, run)


def test_ranks_that_reduce_other_shapes_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="Make the same calls"):
        run_ranks(2, lambda ranks: ranks.all_reduce_sum(torch.ones(ranks.rank + 1)))


def test_without_a_process_group_there_is_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"init_process_group first, or use Alone\(\)"):
        Distributed().all_reduce_sum(torch.ones(1))


def test_two_processes_reduce_a_bundle(tmp_path: Path) -> None:
    assert results_of(2, on_ranks.bundled, tmp_path / "ranks") == [(2.0, 2.0)] * 2
