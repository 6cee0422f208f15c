"""Losses computed in a model's last layer have the loss, metrics and gradient of its logits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep import Packed, Padded, PlannedStream, Recipe, Topology, make_plan
from evenstep.data import InMemory
from evenstep.errors import ConfigError
from evenstep.tensors import Head, PerSequence, cross_entropy, load_balancing, policy_gradient
from evenstep.testing import run_ranks
from evenstep.train import (
    AllTokens,
    Collective,
    Constant,
    Loss,
    Runner,
    SequenceMean,
    compute_log_probs,
    run_step,
)
from tests.examples import examples
from tests.internals import ModelHead, model_head
from tests.train.head_on_ranks import WRAPPERS, run_wrapped
from tests.train.loss_cases import CASES, COLLATOR, F64, FULL, VOCABULARY, samples_of
from tests.train.processes import results_of
from tests.train.running import plans, run_plan, steps_of, worlds
from tests.train.steps import NORMALIZATIONS, distance, gradient_of, model_of
from tests.train.test_distributed import GIANT, WORK

HIDDEN = 4


class Model(nn.Module):  # type: ignore[misc]
    """Hidden states that depend on a token and its position, a last layer, and what may follow."""

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda logits: logits) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)  # threads share the global one
        self.table = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=random, dtype=F64))
        self.last = nn.Linear(HIDDEN, VOCABULARY, dtype=F64)
        with torch.no_grad():
            for parameter in self.last.parameters():
                parameter.normal_(generator=random)
        self.after = after

    def get_output_embeddings(self) -> nn.Module:
        return self.last

    def forward(self, batch: Any) -> Tensor:
        factor = torch.cos(0.3 * batch.position_ids.to(F64))
        return self.after(self.last(self.table[batch.tokens] * factor[..., None]))


LOSSES: dict[str, Any] = {
    "nll": cross_entropy(),
    "smoothed": cross_entropy(label_smoothing=0.2, temperature=0.6),
    "z": cross_entropy(z_loss=0.1, label_smoothing=0.1),
    "policy": policy_gradient(kl_weight=0.1, entropy_weight=0.2, dual_clip=2.0, temperature=1.3),
    "sequence ratio": policy_gradient(ratio="sequence", importance_cap=1.1, clip_low=0.5),
}
POLICY = ("old_log_probs", "advantages", "rollout_log_probs")


def every_loss() -> dict[str, tuple[PerSequence, Any, Any]]:
    """(loss, normalization, collator) by name: all losses that read logits."""
    extras = {name: replace(COLLATOR.extras["returns"]) for name in POLICY}
    policy = replace(COLLATOR, extras={**COLLATOR.extras, **extras})
    ours: dict[str, tuple[PerSequence, Any, Any]] = {
        name: (loss, SequenceMean(), policy) for name, loss in LOSSES.items()
    }
    no_model: Any = None
    for name, case in CASES.items():
        loss = None if "balance" in name else case.loss(no_model, [], no_model)
        if isinstance(loss, PerSequence) and loss.takes_hidden:
            ours[name] = (loss, case.normalization, case.collate)
    assert sum("kl" in name or "jsd" in name for name in ours) == 9
    assert sum("po" in name for name in ours) >= 9
    return ours


EVERY = every_loss()


def run_loss(
    name: str, samples: list[dict[str, Any]], layout: Any, dp: int, head: Any
) -> list[tuple[float, dict[str, float], Any]]:
    """(loss, metrics, gradient) of each rank, for a step of all samples."""
    loss, normalization, collate = EVERY[name]
    recipe = Recipe(layout=layout, topology=Topology(dp=dp), groups="micro_batch")
    groups = [sample["group"] for sample in samples]
    plan = make_plan([len(s["input_ids"]) for s in samples], recipe, groups=groups)
    keys = {"input_ids", "loss_mask", *collate.extras}
    kept = [{key: value for key, value in s.items() if key in keys} for s in samples]

    def rank(ranks: Collective) -> tuple[float, dict[str, float], Any]:
        model = Model()
        runner = Runner(
            model=model,
            loss=replace(loss, head=head),
            normalization=normalization,
            collective=ranks,
            collate=collate,
        )
        batches = [collate(micro, kept) for micro in plan[0, ranks.rank]]
        result = runner.run(batches).reduce(ranks)
        return result.loss, result.metrics, gradient_of(model)

    return run_ranks(dp, rank)


@pytest.mark.parametrize("name", EVERY)
@examples(6)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    dp=st.integers(1, 3),
    layout=st.sampled_from([Packed(max_tokens=12), Padded(max_tokens=24, pad_to=6)]),
)
def test_every_loss_is_that_of_the_logits(
    name: str, lengths: list[int], seed: int, dp: int, layout: Any
) -> None:
    samples = samples_of([each for n in lengths for each in (n, 7 - n)], seed)
    for sample in samples:
        sample |= dict.fromkeys(POLICY, sample["returns"])
    pairs = zip(
        run_loss(name, samples, layout, dp, None),
        run_loss(name, samples, layout, dp, "model"),
        strict=True,
    )
    for (loss, metrics, gradient), (own, measured, found) in pairs:
        assert own == pytest.approx(loss, rel=1e-12, abs=1e-13)
        assert measured == pytest.approx(metrics, rel=1e-9, abs=1e-12, nan_ok=True)
        assert distance(found, gradient) < 1e-12


@examples(30)
@given(plan=plans(), work=worlds(), name=st.sampled_from(list(NORMALIZATIONS)))
def test_any_plan_has_the_gradient_of_the_logits(plan: Any, work: Any, name: str) -> None:
    options: dict[str, Any] = {"normalization": NORMALIZATIONS[name]}
    plan = replace(plan, cp=1)
    steps = steps_of(plan, work)
    by_logits = run_plan(plan, steps, **options)
    by_head = run_plan(plan, steps, loss=cross_entropy(head="model"), **options)
    for expected, found in zip(by_logits, by_head, strict=True):
        assert found.result.loss == pytest.approx(expected.result.loss, rel=1e-12, abs=1e-13)
        assert distance(found.gradient, expected.gradient) < 1e-12
        assert found.calls == expected.calls


# Wrappers -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", WRAPPERS)
def test_wrapped_models_have_the_gradient_of_one_process(how: str, tmp_path: Path) -> None:
    plain = model_of()
    tied = "tied" in how
    if tied:
        plain.head.weight = plain.embed.weight
    expected = run_step(steps_of(GIANT, WORK)[0], plain, cross_entropy())
    for loss, gradient, number in results_of(2, run_wrapped, tmp_path, WORK.samples, how):
        assert number >= 3
        assert loss == pytest.approx(expected.loss, rel=1e-12)
        assert distance(gradient, gradient_of(plain)) < 1e-12


def test_autocast_around_a_step_is_that_of_the_logits() -> None:
    gradients = []
    for head in (None, "model"):
        model = model_of().float()
        with torch.autocast("cpu", torch.bfloat16):
            run_step(steps_of(GIANT, WORK)[0], model, cross_entropy(head=head))
        gradients.append(gradient_of(model))
    assert distance(gradients[1], gradients[0]) < 0.02


# What models do with logits -----------------------------------------------------------------------

AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda logits: logits,
    "scale": lambda logits: logits * 0.3,
    "divisor": lambda logits: logits / 13.0,
    "negative": lambda logits: logits * -1.7,
    "cap": lambda logits: torch.tanh(logits / 0.7) * 0.7,
    "scale and cap": lambda logits: torch.tanh(logits * 2.3 / 30.0) * 30.0,
    "float": lambda logits: logits.float(),
}


def batches_of(model_samples: Any = None) -> list[Any]:
    samples = samples_of([6, 3, 5]) if model_samples is None else model_samples
    plan = make_plan([len(each["input_ids"]) for each in samples], Recipe(layout=Packed(samples=1)))
    keys = ("input_ids", "loss_mask")
    kept = [{key: each[key] for key in keys} for each in samples]
    return [replace(FULL, extras={})(micro, kept) for micro in plan[0, 0]]


@pytest.mark.parametrize("after", AFTER)
def test_scale_and_soft_cap_are_read_off(after: str) -> None:
    gradients = []
    for head in (None, "model"):
        model = Model(AFTER[after])
        run_step(batches_of(), model, cross_entropy(head=head))
        gradients.append(gradient_of(model))
    assert distance(gradients[1], gradients[0]) < (1e-6 if after == "float" else 1e-12)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "relu": (lambda logits: logits.relu(), "more than a scale and a soft cap"),
    "a masked word": (
        lambda logits: logits.index_fill(-1, torch.tensor([5]), -1e9),
        "more than a scale and a soft cap",
    ),
    "a bias": (lambda logits: logits + 0.1, "more than a scale and a soft cap"),
    "fewer words": (lambda logits: logits[..., :-1], r"into \(1, 3, 6\)"),
    "half": (lambda logits: logits.bfloat16() * 0.3, "more than a scale and a soft cap"),
    "an error": (lambda logits: logits.reshape(3, 5), "a small forward raised RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_more_keeps_its_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    after, why = REFUSED[name]
    with pytest.raises(ConfigError, match=f"head='model' cannot be used with Model: .*{why}"):
        run_step(batches_of(), Model(after), cross_entropy(head="model"))
    monkeypatch.setitem(model_head.SMALL, "cpu", 0)
    if name == "an error":
        return
    model = Model(after)
    with pytest.warns(UserWarning, match=f"takes the memory of all logits: .*{why}"):
        run_step(batches_of(), model, cross_entropy())
    by_default = gradient_of(model)
    monkeypatch.undo()
    expected = Model(after)
    run_step(batches_of(), expected, cross_entropy())
    assert distance(by_default, gradient_of(expected)) == 0.0


CHANGES: dict[str, Callable[[Any], object]] = {
    "a soft cap": lambda model: setattr(model.config, "cap", 2),
    "no soft cap": lambda model: setattr(model.config, "cap", None),
    "the cap of a part": lambda model: setattr(model.config.text_config, "cap", 3.0),
    "a scale": lambda model: setattr(model, "scale", 0.3),
    "an integer": lambda model: setattr(model, "times", 3),
    "a switch": lambda model: setattr(model, "halved", True),
    "a word": lambda model: setattr(model, "unit", "half"),
    "a tensor": lambda model: setattr(model, "tensor", torch.tensor(0.4, dtype=F64)),
    "a tensor in place": lambda model: model.tensor.fill_(0.3),
    "a buffer": lambda model: model.factor.fill_(0.2),
    "loaded": lambda model: model.load_state_dict(
        {**model.state_dict(), "factor": torch.tensor(0.1, dtype=F64)}
    ),
    "a function": lambda model: setattr(model, "after", lambda logits: logits * 0.4),
    "a hook": lambda model: model.last.register_forward_hook(lambda *args: args[-1] * 0.6),
    "another layer": lambda model: setattr(model, "last", nn.Linear(HIDDEN, VOCABULARY).double()),
}


class Configured(Model):
    """A model whose configuration and buffers say what is done with logits."""

    def __init__(self) -> None:
        super().__init__()
        part = SimpleNamespace(cap=None, to_dict=dict)
        self.config = SimpleNamespace(cap=5, text_config=part)
        self.scale, self.times, self.halved, self.unit = 2.0, 1, False, "one"
        self.tensor = torch.tensor(1.0, dtype=F64)
        self.register_buffer("factor", torch.tensor(1.0, dtype=F64))

    def forward(self, batch: Any) -> Tensor:
        logits = super().forward(batch) * self.scale * self.factor * self.times * self.tensor
        logits = logits / ({"one": 1, "half": 2}[self.unit] * (1 + self.halved))
        for cap in (self.config.text_config.cap, self.config.cap):
            if cap is not None:
                return torch.tanh(logits / cap) * cap
        return logits


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_the_first_step_is_read_off_again(change: str) -> None:
    gradients = []
    for head in (None, "model"):
        model = Configured()
        runner = Runner(model=model, loss=cross_entropy(head=head))
        runner.run(batches_of())
        before = gradient_of(model)
        model.zero_grad()
        torch.manual_seed(3)
        CHANGES[change](model)
        runner.run(batches_of())
        gradients.append(gradient_of(model))
        assert distance(before, gradients[-1]) > 1e-3
    assert distance(gradients[1], gradients[0]) < 1e-12


class After(nn.Module):  # type: ignore[misc]
    """A module behind the last layer, with frozen weights, buffers and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=F64), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros((), dtype=F64), requires_grad=False)
        self.register_buffer("cap", torch.tensor(torch.inf, dtype=F64))
        self.by_token: Tensor | None = None
        self.parts, self.only_positive = {"scale": [1.0]}, False

    def forward(self, logits: Tensor) -> Tensor:
        logits = logits * self.weight * self.parts["scale"][0] + self.bias
        if torch.isfinite(self.cap):
            logits = torch.tanh(logits / self.cap) * self.cap
        if self.by_token is not None:
            logits = logits + self.by_token
        return logits.relu() if self.only_positive else logits


