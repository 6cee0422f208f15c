"""compute_log_probs: log-probs of samples by forward passes only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.prefixes import find_prefixes
from evenstep.core.recipe import Recipe, check_recipe
from evenstep.core.step import Step
from evenstep.data.source import digest_of, length_of
from evenstep.errors import ConfigError, InputError
from evenstep.planning.planner import make_plan
from evenstep.tensors.batch import Batch
from evenstep.tensors.collate import Collator
from evenstep.tensors.head import Head, HeadOption, Wanted, positive, score
from evenstep.tensors.losses import select_output
from evenstep.tensors.restore import restore_ragged, sum_shared
from evenstep.tensors.transport import CALLS
from evenstep.train.checks import (
    TokenIds,
    check_exchanged,
    check_fingerprints,
    exchange_digests,
)
from evenstep.train.collectives import Alone, Collective
from evenstep.train.framework import Forward, device_of, forward_of
from evenstep.train.model_head import Answer, Heads
from evenstep.train.runner import Prefetch
from evenstep.train.sharing import check_sharing


class SampleSequence(Protocol):
    """Samples by number: a list, or a `RolloutBatch`."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> Any: ...


def compute_log_probs(
    model: Any,
    samples: SampleSequence | Step,
    recipe: Recipe | None = None,
    *,
    collective: Collective | None = None,
    collate: Callable[[MicroBatch, Any], Batch] | None = None,
    forward: Forward | None = None,
    device: torch.device | str | None = None,
    prefetch: int = 1,
    temperature: float = 1.0,
    entropy: bool = False,
    head: HeadOption = None,
    share_prefixes: bool = False,
    check_prefixes: bool = True,
) -> list[Tensor]:
    """The log-prob of every token of every sample, given the tokens before it.

    Forward passes need less memory than training, so `recipe` may have a larger budget. Ranks
    share the work, and each gets the results of all samples, in the order given. Entry i belongs
    to token i. The first token, and tokens that the recipe drops or truncates, get 0.

    A `Step` in place of samples and recipe gives the results of this rank's samples, in the order
    of `step.own_sample_ids`, without communication. Only where ranks share samples does it need
    the `collective`: results are those of whole samples on each rank that runs a part.

    Batches are moved to `device`; None: where the model's first parameter is. So are results.

    The model runs in eval mode, without dropout, and is in its earlier mode afterwards. Samples
    need `input_ids` only; other keys are ignored unless `collate` is given. Logits are divided by
    `temperature`. With `entropy`, each result is (tokens, 2): the log-prob, and the entropy of the
    distribution that predicts the token. `head` is that of `cross_entropy`. With `share_prefixes`,
    samples that begin with the same tokens run these once; `check_prefixes` compares two of them
    with whole samples, at first use of the model.

    >>> from evenstep import Packed
    >>> from evenstep.demo.decoder import Decoder, DecoderShape
    >>> samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    >>> recipe = Recipe(layout=Packed(max_tokens=4))
    >>> [len(each) for each in compute_log_probs(Decoder(DecoderShape(vocab=9)), samples, recipe)]
    [3, 1]
    """
    positive("temperature", temperature)
    wanted: Wanted = frozenset({"entropy"} if entropy else ())
    forward, layer = forward_of(model) if forward is None else forward, Head.of(head)
    scorer = _Scorer(
        model=model,
        collate=_collated if collate is None else collate,
        forward=forward,
        heads=Heads(model, forward, able=not isinstance(layer, Head), must=layer == "model"),
        device=device_of(model) if device is None else device,
        prefetch=prefetch,
        check_prefixes=check_prefixes,
        head=layer if isinstance(layer, Head) else None,
        options={"temperature": temperature, "wanted": wanted},
        ranks=collective,
    )
    if isinstance(samples, Step):
        digests, plan = exchange_digests(samples), samples.plan
        may_share = bool(digests) or (plan is not None and plan.recipe.sharing is not None)
        if recipe is not None or (collective is not None and not may_share) or share_prefixes:
            raise ConfigError(
                "a step is planned and holds this rank's samples only, so recipe, collective and "
                "share_prefixes have no effect. Leave them out."
            )
        if may_share and collective is None:
            raise ConfigError(
                "this step shares samples between ranks, which have to exchange them. Pass "
                "collective=Distributed()."
            )
        if collective is not None:
            text = digest_of(f"{samples.fingerprint} {digests}", size=8).hex()
            check_fingerprints(text, collective)
        items = samples if samples.batches is None else samples.batches
        if samples.batches is None:
            scorer.check(samples, samples.plan, collective or Alone())
        restored = restore_ragged(samples, scorer.results(items), shifted=True)
        if digests and collective is not None:
            restored = sum_shared(samples.micro_batches, restored, collective)
        return list(restored.values.split(torch.diff(restored.offsets).tolist()))
    ranks = Alone() if collective is None else collective
    return _score_planned(scorer, samples, recipe, ranks, share_prefixes)


