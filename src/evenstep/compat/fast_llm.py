"""Fast-LLM's schedule runner with lazy micro-batches (its issue 510), implemented with `Runner`.

The names are those of the issue; Fast-LLM has not built it. A step pulls one micro-batch at a time,
preprocesses it on the device and runs it. Losses return `(local_loss, local_divisor)`, and all sums
are reduced at the end of the step in one all-reduce. The result is exact for micro-batches of any
size, because backwards are scaled by one constant per step, not by the tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from evenstep.core.plan import MicroBatch
from evenstep.core.text import truth_field, whole_field
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.tensors.collate import Collator
from evenstep.tensors.losses import Metric, Sums
from evenstep.train.collectives import Alone, Bundle, Collective
from evenstep.train.normalization import ByLoss
from evenstep.train.runner import Runner
from evenstep.train.step_loss import Loss

__all__ = [
    "LossDef",
    "ScheduleConfig",
    "ScheduleRunner",
    "collate_documents",
    "num_documents_in_batch",
    "num_labels_in_batch",
    "reduce_losses",
]

Pair: TypeAlias = tuple[Any, Tensor]
"""(local loss: a sum, or `Sums`; local divisor: what its batch adds to the denominator)"""
Preprocess: TypeAlias = Callable[..., Batch]
_DOCUMENTS = "num_documents"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The micro-batches of a step, and how they are normalized.

    With `per_micro_batch_normalization` each micro-batch is divided by its divisor, summed over
    ranks, times the number of micro-batches. This is another loss where divisors differ: sums 6 of
    3 labels and 4 of 1 label give 3.0 instead of 2.5.

    >>> ScheduleConfig(depth_first_micro_batches=4, breadth_first_micro_batches=2).num_inputs
    8
    """

    depth_first_micro_batches: int = 1
    breadth_first_micro_batches: int = 1
    per_micro_batch_normalization: bool = False

    def __post_init__(self) -> None:
        whole_field(self, "depth_first_micro_batches")
        whole_field(self, "breadth_first_micro_batches")
        truth_field(self, "per_micro_batch_normalization")

    @property
    def num_inputs(self) -> int:
        """Micro-batches per step on each rank."""
        return self.depth_first_micro_batches * self.breadth_first_micro_batches


@dataclass(frozen=True, slots=True)
class LossDef:
    """A loss of a step: a function (outputs, batch) -> (local loss, local divisor).

    The local loss is a sum over the batch. Losses with the same `divisor` share a denominator and
    return the same local divisor.

    >>> nll = LossDef("nll", lambda outputs, batch: (outputs.sum(), num_labels_in_batch(batch)))
    >>> pairs = [(torch.tensor(6.0), torch.tensor(3.0)), (torch.tensor(4.0), torch.tensor(1.0))]
    >>> nll.reduce(pairs).item()
    2.5
    """

    name: str
    function: Callable[[Any, Any], Pair]
    divisor: str = "num_labels_in_batch"
    weight: float = 1.0
    dtype: torch.dtype = torch.float32

    def reduce(
        self, losses: Sequence[tuple[Tensor, Tensor]], distributed: Collective | None = None
    ) -> Tensor:
        """The loss over the (local loss, local divisor) pairs of all micro-batches and ranks."""
        return reduce_losses({self: losses}, distributed)[self.name]


def reduce_losses(
    losses: Mapping[LossDef, Sequence[tuple[Tensor, Tensor]]],
    distributed: Collective | None = None,
) -> dict[str, Tensor]:
    """Each loss over all micro-batches and ranks, in one all-reduce; 0 if its divisor is 0.

    Losses with the same divisor share its sum.

    >>> pairs = [(torch.tensor(6.0), torch.tensor(3.0)), (torch.tensor(4.0), torch.tensor(1.0))]
    >>> reduce_losses({LossDef("nll", max): pairs, LossDef("z", max): pairs})["z"].item()
    2.5
    """
    sums: dict[str, Tensor] = {}
    for each, pairs in losses.items():
        zero = torch.zeros((), dtype=torch.float64)
        sums[f"loss/{each.name}"] = sum((loss.detach().double() for loss, _ in pairs), zero)
        sums[f"divisor/{each.divisor}"] = sum((by.detach().double() for _, by in pairs), zero)
    reduced = Bundle(sums).reduce(distributed or Alone()).sums
    found = {}
    for each in losses:
        value, by = reduced[f"loss/{each.name}"], reduced[f"divisor/{each.divisor}"]
        found[each.name] = torch.where(by == 0, 0.0, value / by).to(each.dtype)
    return found


def num_labels_in_batch(batch: Any, distance: int = 1) -> Tensor:
    """The labels of a batch, `distance` tokens ahead: the divisor of a loss over labels.

    >>> num_labels_in_batch(collate_documents([{"tokens": [5, 6, 7]}])).item()
    2
    """
    labels = batch.labels if distance == 1 else batch.labels_at(distance)
    return (labels != IGNORE_INDEX).sum()


def num_documents_in_batch(batch: Any) -> Tensor:
    """The documents of a batch that have labels, each counted once over all ranks.

    >>> num_documents_in_batch(collate_documents([{"tokens": [5, 6]}, {"tokens": [7]}])).item()
    1
    """
    counted = (batch.sample_ids >= 0) & (batch.starts == 0) & (batch.loss_tokens > 0)
    return counted.sum() * int(getattr(batch, "rank", 0) == 0)


