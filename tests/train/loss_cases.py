"""Each loss with samples that have what it needs, and its definition in plain terms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, logsigmoid

from evenstep import Recipe, Topology, find_prefixes, make_plan
from evenstep.tensors import (
    Batch,
    Collator,
    Extra,
    distillation,
    dpo,
    load_balancing,
    reward_model,
    value_loss,
)
from evenstep.testing import run_ranks
from evenstep.train import (
    AllTokens,
    Collective,
    GroupMean,
    Normalization,
    Runner,
    SequenceMean,
    TokenMean,
    expert_frequencies,
)
from tests.internals import Layout, LossFunction, Overflow, Scope

torch.set_num_threads(1)

VOCABULARY, TOP, EXPERTS, LAYERS, CHOSEN = 7, 3, 5, 2, 2
F64 = torch.float64
TOKEN = ("old_values", "returns", "reference_log_probs")
COLLATOR = Collator(
    extras={
        **{name: Extra(aligned="token", dtype=F64) for name in TOKEN},
        "group": Extra(aligned="sequence", dtype=torch.int64),
        "chosen": Extra(aligned="sequence"),
        "margin": Extra(aligned="sequence", dtype=F64),
        "teacher_log_probs": Extra(aligned="token", dtype=F64, shape=(TOP,)),
        "teacher_ids": Extra(aligned="token", dtype=torch.int64, shape=(TOP,)),
    }
)
NARROWED = (*TOKEN, "margin", "teacher_log_probs")
FULL = Collator(extras={"teacher_logits": Extra(aligned="token", dtype=F64, shape=(VOCABULARY,))})


def samples_of(lengths: Sequence[int], seed: int = 0, masked: float = 0.3) -> list[dict[str, Any]]:
    """Samples 2i and 2i + 1 are a pair."""
    rng = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        logits = torch.from_numpy(rng.normal(size=(length, VOCABULARY)))
        top = logits.log_softmax(-1).topk(TOP)
        samples.append(
            {
                "input_ids": rng.integers(0, VOCABULARY, length),
                "loss_mask": rng.random(length) >= masked,
                **{name: rng.normal(-1, 1, length) for name in TOKEN},
                "group": number // 2,
                "chosen": float(number % 2 == (number // 2 + seed) % 2),
                "margin": float(rng.random()),
                "teacher_log_probs": top.values,
                "teacher_ids": top.indices,
                "teacher_logits": logits,
            }
        )
    return samples


def narrowed(case: Case, samples: list[dict[str, Any]], dtype: torch.dtype) -> Case:
    """The case with extras of this dtype, to which the samples are rounded."""
    extras = dict(case.collate.extras)
    for name in set(NARROWED) & extras.keys():
        extras[name] = replace(extras[name], dtype=dtype)
        for sample in samples:
            sample[name] = torch.as_tensor(sample[name]).to(dtype).double()
    return replace(case, collate=Collator(extras=extras))


class Table(nn.Module):  # type: ignore[misc]
    """Outputs that depend on the token and its position."""

    def __init__(self, *shape: int, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn((VOCABULARY, *shape), generator=random, dtype=F64))

    def of(self, tokens: Any, positions: Tensor) -> Tensor:
        factor = torch.cos(0.3 * positions.to(F64))
        found = self.table[torch.as_tensor(tokens)]
        return found * factor.view(*factor.shape, *(1,) * (found.ndim - factor.ndim))

    def forward(self, batch: Any) -> Tensor:
        return self.of(batch.tokens, batch.position_ids)

    def alone(self, sample: dict[str, Any]) -> Tensor:
        return self.of(sample["input_ids"], torch.arange(len(sample["input_ids"])))


# Definitions ------------------------------------------------------------------------------------


def tokens_of(sample: dict[str, Any]) -> list[int]:
    """Positions of the loss tokens."""
    return [i for i in range(1, len(sample["input_ids"])) if sample["loss_mask"][i]]


def mean(values: list[Tensor], model: Table) -> Tensor:
    return torch.stack(values).mean() if values else model.table.sum() * 0


def value_by_hand(model: Table, samples: list[dict[str, Any]]) -> Tensor:
    values = []
    for sample in samples:
        outputs = model.alone(sample)
        for i in tokens_of(sample):
            v, old, target = outputs[i - 1, 0], sample["old_values"][i], sample["returns"][i]
            near = v.clamp(old - 0.5, old + 0.5)
            values.append(torch.maximum((v - target) ** 2, (near - target) ** 2) / 2)
    return mean(values, model)


def pairs_of(samples: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(chosen, rejected) of each group with a loss token."""
    found = []
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        if tokens_of(first) or tokens_of(second):
            found.append((first, second) if first["chosen"] else (second, first))
    return found


