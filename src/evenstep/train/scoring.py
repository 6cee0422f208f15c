"""Forward passes only: log-probs of samples, and the loss of held-out ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from evenstep.core.plan import MicroBatch, Plan, on_context_ranks
from evenstep.core.prefixes import find_prefixes
from evenstep.core.recipe import Recipe, Steps, check_recipe
from evenstep.core.step import Step
from evenstep.data.source import digest_of, length_of, loss_labels_of
from evenstep.errors import ConfigError, InputError
from evenstep.planning.planner import make_plan
from evenstep.tensors.batch import Batch
from evenstep.tensors.collate import Collator
from evenstep.tensors.head import Head, HeadOption, Wanted, positive, score
from evenstep.tensors.losses import Sums, select_output
from evenstep.tensors.restore import Key, restore_ragged
from evenstep.tensors.transport import CALLS
from evenstep.train.checks import (
    Groups,
    TokenIds,
    check_exchange,
    check_exchanged,
    check_fingerprints,
    check_tree,
    compare_plans,
    context_step,
    exchange_digests,
)
from evenstep.train.collectives import Alone, Bundle, Collective, gather_values
from evenstep.train.framework import Forward, device_of, evaluating, forward_of, reshard
from evenstep.train.model_head import Answer, Heads
from evenstep.train.normalization import (
    Constant,
    FixedLength,
    GroupMean,
    Normalization,
    first_tiles,
    weighted,
)
from evenstep.train.prefetch import Prefetch
from evenstep.train.runner import Runner
from evenstep.train.sharing import check_sharing
from evenstep.train.step_loss import LossValues, StepLoss, compute_losses

Result = TypeVar("Result")


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
    of `step.own_sample_ids`, without communication. Only where ranks share samples or divide them
    (`topology.cp`) does it need the `collective`: results are those of whole samples on each rank
    that runs a part.

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
        device=device_of(model) if device is None else device,
        prefetch=prefetch,
        check_prefixes=check_prefixes,
        heads=Heads(model, forward, able=not isinstance(layer, Head), must=layer == "model"),
        head=layer if isinstance(layer, Head) else None,
        options={"temperature": temperature, "wanted": wanted},
    )
    if isinstance(samples, Step):
        step = samples
        if collective is not None and samples.plan is not None:
            step = context_step(samples, collective)
        digests, plan = exchange_digests(step), step.plan
        may_share = bool(digests) or (plan is not None and plan.recipe.sharing is not None)
        useless = collective is not None and not may_share and step is samples
        if recipe is not None or useless or share_prefixes:
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
            compare_plans(step, collective)
        items = step if step.batches is None else step.batches
        if step.batches is None:
            check_sharing(scorer, step, plan, collective or Alone())
        results = scorer.run(items, collective, scorer.scores)
        scorer.heads.check()
        if step is samples and not digests:
            restored = restore_ragged(step, results, shifted=True)
            return list(restored.values.split(torch.diff(restored.offsets).tolist()))
        if plan is None or step.sample_ids is None or collective is None:
            raise ConfigError(
                "ranks share samples of this step, which was resumed within, so its plan is not "
                "known. Pass a whole step."
            )
        mine = [(0, collective.rank, position) for position in range(len(step))]
        scores = _of_all_ranks(plan, mine, results, collective)
        by_id = dict(zip(step.sample_ids.tolist(), scores, strict=True))
        return [by_id[number] for number in samples.own_sample_ids.tolist()]
    ranks = Alone() if collective is None else collective
    return _score_planned(scorer, samples, recipe, ranks, share_prefixes)


_SCORED = 4096  # samples that are planned together


def sum_log_probs(model: Any, samples: SampleSequence, recipe: Recipe, **options: Any) -> Tensor:
    """(samples) float64 on the host: the log-prob of the loss tokens of each sample, summed.

    For `dpo`: `reference_log_probs` per sequence. Labels and loss masks are those that a `Collator`
    reads; labels may hide tokens, but are the tokens themselves elsewhere. `options` are those of
    `compute_log_probs`. A part of the samples is planned at a time, so there may be any number.

    >>> from evenstep import Packed
    >>> from evenstep.demo.decoder import Decoder, DecoderShape
    >>> samples = [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, {"input_ids": [4]}]
    >>> recipe = Recipe(layout=Packed(max_tokens=4))
    >>> sum_log_probs(Decoder(DecoderShape(vocab=9)), samples, recipe).shape
    torch.Size([2])
    """
    recipe = replace(recipe, steps=Steps(samples=_SCORED))
    sums: list[Tensor] = []
    for start in range(0, len(samples), _SCORED):
        part = [samples[i] for i in range(start, min(start + _SCORED, len(samples)))]
        tokens = [{"input_ids": torch.tensor(each["input_ids"])} for each in part]
        scores = compute_log_probs(model, tokens, recipe, **options)
        for sample, log_probs in zip(part, scores, strict=True):
            ids, size = np.asarray(sample["input_ids"]), len(log_probs)
            counts = loss_labels_of(sample, 0, size, size)
            labels = np.asarray(sample.get("labels", ids))
            if (labels[1:][counts] != ids[1:][counts]).any():
                raise InputError(
                    f"sample {len(sums)} has labels that are not its tokens, whose log-probs are "
                    f"not computed. Set labels to -100 for tokens to ignore, and leave others."
                )
            sums.append(log_probs.double().cpu()[1:][torch.from_numpy(counts)].sum())
    return torch.stack(sums)


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
    topology = recipe.topology
    divides = topology.cp > 1 and ranks.size == topology.dp * topology.cp
    if ranks.size != topology.dp and not divides:
        raise ConfigError(
            f"the recipe plans for {topology.dp} ranks, but the collective has {ranks.size}. Set "
            f"topology.dp to {ranks.size}."
        )
    count = range(len(samples))
    prefixes = find_prefixes([samples[i]["input_ids"] for i in count]) if share else None
    plan = make_plan([length_of(samples[i]) for i in count], recipe, prefixes=prefixes)
    if plan.num_micro_batches == 0:  # no samples, or all are dropped
        shape = (2,) if scorer.options["wanted"] else ()
        return [
            torch.zeros((length, *shape), device=scorer.device) for length in plan.lengths.tolist()
        ]
    if divides:
        plan = on_context_ranks(plan)
    mine = {
        (step, ranks.rank, position): micro
        for step in range(plan.num_steps)
        for position, micro in enumerate(plan[step, ranks.rank])
    }
    items = [(micro, samples) for micro in mine.values()]
    if ranks.size > 1 and (recipe.sharing is not None or divides):
        text = f"{plan.lengths.tolist()} {exchange_digests([*mine.values()])}"
        check_fingerprints(digest_of(text, size=8).hex(), ranks)
    check_sharing(scorer, items, plan, ranks)
    scores = scorer.run(items, ranks, scorer.scores)
    scorer.heads.check()
    return _of_all_ranks(plan, mine, scores, ranks)


def _of_all_ranks(
    plan: Plan, keys: Iterable[Key], results: Iterable[Tensor], ranks: Collective
) -> list[Tensor]:
    """The scores of every sample of a plan, of which `results` are those of this rank."""
    with torch.no_grad():
        restored = restore_ragged(plan, dict(zip(keys, results, strict=True)), shifted=True)
        values = ranks.all_reduce_sum(restored.values).to(restored.values.device)
    return list(values.split(plan.lengths.tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPasses:
    """Forward passes over micro-batches, in evaluation mode."""

    model: Any
    collate: Callable[[MicroBatch, Any], Batch]
    forward: Forward
    device: torch.device | str | None
    prefetch: int
    check_prefixes: bool

    def run(
        self,
        items: Iterable[tuple[MicroBatch, Any] | Batch],
        ranks: Collective | None,
        compute: Callable[[Batch], Result],
        check: Callable[[Batch, MicroBatch | None], object] = lambda *_: None,
    ) -> list[Result]:
        """What `compute` returns for each batch; `check` gets it before it is moved."""
        token_ids = TokenIds(self.model)

        def batches() -> Iterator[Batch]:
            for item in items:
                micro = None if isinstance(item, Batch) else item[0]
                batch = item if isinstance(item, Batch) else self.collate(*item)
                check(batch, micro)
                batch = batch if ranks is None else batch.between(ranks)
                token_ids.note(batch)
                yield batch if self.device is None else batch.to(self.device, non_blocking=True)

        prefetch = Prefetch(batches(), self.prefetch)
        with evaluating(self.model), closing(iter(prefetch)) as prepared:
            try:
                return [compute(batch) for batch in prepared]
            except Exception as error:
                explained = token_ids.explain(error)
                if explained is not None:
                    raise explained from error
                raise
            finally:
                # The root of fully_shard stays gathered after a forward without backward, and
                # `zero_grad` and clipping of the model would then miss gradients of its shards.
                reshard(self.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scorer(ForwardPasses):
    """Computes the scores of batches. `options` are those of `score`."""

    heads: Heads
    head: Head | None
    """Of the hidden states that the model returns; None if it returns logits."""
    options: Any

    def scores(self, batch: Batch) -> Tensor:
        """(rows, width), or (rows, width, 2) with entropies."""
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


# The loss of held-out samples ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The loss of held-out samples, over all steps and ranks.

    loss          the weighted sum of all losses, as in training
    losses        each loss by name, not weighted
    denominators  what they were divided by, such as the number of loss tokens
    sources       the loss of the samples of each source, if there are sources; NaN without any
    metrics       of the loss functions, by name

        evaluation = runner.evaluate(held_out)
        print(evaluation.loss, evaluation.denominators["loss_tokens"])
    """

    loss: float
    losses: dict[str, float]
    denominators: dict[str, float]
    sources: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def evaluate(
    runner: Runner, stream: Iterable[Step], sources: ArrayLike | None = None
) -> Evaluation:
    """See `Runner.evaluate`."""
    numbers = None if sources is None else np.asarray(sources, np.int64)
    losses = {name: (each.normalization, each.weight) for name, each in runner.losses.items()}
    step_loss = StepLoss(losses)
    bundles: list[Bundle] = []
    by_group = any(isinstance(each, GroupMean) for each in step_loss.denominators.values())
    counted: list[Groups] = []  # of each step, the groups that are counted in a batch
    assert runner.forward is not None
    functions = [each.function for each in runner.losses.values()]
    heads = Heads.of_losses(runner.model, runner.forward, functions)
    passes = ForwardPasses(
        model=runner.model,
        collate=runner.collate,
        forward=runner.forward,
        device=device_of(runner.model) if runner.device is None else runner.device,
        prefetch=runner.prefetch,
        check_prefixes=runner.check_prefixes,
    )

    def check(batch: Batch, micro: MicroBatch | None) -> None:
        if batch.tree is not None:
            check_tree(runner.preprocess)
        if by_group:
            counted[-1].check(batch.unshared, micro)
        if batch.exchange is not None:
            check_exchange(batch.exchange, runner.collective, compared=True)

    def compute(batch: Batch) -> Bundle:
        groups = counted[-1] if by_group else None
        return _evaluate_batch(runner, heads, step_loss, numbers, groups, batch)

    for step in stream:
        step = step if runner.shard else context_step(step, runner.collective)
        compare_plans(step, runner.collective)
        if step.batches is None and runner.shard is None:
            check_sharing(runner, step, step.plan, runner.collective)
        counted += [Groups(step, split=False)] if by_group else []
        items = step if step.batches is None else step.batches
        parts = passes.run(items, runner.collective, compute, check)
        heads.check()
        bundles = [Bundle.merge([*bundles, *parts])]
    if not bundles:
        raise InputError("there is no step to evaluate. Pass a stream with at least one sample.")
    reduced = bundles[0].reduce(runner.collective)
    if by_group:
        _check_groups(counted, runner.collective)
    values = step_loss.finish(reduced)
    if values.empty:
        raise InputError("no token of these samples counts in the loss. Check their loss masks.")
    first = next(iter(runner.losses.values())).normalization
    by_source = [] if numbers is None else _of_sources(reduced, numbers, values, first)
    return Evaluation(
        loss=values.loss,
        losses=values.losses,
        denominators=values.denominators,
        sources=by_source,
        metrics={name: float(metric.value) for name, metric in values.metrics.items()},
    )