def collate_documents(
    documents: Sequence[Mapping[str, Any]], pad_to_size: int | None = None
) -> Batch:
    """Documents end to end in one row: a micro-batch.

    A document has `tokens`, where negative ones are no labels, and optionally `loss_masking_spans`,
    (begin, end) pairs of tokens that are no labels.

    >>> collate_documents([{"tokens": [5, 6, 7], "loss_masking_spans": [(1, 2)]}]).labels.tolist()
    [[-100, 7, -100]]
    """
    samples = []
    for document in documents:
        tokens = torch.as_tensor(document["tokens"])
        labels = tokens.masked_fill(tokens < 0, IGNORE_INDEX)
        spans = document.get("loss_masking_spans") or ()
        samples.append({"input_ids": tokens, "labels": labels, "loss_masking_spans": spans})
    lengths = [len(sample["input_ids"]) for sample in samples]
    return Collator()(MicroBatch.one_row(lengths, pad_to_size), samples)


class ScheduleRunner:
    """Runs steps of micro-batches that are pulled one at a time.

    model             as in `Runner`
    losses            `LossDef`s of any number of divisors
    optimizer         steps and clears gradients after each finite step; None leaves them in `.grad`
    preprocess_batch  (batch, *, phase, iteration) -> Batch, run without gradient on the device just
                      before its micro-batch; for example the forward of a reference model, whose
                      log-probs it adds as an extra
    budget            the most tokens of a micro-batch; backwards are divided by the nearest power
                      of two, which keeps 16-bit gradients in their usual range
    options           further fields of `Runner`: `collective`, `device`, `forward`, `prefetch`
                      (default: 0, nothing is pulled before it runs), ...

    >>> from evenstep.demo import Decoder, DecoderShape
    >>> from evenstep.tensors import cross_entropy
    >>> def nll(logits, batch):
    ...     return cross_entropy()(logits, batch), num_labels_in_batch(batch)
    >>> runner = ScheduleRunner(Decoder(DecoderShape(vocab=9)), [LossDef("nll", nll)])
    >>> data = (collate_documents([{"tokens": [n, 2, 3]}]) for n in range(4))
    >>> losses, done, _, documents = runner.run_step(data, ScheduleConfig())
    >>> list(losses), done, documents
    (['nll'], True, 1)
    """

    def __init__(
        self,
        model: Any,
        losses: Sequence[LossDef],
        *,
        optimizer: Any = None,
        preprocess_batch: Preprocess | None = None,
        budget: int | None = None,
        **options: Any,
    ) -> None:
        if not losses or len({each.name for each in losses}) < len(losses):
            raise ConfigError("losses must be one or more LossDefs with different names.")
        self.losses, self.optimizer, self.budget = list(losses), optimizer, budget
        self.preprocess_batch, self._iteration = preprocess_batch, 1
        functions = [_counting(losses[0].function), *(each.function for each in losses[1:])]
        found = {
            each.name: Loss(function=run, normalization=ByLoss(each.divisor), weight=each.weight)
            for each, run in zip(losses, functions, strict=True)
        }
        self._exact = Runner(
            model=model,
            loss=found,
            mode="deferred",
            preprocess=None if preprocess_batch is None else self._preprocessed,
            **{"prefetch": 0, **options},
        )
        self._per_micro_batch = replace(self._exact, mode="per_micro_batch")

    def run_step(
        self,
        data_iterator: Iterator[Batch],
        schedule: ScheduleConfig,
        *,
        iteration: int = 1,
        documents_seen: int = 0,
        return_metrics: bool = False,
    ) -> tuple[dict[str, float], bool, dict[str, float] | None, int]:
        """(losses by name, whether the parameters were updated, metrics, documents of the step).

        Losses and documents are those of all ranks. Without an optimizer, the second is whether
        loss and gradient are finite. The metrics have `documents_seen` after this step.
        """
        given: object = data_iterator
        if not isinstance(given, Iterator):
            raise InputError(
                f"data_iterator is a {type(given).__name__}, so every step would begin it anew. "
                f"Pass iter(...) of it, made once before the first step."
            )
        self._iteration = iteration
        by_part = schedule.per_micro_batch_normalization
        runner = self._per_micro_batch if by_part else self._exact
        result = runner.run(_Pulled(data_iterator, schedule.num_inputs, self.budget))
        finite = result.finite and not result.skipped
        if self.optimizer is not None:
            if finite:
                self.optimizer.step()
            self.optimizer.zero_grad()
        prefix = f"{self.losses[0].name}/" if len(self.losses) > 1 else ""
        documents = int(result.metrics[prefix + _DOCUMENTS])
        metrics = None
        if return_metrics:
            metrics = {**result.to_dict(), "documents_seen": float(documents_seen + documents)}
        return result.losses, finite, metrics, documents

    def _preprocessed(self, batch: Batch) -> Batch:
        assert self.preprocess_batch is not None
        return self.preprocess_batch(batch, phase="training", iteration=self._iteration)


@dataclass(frozen=True, slots=True)
class _Pulled:
    """The next `count` batches of an iterator, pulled one at a time."""

    source: Iterator[Batch]
    count: int
    budget: int | None = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.count):
            try:
                yield next(self.source)
            except StopIteration:
                raise InputError(
                    f"the data ended after {number} of {self.count} micro-batches of a step. Run "
                    f"whole steps only, or use a smaller schedule for the last one."
                ) from None


def _counting(function: Callable[[Any, Any], Pair]) -> Callable[[Any, Any], Pair]:
    """The same loss, which also counts the documents of the batch."""

    def counted(outputs: Any, batch: Any) -> Pair:
        returned: Any = function(outputs, batch)
        if not isinstance(returned, tuple):
            return returned  # type: ignore[no-any-return]  # refused by the runner
        loss, divisor = returned
        documents = Metric.sum(num_documents_in_batch(batch).double())
        sums = loss if isinstance(loss, Sums) else Sums(loss, {}, None)
        return replace(sums, metrics={**sums.metrics, _DOCUMENTS: documents}), divisor

    return counted