CHANGES_OF_A_PART: dict[str, Callable[[Any], object]] = {
    "a weight": lambda after: after.weight.fill_(1.01),
    "a bias": lambda after: after.bias.fill_(0.01),
    "a cap": lambda after: after.cap.fill_(50.0),
    "a bias of each token": lambda after: setattr(after, "by_token", torch.ones(VOCABULARY)),
    "a value of a list": lambda after: after.parts.update(scale=[0.9]),
    "a switch": lambda after: setattr(after, "only_positive", True),
}


@pytest.mark.parametrize("change", CHANGES_OF_A_PART)
def test_a_change_of_a_module_behind_the_last_layer_is_refused(change: str) -> None:
    model = Model(After())
    runner = Runner(model=model, loss=cross_entropy(head="model"))
    runner.run(batches_of())
    before = gradient_of(model)
    CHANGES_OF_A_PART[change](model.after)
    with pytest.raises(ConfigError, match="what Model does with its logits has changed since"):
        runner.run(batches_of())
    assert distance(gradient_of(model), before) == 0.0
    if change in ("a weight", "a value of a list"):  # a scale
        model.zero_grad()
        runner.run(batches_of())
        changed = gradient_of(model)
        model.zero_grad()
        run_step(batches_of(), model, cross_entropy())
        assert distance(changed, gradient_of(model)) < 1e-12