def _of_sources(
    reduced: Bundle, numbers: Any, values: LossValues, normalization: Normalization
) -> list[float]:
    """The loss of each source, divided as that of a step of its samples would be."""
    count = range(int(numbers.max()) + 1)
    sums, over = (
        [float(reduced.sums[f"source/{number}/{name}"]) for number in count]
        for name in ("sum", "amount")
    )
    total = values.denominators[normalization.name]
    if isinstance(normalization, Constant):
        over = [total if amount else 0.0 for amount in over]
    elif not math.isclose(sum(over), total, rel_tol=1e-6):
        raise InputError(
            f"sources need what each sample adds to the denominator, but that of "
            f"{normalization!r}, {total:g}, is not the sum of its weights, {sum(over):g}. Use "
            f"another normalization, or leave sources out."
        )
    pairs = zip(sums, over, strict=True)
    return [each / amount if amount else np.nan for each, amount in pairs]


def _check_groups(counted: list[Groups], ranks: Collective) -> None:
    """Raise on all ranks if a group of a step ran on two of them."""
    most = max((each.count for each in counted), default=0)
    sizes = gather_values(ranks, [len(counted), most])
    for number in range(int(max(steps for steps, _ in sizes))):
        groups = counted[number] if number < len(counted) else Groups(None, split=False)
        groups.check_ranks(int(max(each for _, each in sizes)), ranks)


