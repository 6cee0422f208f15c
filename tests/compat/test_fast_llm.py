"""The schedule runner of Fast-LLM's issue 510: lazy, and exact for micro-batches of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.compat.fast_llm import (
    LossDef,
    ScheduleConfig,
    ScheduleRunner,
    collate_documents,
    num_documents_in_batch,
    num_labels_in_batch,
    reduce_losses,
)
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import ByLoss, Loss, Runner
from tests.compat import fast_llm_steps
from tests.compat.fast_llm_steps import LOSSES, Cut, Document, on_rank, run
from tests.examples import examples
from tests.train.processes import results_of
from tests.train.steps import VOCABULARY, Gradient, distance, gradient_of, model_of

ALL = ["nll", "z", "documents", "ahead", "drift"]


def documents_of(lengths: list[int], seed: int) -> list[Document]:
    draw = torch.Generator().manual_seed(seed)
    found: list[Document] = []
    for n in lengths:
        spans = []
        if torch.rand((), generator=draw) < 0.5:
            begin = int(torch.randint(0, n, (), generator=draw))
            spans = [(begin, min(n, begin + 2))]
        tokens = torch.randint(0, VOCABULARY, (n,), generator=draw)
        found.append({"tokens": tokens, "loss_masking_spans": spans})
    return found


def cut_of(documents: list[Document], ranks: int, count: int, seed: int) -> Cut:
    """The documents in `count` micro-batches of random sizes on each rank; some may be empty."""
    draw = torch.Generator().manual_seed(seed)
    cut: Cut = [[[] for _ in range(count)] for _ in range(ranks)]
    for document in documents:
        rank = int(torch.randint(0, ranks, (), generator=draw))
        cut[rank][int(torch.randint(0, count, (), generator=draw))].append(document)
    return cut


def giant(documents: list[Document], names: list[str]) -> tuple[dict[str, float], int, Gradient]:
    """All documents as one micro-batch."""
    model = model_of()
    return (*run(model, [documents], names), gradient_of(model))


def check(found: Any, expected: Any) -> None:
    losses, documents, gradient = found
    assert losses == pytest.approx(expected[0], rel=1e-12, abs=1e-14)
    assert documents == expected[1]
    assert distance(gradient, expected[2]) < 1e-12


class TestIssue:
    """Micro-batch sums 6 of 3 labels and 4 of 1 label."""

    @staticmethod
    def step(lengths: list[int], sums: list[float], schedule: Any) -> tuple[float, float]:
        class Scaled(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

            def forward(self, batch: Any) -> Any:
                return self.scale

        values = iter(sums)
        loss = LossDef("nll", lambda x, batch: (x * next(values), num_labels_in_batch(batch)))
        model = Scaled()
        data = (collate_documents([{"tokens": range(n)}]) for n in lengths)
        found, *_ = ScheduleRunner(model, [loss], budget=4).run_step(data, schedule)
        return found["nll"], float(model.scale.grad)

    def test_lazy_micro_batches_have_the_exact_loss_and_gradient(self) -> None:
        schedule = ScheduleConfig(depth_first_micro_batches=2)
        assert self.step([4, 2], [6.0, 4.0], schedule) == (2.5, 2.5)

    def test_normalizing_each_micro_batch_is_another_loss(self) -> None:
        schedule = ScheduleConfig(depth_first_micro_batches=2, per_micro_batch_normalization=True)
        loss, gradient = self.step([4, 2], [6.0, 4.0], schedule)
        assert gradient == 3.0
        assert loss == 2.5  # the exact loss is reported

    def test_it_is_the_same_loss_for_equal_numbers_of_labels(self) -> None:
        for by_part in (False, True):
            schedule = ScheduleConfig(
                breadth_first_micro_batches=2, per_micro_batch_normalization=by_part
            )
            assert self.step([3, 3], [6.0, 4.0], schedule) == (2.5, 2.5)

    def test_pairs_are_reduced_in_one_exchange(self) -> None:
        calls = []

        class Watched:
            rank, size = 0, 1

            def all_reduce_sum(self, tensor: Tensor) -> Tensor:
                calls.append(tensor.numel())
                return tensor

        pairs = [(torch.tensor(6.0), torch.tensor(3)), (torch.tensor(4.0), torch.tensor(1))]
        losses = {LossDef(name, max): pairs for name in "ab"}
        losses[LossDef("c", max, "num_documents_in_batch")] = [(torch.tensor(6.0), torch.tensor(2))]
        losses[LossDef("d", max, "none")] = []
        found = reduce_losses(losses, Watched())
        assert {name: value.item() for name, value in found.items()} == {
            "a": 2.5, "b": 2.5, "c": 3.0, "d": 0.0,
        }  # fmt: skip
        assert len(calls) == 1


class TestLazy:
    def test_a_micro_batch_is_pulled_preprocessed_and_run_before_the_next(self) -> None:
        events: list[str] = []

        def data() -> Any:
            for n in range(6):
                events.append(f"pull {n}")
                yield collate_documents([{"tokens": [n, 1, 2]}])

        def hook(batch: Any, *, phase: str, iteration: int) -> Any:
            events.append(f"hook {int(batch.tokens[0, 0])} in {phase} {iteration}")
            return batch

        def forward(model: Any, batch: Any) -> Any:
            events.append(f"run {int(batch.tokens[0, 0])}")
            return model(batch)

        runner = ScheduleRunner(model_of(), [LOSSES["nll"]], preprocess_batch=hook, forward=forward)
        batches, schedule = data(), ScheduleConfig(depth_first_micro_batches=3)
        for iteration in (1, 2):
            runner.run_step(batches, schedule, iteration=iteration)
        assert events == [
            event
            for n in range(6)
            for event in (f"pull {n}", f"hook {n} in training {1 + n // 3}", f"run {n}")
        ]

    def test_a_step_that_the_data_cannot_fill_is_an_error(self) -> None:
        runner = ScheduleRunner(model_of(), [LOSSES["nll"]])
        data = iter([collate_documents([{"tokens": [1, 2]}])])
        with pytest.raises(InputError, match="ended after 1 of 2 micro-batches"):
            runner.run_step(data, ScheduleConfig(depth_first_micro_batches=2))
        with pytest.raises(InputError, match=r"data_iterator is a list, .* Pass iter"):
            runner.run_step([], ScheduleConfig())  # type: ignore[arg-type]


class TestExact:
    @examples(40)
    @given(
        lengths=st.lists(st.integers(1, 7), min_size=1, max_size=8),
        ranks=st.integers(1, 3),
        count=st.integers(1, 4),
        names=st.lists(st.sampled_from(ALL), min_size=1, max_size=5, unique=True),
        seed=st.integers(0, 999),
    )
    def test_any_cut_has_the_losses_and_gradient_of_one_giant_batch(
        self, lengths: list[int], ranks: int, count: int, names: list[str], seed: int
    ) -> None:
        documents = documents_of(lengths, seed)
        expected = giant(documents, names)
        cut = cut_of(documents, ranks, count, seed)
        for found in run_ranks(ranks, lambda each: on_rank(each, cut, names)):
            check(found, expected)

    def test_two_processes_have_those_of_one_giant_batch(self, tmp_path: Path) -> None:
        documents = documents_of([7, 1, 3, 6, 2, 5, 4], seed=3)
        cut = cut_of(documents, ranks=2, count=3, seed=1)
        names = [["nll"], ["nll", "documents"], ALL]
        found = results_of(2, fast_llm_steps.on_process, tmp_path / "ranks", cut, names)
        for outcomes in found:
            for each, of in zip(outcomes, [n for n in names for _ in range(2)], strict=True):
                check(each, giant(documents, of))

    def test_micro_batches_of_equal_divisors_are_exact_when_normalized_one_by_one(self) -> None:
        documents = [{"tokens": torch.arange(4) + n} for n in range(4)]
        cut: Cut = [[[documents[0]], [documents[1]]], [[documents[2]], [documents[3]]]]
        names = ["nll", "documents"]
        for found in run_ranks(2, lambda each: on_rank(each, cut, names, by_micro_batch=True)):
            check(found, giant(documents, names))


class TestSteps:
    def test_the_optimizer_steps_if_the_gradient_is_finite(self) -> None:
        model = model_of()
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        factor = [float("inf")]
        bad = LossDef("bad", lambda logits, batch: (logits.sum() * factor[0], torch.tensor(1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runner = ScheduleRunner(model, [bad], optimizer=optimizer)
        data = iter([collate_documents([{"tokens": [1, 2]}])] * 2)
        _, done, _, _ = runner.run_step(data, ScheduleConfig())
        assert not done
        assert torch.equal(torch.cat([p.flatten() for p in model.parameters()]), before)
        factor[0] = 1.0
        _, done, metrics, documents = runner.run_step(
            data, ScheduleConfig(), documents_seen=5, return_metrics=True
        )
        assert done
        assert not torch.equal(torch.cat([p.flatten() for p in model.parameters()]), before)
        assert metrics is not None
        assert (metrics["documents_seen"], documents) == (6.0, 1)
        assert all(p.grad is None for p in model.parameters())

    def test_a_loss_without_a_divisor_is_refused(self) -> None:
        without: Any = cross_entropy()
        runner = ScheduleRunner(model_of(), [LossDef("nll", without)])
        data = iter([collate_documents([{"tokens": [1, 2]}])])
        with pytest.raises(ConfigError, match=r"'nll' is normalized by the divisor.*returned none"):
            runner.run_step(data, ScheduleConfig())
        with pytest.raises(ConfigError, match="different names"):
            ScheduleRunner(model_of(), [LOSSES["nll"]] * 2)

    def test_a_divisor_needs_its_normalization_and_a_mode_that_waits_for_it(self) -> None:
        batch = collate_documents([{"tokens": [1, 2, 3]}])
        function: Any = LOSSES["nll"].function
        with pytest.raises(ConfigError, match="returned a divisor, but its normalization is Token"):
            Runner(model=model_of(), loss=function).run([batch])
        loss = {"nll": Loss(function=function, normalization=ByLoss("labels"))}
        for mode in ("known", "counted"):
            chosen: Any = mode
            with pytest.raises(ConfigError, match="but the loss function returns it"):
                Runner(model=model_of(), loss=loss, mode=chosen).run([batch])
        with pytest.raises(ConfigError, match="name of a total of plans"):
            ByLoss("loss_tokens")

    @pytest.mark.parametrize("field", ["depth_first_micro_batches", "breadth_first_micro_batches"])
    def test_a_schedule_without_micro_batches_is_refused(self, field: str) -> None:
        options: Any = {field: 0}
        with pytest.raises(ConfigError, match=field):
            ScheduleConfig(**options)


class TestDocuments:
    def test_labels_stay_in_their_document_and_spans_are_masked(self) -> None:
        batch = collate_documents(
            [
                {"tokens": [100, 101, 102], "loss_masking_spans": [(1, 2)]},
                {"tokens": [103, 104, 105]},
                {"tokens": [106, 107, 108], "loss_masking_spans": [(0, 2)]},
            ]
        )
        # Fast-LLM leaves out the last token, which has no label.
        assert batch.labels[0, :-1].tolist() == [-100, 102, -100, 104, 105, -100, -100, 108]
        assert batch.position_ids[0, :-1].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
        assert batch.cu_seqlens.tolist() == [0, 3, 6, 9]
        assert num_labels_in_batch(batch).item() == 4

    def test_negative_tokens_are_no_labels(self) -> None:
        batch = collate_documents([{"tokens": [100, 101, -1, -100, 104]}])
        assert batch.labels.tolist() == [[101, -100, -100, 104, -100]]

    @pytest.mark.parametrize(
        ("documents", "expected"),
        [
            ([{"tokens": [1, 2, 3, 4, 5]}], 1),
            ([{"tokens": [1, 2, 3, 4, 5], "loss_masking_spans": [(0, 5)]}], 0),
            ([{"tokens": [1, 2, 3]}, {"tokens": [4, 5, 6]}], 2),
            ([{"tokens": [1, 2, 3], "loss_masking_spans": [(0, 3)]}, {"tokens": [4, 5, 6]}], 1),
            ([{"tokens": [7]}], 0),
        ],
    )
    def test_documents_with_labels_are_counted(self, documents: Any, expected: int) -> None:
        batch = collate_documents(documents, pad_to_size=12)
        assert num_documents_in_batch(batch).item() == expected