def test_a_scale_behind_the_last_layer_that_changes_every_step_is_refused_once() -> None:
    after: Any = After()
    model = Model(after)
    runner = Runner(model=model, loss=cross_entropy(head="model"))
    errors = []
    for number in range(4):
        model.zero_grad()
        after.weight.fill_(1 - 0.1 * number)
        try:
            runner.run(batches_of())
        except ConfigError as error:
            errors.append(str(error))
            runner.run(batches_of())
        found = gradient_of(model)
        model.zero_grad()
        run_step(batches_of(), model, cross_entropy())
        assert distance(found, gradient_of(model)) < 1e-12
    assert len(errors) == 1
    assert "from now on the layer is read off before every step" in errors[0]


@pytest.mark.parametrize("use", ["evaluate", "log_probs"])
def test_forwards_alone_refuse_a_change_behind_the_last_layer(use: str) -> None:
    after: Any = After()
    model, recipe = Model(after), Recipe(layout=Packed(max_tokens=16))
    samples = [{"input_ids": torch.tensor([1, 2, 3, 4])}, {"input_ids": torch.tensor([5, 1])}]
    runner = Runner(model=model, loss=cross_entropy(head="model"))

    def run() -> None:
        if use == "evaluate":
            runner.evaluate(PlannedStream(InMemory(samples), recipe, shuffle=False))
        else:
            compute_log_probs(model, samples, recipe, head="model", forward=Model.__call__)

    run()
    after.weight.fill_(0.5)
    with pytest.raises(ConfigError, match="what Model does with its logits has changed since"):
        run()
    run()


