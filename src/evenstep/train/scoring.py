"""compute_log_probs: log-probs of samples by forward passes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.plan import Plan
from evenstep.core.recipe import Recipe
from evenstep.data.sources.source import length_of
from evenstep.errors import ConfigError
from evenstep.planning.planner import make_plan
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.tensors.collate import Collator
from evenstep.tensors.losses import label_log_probs
from evenstep.tensors.restore import restore_ragged
from evenstep.train.collectives import Alone, Collective
from evenstep.train.forwards import Forward, forward_of, logits_of
from evenstep.train.prefetch import Prefetch


def compute_log_probs(
    model: Any,
    samples: Sequence[Any],
    recipe: Recipe,
    *,
    collective: Collective | None = None,
    collate: Callable[[MicroBatch, Any], Batch] | None = None,
    forward: Forward | None = None,
    device: torch.device | str | None = None,
    prefetch: int = 1,
) -> list[Tensor]:
    """The log-prob of every token of every sample, given the tokens before it.

    Forward passes need less memory than training, so `recipe` may have a larger budget. Ranks
    share the work, and each gets the results of all samples, in the order given. Entry i belongs
    to token i. The first token, and tokens that the recipe drops or truncates, get 0.

    >>> from evenstep import Packed
    >>> from evenstep.demo.decoder import Decoder, DecoderShape
    >>> samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    >>> recipe = Recipe(layout=Packed(max_tokens=4))
    >>> [len(found) for found in compute_log_probs(Decoder(DecoderShape(vocab=9)), samples, recipe)]
    [3, 1]
    """
    ranks = Alone() if collective is None else collective
    run = forward_of(model) if forward is None else forward
    collator = Collator() if collate is None else collate
    if recipe.topology.dp != ranks.size:
        raise ConfigError(
            f"the recipe plans for {recipe.topology.dp} ranks, but the collective has "
            f"{ranks.size}. Set topology.dp to {ranks.size}."
        )
    plan = make_plan([length_of(sample) for sample in samples], recipe)
    if len(samples) == 0:
        return []
    results: dict[tuple[int, int, int], Tensor] = {}

    def batches() -> Iterator[tuple[tuple[int, int, int], Batch]]:
        for key, micro in _mine(plan, ranks.rank):
            batch = collator(micro, samples)
            yield key, batch if device is None else batch.to(device, non_blocking=True)

    with torch.no_grad(), closing(iter(Prefetch(batches(), prefetch))) as prepared:
        for key, batch in prepared:
            outputs = logits_of(run(model, batch))
            # All tokens, not only loss tokens.
            labels = batch.ahead("tokens", fill=IGNORE_INDEX)
            found = label_log_probs(outputs.flatten(0, 1), labels.flatten())
            results[key] = found.view(labels.shape)
        restored = restore_ragged(plan, results, shifted=True)
        values = ranks.all_reduce_sum(restored.values).to(restored.values.device)
    return list(values.split(plan.lengths.tolist()))


def _mine(plan: Plan, rank: int) -> Iterator[tuple[tuple[int, int, int], MicroBatch]]:
    for step in range(plan.num_steps):
        for position, micro in enumerate(plan[step, rank]):
            yield (step, rank, position), micro