def _score_planned(
    scorer: _Scorer, samples: SampleSequence, recipe: Recipe | None, ranks: Collective, share: bool
) -> list[Tensor]:
    """Plan the samples, score this rank's micro-batches and sum the results over ranks."""
    if recipe is None:
        raise ConfigError("recipe is missing. Pass a Recipe, or a Step in place of the samples.")
    check_recipe(recipe)
    if isinstance(samples, Mapping | Tensor):
        raise InputError(
            f"samples must be a sequence of samples, got {type(samples).__name__}. Pass a list of "
            f"{{'input_ids': tokens}}, or padded tensors as RolloutBatch({{'input_ids': ids, "
            f"'attention_mask': mask}})."
        )
    if scorer.collate is _collated and len(samples) and not isinstance(samples[0], Mapping):
        raise InputError(
            f"samples must be mappings with input_ids, got a {type(samples[0]).__name__}. Pass "
            f"[{{'input_ids': tokens}} for tokens in ...]."
        )
    if recipe.topology.dp != ranks.size:
        raise ConfigError(
            f"the recipe plans for {recipe.topology.dp} ranks, but the collective has "
            f"{ranks.size}. Set topology.dp to {ranks.size}."
        )
    count = range(len(samples))
    prefixes = find_prefixes([samples[i]["input_ids"] for i in count]) if share else None
    plan = make_plan([length_of(samples[i]) for i in count], recipe, prefixes=prefixes)
    if plan.num_micro_batches == 0:  # no samples, or all are dropped
        shape = (2,) if scorer.options["wanted"] else ()
        return [
            torch.zeros((length, *shape), device=scorer.device) for length in plan.lengths.tolist()
        ]
    mine = {
        (step, ranks.rank, position): micro
        for step in range(plan.num_steps)
        for position, micro in enumerate(plan[step, ranks.rank])
    }
    items = [(micro, samples) for micro in mine.values()]
    scorer.check(items, plan, ranks)
    results = scorer.results(items)
    with torch.no_grad():
        restored = restore_ragged(plan, dict(zip(mine, results, strict=True)), shifted=True)
        values = ranks.all_reduce_sum(restored.values).to(restored.values.device)
    return list(values.split(plan.lengths.tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scorer:
    """Forward passes over micro-batches. `options` are those of `score`."""

    model: Any
    collate: Callable[[MicroBatch, Any], Batch]
    forward: Forward
    heads: Heads
    device: torch.device | str | None
    prefetch: int
    check_prefixes: bool
    head: Head | None
    """Of the hidden states that the model returns; None if it returns logits."""
    ranks: Collective | None
    options: Any

    def check(self, items: Iterable[Any], plan: Plan | None, ranks: Collective) -> None:
        """Compare samples that share a prefix with whole ones, at first use of the model."""
        if self.check_prefixes:
            check_sharing(self.model, self.forward, self.collate, self.device, items, plan, ranks)

    def results(self, items: Iterable[tuple[MicroBatch, Any] | Batch]) -> list[Tensor]:
        """The scores of each micro-batch, (rows, width) or (rows, width, 2)."""
        token_ids = TokenIds(self.model)

        def batches() -> Iterator[Batch]:
            for item in items:
                batch = item if isinstance(item, Batch) else self.collate(*item)
                batch = batch if self.ranks is None else batch.between(self.ranks)
                token_ids.note(batch)
                yield batch if self.device is None else batch.to(self.device, non_blocking=True)

        with (
            torch.no_grad(),
            _evaluating(self.model),
            closing(iter(Prefetch(batches(), self.prefetch))) as prepared,
        ):
            torch.clear_autocast_cache()  # casts of weights before the last update
            try:
                scores = [self._scores(batch) for batch in prepared]
            except Exception as error:
                explained = token_ids.explain(error)
                if explained is not None:
                    raise explained from error
                raise
        torch.clear_autocast_cache()  # casts without a gradient
        return scores

    def _scores(self, batch: Batch) -> Tensor:
        labels = batch.next_tokens  # of all tokens, not only loss tokens

        def compute(outputs: Tensor, head: Head | None) -> list[Tensor]:
            scores = score(outputs.flatten(0, 1), labels.flatten(), head=head, **self.options)
            values = scores.log_probs
            if self.options["wanted"]:
                values = torch.stack((scores.log_probs, scores.entropy), -1)
            return [values.unflatten(0, labels.shape)]

        calls = 0 if batch.exchange is None else CALLS[batch.exchange.name]
        layer = self.heads.at(batch)
        if layer is None:
            outputs = self.forward(self.model, batch)
        else:
            outputs = layer.run(self.forward, self.model, batch, compute)
        check_exchanged(self.model, batch, calls)
        if isinstance(outputs, Answer):
            return outputs.results[0]
        outputs = select_output(outputs, "logits", batch.rows, batch.width)
        return compute(outputs, self.head)[0]


def _collated(micro: MicroBatch, samples: Any) -> Batch:
    """The batch of the tokens alone; a mask that hides tokens is still an error."""
    keys = ("input_ids", "attention_mask")
    whole = {i: samples[i] for i in set(micro.segments.sample.tolist())}
    needed = {i: {key: whole[i][key] for key in keys if key in whole[i]} for i in whole}
    return Collator()(micro, needed)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Eval mode, and each module's own mode again at the end. A plain function has no mode."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
