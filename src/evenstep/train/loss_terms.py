"""LossTerms: what the loss functions of a step return for one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from evenstep.errors import ConfigError
from evenstep.tensors.batch import Batch, BatchShard
from evenstep.tensors.losses import Metric, Sums
from evenstep.train.normalization import ByLoss, weighted

if TYPE_CHECKING:
    from evenstep.train.runner import Loss


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The losses of a micro-batch, not normalized."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    found: dict[str, Sums | Tensor] = field(default_factory=dict)
    """As the functions returned them, without divisors."""
    divisors: dict[str, Tensor] = field(default_factory=dict)
    """Of losses that are normalized by what they return (`ByLoss`), by name."""

    @classmethod
    def of(
        cls,
        losses: Mapping[str, Loss],
        outputs: Any,
        batch: Batch,
        take: Callable[[Batch], Batch | BatchShard],
    ) -> LossTerms:
        """Call each loss with the outputs and its own weights; `take` is this rank's shard."""
        terms = cls()
        for name, loss in losses.items():
            returned: Any = loss.function(outputs, take(weighted(batch, loss.normalization)))
            each, divisor = returned if isinstance(returned, tuple) else (returned, None)
            _check_divisor(name, loss, divisor)
            if divisor is not None:
                terms.divisors.setdefault(loss.normalization.name, divisor.detach().double())
            terms.found[name] = each
            terms.sums[name] = each.loss if isinstance(each, Sums) else each
            if isinstance(each, Sums):
                prefix = f"{name}/" if len(losses) > 1 else ""
                terms.metrics.update({prefix + key: m for key, m in each.metrics.items()})
        return terms


def _check_divisor(name: str, loss: Loss, divisor: object) -> None:
    expected = isinstance(loss.normalization, ByLoss)
    if expected and not isinstance(divisor, Tensor):
        raise ConfigError(
            f"the loss {name!r} is normalized by the divisor that it returns, but it returned "
            f"none. Return (loss, divisor), two tensors."
        )
    if divisor is not None and not expected:
        raise ConfigError(
            f"the loss {name!r} returned a divisor, but its normalization is "
            f"{loss.normalization!r}. Set normalization=ByLoss(...), or return the loss alone."
        )