def test_the_formula_is_read_off_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bool] = []
    read = model_head._read_mode

    def counting(*args: Any) -> Any:
        reads.append(args[-1])
        return read(*args)

    monkeypatch.setattr(model_head, "_read_mode", counting)
    model = Configured()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        run_step(batches_of(), model, cross_entropy(head="model"))
        optimizer.step()
    assert reads == [False, True]


def test_a_model_that_does_something_else_in_training_keeps_its_logits() -> None:
    model = Model()
    model.after = lambda logits: logits * 2 if model.training else logits
    with pytest.raises(ConfigError, match="in training, but not so in evaluation"):
        run_step(batches_of(), model, cross_entropy(head="model"))


def test_weights_after_the_last_layer_are_noticed() -> None:
    model = Model()
    model.factor = nn.Parameter(torch.tensor(0.5, dtype=F64))
    model.after = lambda logits: logits * model.factor
    with pytest.raises(ConfigError, match="weights after its last layer"):
        run_step(batches_of(), model, cross_entropy(head="model"))


def test_a_weight_after_the_last_layer_that_is_unfrozen_later_is_noticed() -> None:
    model = Model()
    model.last_scale = nn.Linear(1, 1, bias=False).double().requires_grad_(False)
    model.after = lambda logits: logits * model.last_scale.weight
    runner = Runner(model=model, loss=cross_entropy(head="model"))
    runner.run(batches_of())
    model.last_scale.requires_grad_()
    with pytest.raises(ConfigError, match="weights after its last layer"):
        runner.run(batches_of())