def log_ratio(model: Table, sample: dict[str, Any], average: bool, reference: bool) -> Tensor:
    log_probs = model.alone(sample).log_softmax(-1)
    total = model.table.sum() * 0
    for i in tokens_of(sample):
        total = total + log_probs[i - 1, sample["input_ids"][i]]
        if reference:
            total = total - sample["reference_log_probs"][i]
    return total / max(len(tokens_of(sample)), 1) if average else total


def dpo_by_hand(model: Table, samples: list[dict[str, Any]], **options: Any) -> Tensor:
    beta, margin = options.get("beta", 0.1), options.get("margin", 0.0)
    e = options.get("label_smoothing", 0.0)
    which = options.get("loss", "sigmoid")
    average, reference = options.get("average", which == "ipo"), options.get("reference", True)
    values = []
    for one, other in pairs_of(samples):
        a, b = (log_ratio(model, each, average, reference) for each in (one, other))
        gap = beta * (a - b) - margin
        values.append(
            {
                "sigmoid": -(1 - e) * logsigmoid(gap) - e * logsigmoid(-gap),
                "robust": (-(1 - e) * logsigmoid(gap) + e * logsigmoid(-gap)) / (1 - 2 * e),
                "hinge": torch.relu(1 - gap),
                "ipo": (a - b - 1 / (2 * beta)) ** 2,
                "apo_zero": 1 - torch.sigmoid(beta * a) + torch.sigmoid(beta * b),
                "apo_down": torch.sigmoid(beta * a) + 1 - torch.sigmoid(beta * (a - b)),
                "sppo_hard": (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2,
            }[which]
        )
    return mean(values, model)


def reward_by_hand(model: Table, samples: list[dict[str, Any]]) -> Tensor:
    values = []
    for one, other in pairs_of(samples):
        c, r = (model.alone(each)[-1, 0] for each in (one, other))
        values.append(-logsigmoid(c - r - one["margin"]) + 0.01 * (c + r) ** 2)
    return mean(values, model)


def divergence_by_hand(t: Tensor, s: Tensor, which: str, beta: float) -> Tensor:
    """Of two vectors of probabilities."""
    if which == "forward_kl":
        return kl_div(s.log(), t, reduction="sum")
    if which == "reverse_kl":
        return (s * (s.log() - t.log())).sum()
    mixed = beta * t + (1 - beta) * s
    first, second = (kl_div(mixed.log(), each, reduction="sum") for each in (t, s))
    return beta * first + (1 - beta) * second


def distillation_by_hand(
    model: Table, samples: list[dict[str, Any]], which: str, rest: str | None
) -> Tensor:
    values = []
    for sample in samples:
        logits = model.alone(sample)
        for i in tokens_of(sample):
            scale = 1.0 if rest else 2.0
            s = (logits[i - 1] / scale).softmax(-1)
            if rest is None:
                t = (sample["teacher_logits"][i - 1] / 2.0).softmax(-1)
            else:
                ids, t = sample["teacher_ids"][i], sample["teacher_log_probs"][i].exp()
                s = s[ids]
                if rest == "bucket":
                    t, s = (torch.cat((each, 1 - each.sum(0, keepdim=True))) for each in (t, s))
                else:
                    t, s = t / t.sum(), s / s.sum()
            values.append(divergence_by_hand(t, s, which, 0.3))
    return mean(values, model)


def balance_by_hand(
    model: Table, samples: list[dict[str, Any]], over: str, layers: str, every: bool
) -> Tensor:
    """`every` counts all tokens, else those whose next token is a loss token."""
    sets = []
    for sample in samples:
        kept = range(len(sample["input_ids"])) if every else [i - 1 for i in tokens_of(sample)]
        sets.append(model.alone(sample)[list(kept)])
    sets = [each for each in sets if len(each)]
    if not sets:
        return model.table.sum() * 0
    if over == "step":
        return balance_of(torch.cat(sets), layers)
    return torch.stack([balance_of(each, layers) for each in sets]).mean()


def balance_of(logits: Tensor, layers: str) -> Tensor:
    """(tokens, layers, experts)."""
    p = logits.softmax(-1)
    best = nn.functional.one_hot(p.topk(CHOSEN).indices, EXPERTS).sum(-2)
    f, mean_p = best.to(F64).mean(0) / CHOSEN, p.mean(0)
    if layers == "joint":
        f, mean_p = f.mean(0), mean_p.mean(0)
    return EXPERTS * (f * mean_p).sum() / (LAYERS if layers == "each" else 1)


# Cases ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A loss, what it is divided by, the outputs it needs and its definition."""

    loss: Callable[[Table, list[Batch], Collective], LossFunction]
    definition: Callable[[Table, list[dict[str, Any]]], Tensor]
    shape: tuple[int, ...] = (VOCABULARY,)
    normalization: Normalization = field(default_factory=GroupMean)
    collate: Collator = COLLATOR


def _given(loss: LossFunction) -> Callable[..., LossFunction]:
    return lambda *_: loss


def _dpo(**options: Any) -> Case:
    return Case(_given(dpo(**options)), lambda m, s: dpo_by_hand(m, s, **options))


def _distilled(which: Any, rest: Any) -> Case:
    loss = distillation(
        divergence=which, beta=0.3, temperature=1.0 if rest else 2.0, rest=rest or "bucket"
    )
    return Case(
        _given(loss),
        lambda m, s: distillation_by_hand(m, s, which, rest),
        normalization=TokenMean(),
        collate=COLLATOR if rest else FULL,
    )


def _balanced(over: Any, layers: Any, normalization: Normalization) -> Case:
    def loss(model: Table, batches: list[Batch], ranks: Collective) -> LossFunction:
        if over == "sequence":
            return load_balancing(top_k=CHOSEN, over=over, layers=layers)
        shares = expert_frequencies(
            model, batches, top_k=CHOSEN, forward=lambda m, b: m(b),
            normalization=normalization, collective=ranks,
        )  # fmt: skip
        return load_balancing(top_k=CHOSEN, over=over, layers=layers, frequencies=shares)

    every = isinstance(normalization, AllTokens)
    return Case(
        loss,
        lambda m, s: balance_by_hand(m, s, over, layers, every),
        shape=(LAYERS, EXPERTS),
        normalization=normalization,
    )


CASES: dict[str, Case] = {
    "value": Case(
        _given(value_loss(clip=0.5)), value_by_hand, shape=(1,), normalization=TokenMean()
    ),
    "dpo": _dpo(),
    "dpo smoothed": _dpo(beta=0.5, label_smoothing=0.2, margin=0.3),
    "dpo robust": _dpo(loss="robust", label_smoothing=0.1),
    "dpo hinge": _dpo(loss="hinge", beta=0.7),
    "ipo": _dpo(loss="ipo"),
    "apo zero": _dpo(loss="apo_zero"),
    "apo down": _dpo(loss="apo_down"),
    "sppo": _dpo(loss="sppo_hard"),
    "simpo": _dpo(beta=2.0, reference=False, average=True, margin=0.5),
    "reward model": Case(
        _given(reward_model(center_weight=0.01, margins=True)), reward_by_hand, shape=(1,)
    ),
    **{
        f"{which} {rest or 'logits'}": _distilled(which, rest)
        for which in ("forward_kl", "reverse_kl", "jsd")
        for rest in (None, "bucket", "renormalize")
    },
    "balance of a step": _balanced("step", "each", AllTokens()),
    "balance of a step, joint": _balanced("step", "joint", AllTokens()),
    "balance of loss tokens": _balanced("step", "each", TokenMean()),
    "balance of sequences": _balanced("sequence", "each", SequenceMean()),
    "balance of sequences, joint": _balanced("sequence", "joint", SequenceMean()),
}


def run_case(
    case: Case,
    samples: list[dict[str, Any]],
    layout: Layout,
    dp: int,
    overflow: Overflow = "error",
    share: bool = False,
) -> list[tuple[float, dict[str, float], Tensor]]:
    """(loss, metrics, gradient) of each rank, for a step of all samples."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    together: Scope = "step" if overflow == "split" else "micro_batch"
    recipe = Recipe(layout=layout, topology=Topology(dp=dp), overflow=overflow, groups=together)
    groups = [sample["group"] for sample in samples]
    ids = [sample["input_ids"] for sample in samples]
    prefixes = find_prefixes(ids) if share else None
    plan = make_plan(lengths, recipe, groups=groups, prefixes=prefixes)
    kept = [{k: v for k, v in s.items() if k in _keys(case)} for s in samples]

    def rank(ranks: Collective) -> tuple[float, dict[str, float], Tensor]:
        model = copy.deepcopy(Table(*case.shape))
        batches = [case.collate(micro, kept) for micro in plan[0, ranks.rank]]
        runner = Runner(
            model=model,
            loss=case.loss(model, batches, ranks),
            normalization=case.normalization,
            collective=ranks,
            forward=lambda m, b: m(b),
        )
        result = runner.run(batches).reduce(ranks)
        return result.loss, result.metrics, model.table.grad

    return run_ranks(dp, rank)


def _keys(case: Case) -> set[str]:
    return {"input_ids", "loss_mask", *case.collate.extras}


def expected_of(case: Case, samples: list[dict[str, Any]]) -> tuple[float, Tensor]:
    """(loss, gradient) by definition."""
    model = Table(*case.shape)
    loss = case.definition(model, samples)
    (gradient,) = torch.autograd.grad(loss, model.table)
    return float(loss.detach()), gradient