def _evaluate_batch(
    runner: Runner, heads: Heads, step_loss: StepLoss, numbers: Any, groups: Groups | None,
    batch: Batch,
) -> Bundle:  # fmt: skip
    """The loss sums of one micro-batch, what they are divided by, and both by source."""
    batch = batch if runner.preprocess is None else runner.preprocess(batch)
    shard: Any = batch if runner.shard is None else runner.shard(batch)
    first = getattr(shard, "rank", 0) == 0  # of the ranks that share the batch
    if groups is not None:
        groups.here = first
    amounts, losses = step_loss.amounts(batch, first), runner.losses
    _, values, metrics = compute_losses(runner, heads, losses, batch, shard, amounts)
    sums: dict[str, Tensor] = {}
    for name, value in values.items():
        sums[name] = value.loss if isinstance(value, Sums) else value
        if isinstance(value, Sums) and value.by_tile is not None:
            sums[name] = value.by_sequence.double().sum()
    by_source: dict[str, Tensor] = {}
    if numbers is not None:
        name, loss = next(iter(losses.items()))
        by_source = _by_source(values[name], batch, loss.normalization, numbers)
    bundle = step_loss.bundle(sums, amounts, step_loss.scales(), metrics)
    return Bundle({**bundle.sums, **by_source}, bundle.metrics)