def test_a_compiled_model_and_a_layer_with_an_adapter_keep_their_logits() -> None:
    compiled = torch.compile(Model(), backend="eager")
    with pytest.raises(ConfigError, match="compiled as a whole"):
        run_step(batches_of(), compiled, cross_entropy(head="model"))
    adapted = Model()
    adapted.last = nn.Sequential(adapted.last)
    with pytest.raises(ConfigError, match="is a Sequential, not a plain"):
        run_step(batches_of(), adapted, cross_entropy(head="model"))


# When it is used ----------------------------------------------------------------------------------


class Watched(Model):
    """Counts how often logits are made."""

    made = 0

    def forward(self, batch: Any) -> Tensor:
        logits = super().forward(batch)
        self.made += self.last.training and logits.shape[-1] > 1
        return logits


def logits_made(monkeypatch: pytest.MonkeyPatch, loss: Any, **options: Any) -> int:
    monkeypatch.setitem(model_head.SMALL, "cpu", 0)
    model = Watched()
    run_step(batches_of(), model, loss, **options)
    return model.made


def test_it_is_the_default_of_large_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logits_made(monkeypatch, cross_entropy()) == 0
    monkeypatch.undo()
    model = Watched()
    run_step(batches_of(), model, cross_entropy())
    assert model.made == 3


def test_logits_are_made_where_something_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(logits: Tensor, batch: Any) -> Tensor:
        return logits.square().sum()

    assert logits_made(monkeypatch, own) == 3
    assert logits_made(monkeypatch, PerSequence(lambda logits, view: logits.sum())) == 3
    both = {"nll": Loss(function=cross_entropy()), "own": Loss(function=own)}
    assert logits_made(monkeypatch, both) == 3
    # A forward of one's own may do anything with logits.
    assert logits_made(monkeypatch, cross_entropy(), forward=lambda m, b: m(b)) == 3
    insisted = cross_entropy(head="model")
    assert logits_made(monkeypatch, insisted, forward=lambda m, b: m(b) * 0.5) == 0
    both["nll"] = Loss(function=insisted)
    with pytest.raises(ConfigError, match="another loss of the runner needs them"):
        logits_made(monkeypatch, both)


class Routed(Model):
    """Returns router logits too."""

    def forward(self, batch: Any) -> Any:
        logits = super().forward(batch)
        return {"logits": logits, "router_logits": self.table[batch.tokens].unflatten(-1, (1, 4))}


def test_other_losses_read_other_outputs() -> None:
    gradients = []
    for head in (None, "model"):
        balance = load_balancing(top_k=2, over="sequence")
        losses = {
            "aux": Loss(function=balance, normalization=AllTokens(), weight=0.1),
            "nll": Loss(function=cross_entropy(head=head)),
            "policy": Loss(function=cross_entropy(head=head, z_loss=0.1), weight=0.5),
        }
        model = Routed()
        result = run_step(batches_of(), model, losses, mode="deferred", on_nonfinite="raise")
        gradients.append((result.loss, result.metrics, gradient_of(model)))
    assert gradients[1][0] == pytest.approx(gradients[0][0], rel=1e-12)
    assert gradients[1][1] == pytest.approx(gradients[0][1], rel=1e-9)
    assert distance(gradients[1][2], gradients[0][2]) < 1e-12


def test_frozen_layers_get_no_gradient() -> None:
    for frozen in ("last", "table"):
        model = Model()
        getattr(model, frozen).requires_grad_(False)
        run_step(batches_of(), model, cross_entropy(head="model"))
        expected = Model()
        run_step(batches_of(), expected, cross_entropy())
        for (name, parameter), other in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            if name.startswith(frozen):
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_scoring_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, recipe = samples_of([6, 3, 5]), Recipe(layout=Packed(max_tokens=8))
    expected = compute_log_probs(Model(), samples, recipe, entropy=True, temperature=0.7)
    monkeypatch.setitem(model_head.SMALL, "cpu", 0)
    calls: list[Any] = []
    original = ModelHead.run

    def run(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(ModelHead, "run", run)
    found = compute_log_probs(Model(), samples, recipe, entropy=True, temperature=0.7)
    assert calls
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_layer_is_as_before_also_after_an_error() -> None:
    model = Model()

    def fails(logits: Tensor) -> Tensor:
        if torch.is_grad_enabled() and logits.shape[-1] == 1:
            raise ValueError("in the forward")
        return logits

    model.after = fails
    with pytest.raises(ValueError, match="in the forward"):
        run_step(batches_of(), model, cross_entropy(head="model"))
    assert "forward" not in vars(model.last)
    with warnings.catch_warnings(), nullcontext():
        assert copy.deepcopy(model).last(torch.zeros(2, HIDDEN, dtype=F64)).shape == (2, VOCABULARY)


def test_a_head_of_hidden_states_is_used_as_it_is() -> None:
    """A loss with its own head gets what the model returns, from any forward."""
    model = Model()
    expected = Model()
    run_step(batches_of(), expected, cross_entropy())

    def hidden(model: Any, batch: Any) -> Tensor:
        factor = torch.cos(0.3 * batch.position_ids.to(F64))
        return model.table[batch.tokens] * factor[..., None]

    run_step(batches_of(), model, cross_entropy(head=Head(model.last)), forward=hidden)
    assert distance(gradient_of(model), gradient_of(expected)) < 1e-12


def test_a_constant_denominator_and_empty_micro_batches() -> None:
    samples = samples_of([4])

    def rank(ranks: Collective) -> Any:
        model = Model()
        plan = make_plan([4], Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2)))
        batches = [replace(FULL, extras={})(micro, [{
            key: samples[0][key] for key in ("input_ids", "loss_mask")
        }]) for micro in plan[0, ranks.rank]]  # fmt: skip
        loss = cross_entropy(head="model")
        result = run_step(
            batches, model, loss, normalization=Constant(3.0), collective=ranks
        ).reduce(ranks)
        return result.loss, gradient_of(model)

    (loss, gradient), (other, same) = run_ranks(2, rank)
    assert loss == other
    assert distance(gradient, same) == 0.0
    assert gradient.norm() > 0