def _by_source(
    value: Any, batch: Batch, normalization: Normalization, numbers: Any
) -> dict[str, Tensor]:
    """The sum of the loss of each source, and what its samples add to the denominator."""
    if not isinstance(value, Sums) or value.by_tile is None:
        raise InputError(
            "sources need the loss of each sequence, but the loss function returned a sum of all. "
            "Return Sums of whole sequences (`PerSequence`), or leave sources out."
        )
    batch = weighted(batch, normalization).unshared
    real = batch.sample_ids >= 0
    if isinstance(normalization, FixedLength):
        by_tile = first_tiles(batch) * float(normalization.length)
    else:
        by_tile = batch.loss_weights.new_zeros(len(real), dtype=torch.float64)
        by_tile.index_add_(0, batch.segment_ids.flatten(), batch.loss_weights.flatten().double())
    source = torch.from_numpy(numbers[batch.sample_ids[real].cpu().numpy()]).to(real.device)
    of_all = torch.zeros(int(numbers.max()) + 1, dtype=torch.float64, device=real.device)
    loss = of_all.index_add(0, source, value.by_sequence.double())
    amount = of_all.index_add(0, source, by_tile[real].double())
    named = {"sum": loss, "amount": amount}
    return {
        f"source/{number}/{name}": each
        for name, values in named.items()
        for number, each in enumerate(values.unbind())
    }
