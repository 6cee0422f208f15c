"""The load-balancing loss of mixtures of experts: Hugging Face's loss of a step, in any cut."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from evenstep import Packed, Padded, Recipe, Steps, make_plan
from evenstep.errors import ConfigError
from evenstep.integrations.hf_attention import use_attention
from evenstep.integrations.huggingface import HfCollate, hf_forward, hf_kwargs
from evenstep.integrations.trainer import EvenstepMixin
from evenstep.tensors import Collator, cross_entropy, load_balancing
from evenstep.train import AllTokens, Loss, Runner, compute_log_probs, expert_frequencies
from tests.integrations.loops import PlannedTrainer, arguments_of, in_two, join, tiny_model
from tests.internals import Layout, RouterLoss

torch.set_num_threads(1)
LENGTHS = [5, 3, 9, 4, 7]


SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "eos_token_id": 2, "router_aux_loss_coef": 0.5,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4,
    },
    "Qwen3Moe": {"moe_intermediate_size": 8, "head_dim": 8, "num_experts": 4},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "GraniteMoe": {"num_local_experts": 4},
}  # fmt: skip


def model_of(family: str = "Mixtral", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def forward(model: Any, batch: Any) -> Any:
    return dict(model(**hf_kwargs(batch), output_router_logits=True))


def step_of(model: Any, layout: Layout) -> tuple[float, torch.Tensor]:
    """(loss, gradient) of the load-balancing loss of the whole step."""
    random = torch.Generator().manual_seed(0)
    samples = [{"input_ids": torch.randint(0, 32, (n,), generator=random)} for n in LENGTHS]
    plan = make_plan(LENGTHS, Recipe(layout=layout))
    batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    shares = expert_frequencies(model, batches, top_k=2, forward=forward)
    loss = load_balancing(top_k=2, over="step", frequencies=shares, layers="joint")
    runner = Runner(model=model, loss=loss, normalization=AllTokens(), forward=forward)
    result = runner.run(batches)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return result.loss, gradient


def test_the_loss_of_a_step_is_that_of_hugging_face_for_any_cut() -> None:
    model = model_of()
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 32, (n,), generator=random) for n in LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], True)
    outputs = model(input_ids=padded, attention_mask=mask, output_router_logits=True)
    theirs = load_balancing_loss_func(outputs.router_logits, 4, 2, mask)
    theirs.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for layout in (Packed(max_tokens=64), Packed(max_tokens=10), Padded(max_tokens=18)):
        loss, own = step_of(copy.deepcopy(model_of()), layout)
        # Ours is 1 if experts are used evenly, theirs top_k.
        assert 2 * loss == pytest.approx(float(theirs.detach()), rel=1e-5)
        torch.testing.assert_close(2 * own, gradient, rtol=1e-4, atol=1e-6)


def test_two_losses_read_their_own_outputs() -> None:
    model = model_of()
    samples = [{"input_ids": torch.arange(6)}, {"input_ids": torch.arange(4)}]
    plan = make_plan([6, 4], Recipe(layout=Packed(max_tokens=10)))
    batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    losses = {
        "nll": Loss(function=cross_entropy()),
        "aux": Loss(function=load_balancing(top_k=2, over="sequence"), weight=0.01),
    }
    result = Runner(model=model, loss=losses, forward=forward).run(batches)
    assert result.losses["aux"] >= 0.9
    assert result.loss == pytest.approx(result.losses["nll"] + 0.01 * result.losses["aux"])


# The Trainer -----------------------------------------------------------------------------------

SAMPLES = [
    {"input_ids": torch.randint(3, 32, (n,), generator=torch.Generator().manual_seed(n))}
    for n in (5, 3, 9, 4, 7, 6)
]
# (layout, micro-batches per step): one; several, with padding and empty ones; padded rows
PLANS: list[tuple[Layout, int]] = [
    (Packed(max_tokens=64), 1),
    (Packed(max_tokens=12, pad_to=12), 9),
    (Padded(max_tokens=18), 5),
]


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Keeps the gradient of each parameter at each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        named = model.named_parameters()
        self.steps.append({n.removeprefix("module."): p.grad.clone() for n, p in named})


def theirs(
    model: Any, samples: list[dict[str, Any]] = SAMPLES
) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of all samples in one padded batch, by transformers alone."""
    model = copy.deepcopy(model).train()
    ids = [sample["input_ids"] for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], True)
    labels = padded.masked_fill(mask == 0, -100)
    outputs = model(input_ids=padded, attention_mask=mask, labels=labels, output_router_logits=True)
    outputs.loss.backward()
    return outputs.loss.item(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).norm() / gradient.norm())
        assert difference < 1e-5, (name, difference)


def train(model: Any, folder: Path, layout: Layout, micro_batches: int, **changes: Any) -> Any:
    """(logged loss, gradients) of one step of the Trainer."""
    gradients = Gradients()
    options = {
        "num_train_epochs": 1, "gradient_accumulation_steps": micro_batches, "optim": "sgd",
        "save_strategy": "no", "max_grad_norm": 0, **changes,
    }  # fmt: skip
    trainer = PlannedTrainer(
        copy.deepcopy(model),
        arguments_of(TrainingArguments, folder, **options),
        train_dataset=SAMPLES,
        recipe=Recipe(layout=layout, steps=Steps(samples=len(SAMPLES))),
        callbacks=[gradients],
    )
    trainer.train()
    (found,) = gradients.steps
    return trainer.state.log_history[0]["loss"], found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_the_trainer_has_their_loss_and_gradient_in_any_plan(
    tmp_path: Path, family: str
) -> None:
    model = model_of(family, output_router_logits=True)
    loss, gradients = theirs(model)
    if family == "GptOss":  # eager attention cannot be packed
        use_attention(model)
    for layout, micro_batches in PLANS if family == "Mixtral" else PLANS[1:2]:
        logged, found = train(model, tmp_path, layout, micro_batches)
        assert logged == pytest.approx(loss, rel=1e-5)
        assert_same(found, gradients)


def test_dropout_and_router_noise_choose_the_same_experts_when_they_are_counted() -> None:
    noise: dict[str, Any] = {"router_jitter_noise": 0.5, "attention_dropout": 0.3}
    model, (batch,) = model_of(**noise).train(), batches_of(Packed(max_tokens=64))
    inputs = {**hf_kwargs(batch, model, labels=True), "output_router_logits": True}
    # One micro-batch is the step, so that the model's own loss is right.
    torch.manual_seed(5)
    expected = model(**inputs).loss
    torch.manual_seed(5)
    router = RouterLoss(model)
    router.count(model, [batch])
    with router.in_step(batch):
        outputs = model(**inputs)
    assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    own = torch.autograd.grad(expected, list(model.parameters()))
    found = torch.autograd.grad(outputs.loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    assert_same(dict(zip(names, found, strict=True)), dict(zip(names, own, strict=True)))


REENTRANT = {
    "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # experts are counted
@pytest.mark.parametrize(
    ("changes", "fault"),
    [(REENTRANT, "'use_reentrant': False"), ({"label_smoothing_factor": 0.1}, "label_smoothing")],
)
def test_a_loss_that_would_be_lost_is_refused(
    tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    model = model_of(output_router_logits=True)
    with pytest.raises(ConfigError, match=fault):
        train(model, tmp_path, Packed(max_tokens=12), 9, **changes)


def test_checkpointing_that_is_not_reentrant_has_their_gradient(tmp_path: Path) -> None:
    model = model_of(output_router_logits=True)
    changes = {**REENTRANT, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    _, found = train(model, tmp_path, Packed(max_tokens=12), 9, **changes)
    assert_same(found, theirs(model)[1])


def test_a_coefficient_of_zero_is_no_loss(tmp_path: Path) -> None:
    model = model_of(output_router_logits=True, router_aux_loss_coef=0.0)
    batch = batches_of(Packed(max_tokens=64))[0]
    assert hf_forward(model)(model, batch).shape[:2] == batch.tokens.shape
    assert "shift_labels" in hf_kwargs(batch, model, labels=True)
    loss, gradients = theirs(model)
    logged, found = train(model, tmp_path, Packed(max_tokens=12), 9)
    assert logged == pytest.approx(loss, rel=1e-5)
    assert_same(found, gradients)


class Streamed(IterableDataset):  # type: ignore[misc]
    """One sample again and again, so that all steps have the same loss."""

    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES[:1] * 50)


def test_a_dataset_without_a_length_has_their_loss_too(tmp_path: Path) -> None:
    model = model_of(output_router_logits=True)
    loss, expected = theirs(model, SAMPLES[:1])
    gradients = Gradients()
    options = {
        "max_steps": 1, "gradient_accumulation_steps": 3, "optim": "sgd", "save_strategy": "no",
        "max_grad_norm": 0,
    }  # fmt: skip
    trainer = PlannedTrainer(
        model,
        arguments_of(TrainingArguments, tmp_path, **options),
        train_dataset=Streamed(),
        recipe=Recipe(layout=Packed(max_tokens=12)),
        callbacks=[gradients],
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same(gradients.steps[0], expected)


def sft_step(model: Any, folder: Path, layout: Layout, micro_batches: int) -> Any:
    """(log, gradients) of a step of TRL's SFTTrainer, which asks for the loss by itself."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import SFTConfig, SFTTrainer

    class PlannedSFT(EvenstepMixin, SFTTrainer):  # type: ignore[misc]
        pass

    words = Tokenizer(WordLevel({f"w{n}": n for n in range(32)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w2"
    )
    rows = [
        {"input_ids": s["input_ids"].tolist(), "labels": s["input_ids"].tolist()} for s in SAMPLES
    ]
    gradients = Gradients()
    trainer = PlannedSFT(
        copy.deepcopy(model),
        arguments_of(
            SFTConfig,
            folder,
            max_length=None,
            bf16=False,
            num_train_epochs=1,
            optim="sgd",
            gradient_accumulation_steps=micro_batches,
            save_strategy="no",
            max_grad_norm=0,
            dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        recipe=Recipe(layout=layout, steps=Steps(samples=len(SAMPLES))),
        callbacks=[gradients],
    )
    trainer.train()
    (found,) = gradients.steps
    return trainer.state.log_history[0], found


@pytest.mark.parametrize(("layout", "micro_batches"), PLANS[:2])
def test_a_step_of_sft_trainer_has_their_loss_and_gradient(
    tmp_path: Path, layout: Layout, micro_batches: int
) -> None:
    model = model_of()
    loss, gradients = theirs(model)
    log, found = sft_step(model, tmp_path, layout, micro_batches)
    assert log["loss"] == pytest.approx(loss, rel=1e-5)
    assert log["aux_loss"] == pytest.approx(2.0, abs=0.1)
    assert_same(found, gradients)


def step_on_rank(rank: int, folder: str, port: int) -> None:
    join(rank, port)
    loss, found = train(model_of(output_router_logits=True), Path(folder), Packed(max_tokens=12), 3)
    gradients = {name: values.tolist() for name, values in found.items()}
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"loss": loss, "gradients": gradients}))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_their_loss_and_gradient(tmp_path: Path) -> None:
    loss, gradients = theirs(model_of())
    for found in in_two(step_on_rank, tmp_path):
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        tensors = {name: torch.tensor(values) for name, values in found["gradients"].items()}
        assert_same(tensors, gradients)


# Other loops -----------------------------------------------------------------------------------


def batches_of(layout: Layout) -> list[Any]:
    plan = make_plan([len(sample["input_ids"]) for sample in SAMPLES], Recipe(layout=layout))
    return [Collator()(micro, SAMPLES) for micro in plan[0, 0]]


@pytest.mark.parametrize("layout", [Packed(max_tokens=64), Packed(max_tokens=12)])
@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_a_runner_with_both_losses_has_their_loss_and_gradient(family: str, layout: Layout) -> None:
    model = model_of(family, output_router_logits=True)
    loss, gradients = theirs(model)
    # Padded rows for GptOss, whose eager attention cannot be packed.
    forward = hf_forward(model, outputs="router_logits", unsupported="pad")
    batches = batches_of(layout)
    if family == "GptOss":
        with pytest.warns(UserWarning, match="row of its own"):
            forward(model, batches[0])
    shares = expert_frequencies(model, batches, top_k=2, forward=forward)
    balance = load_balancing(top_k=2, over="step", frequencies=shares, layers="joint")
    losses = {
        "nll": Loss(function=cross_entropy()),
        "aux": Loss(function=balance, normalization=AllTokens(), weight=2 * 0.5),
    }
    result = Runner(model=model, loss=losses, forward=forward).run(batches)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert_same({name: p.grad for name, p in model.named_parameters()}, gradients)


def test_a_runner_does_not_drop_the_loss_silently() -> None:
    model, batches = model_of(output_router_logits=True), batches_of(Packed(max_tokens=12))
    with pytest.raises(ConfigError, match="outputs='router_logits'"):
        Runner(model=model, loss=cross_entropy()).run(batches)
    model.config.output_router_logits = False
    assert Runner(model=model, loss=cross_entropy()).run(batches).loss > 0


def test_scoring_does_not_need_the_loss() -> None:
    samples = [{"input_ids": sample["input_ids"]} for sample in SAMPLES]
    recipe = Recipe(layout=Packed(max_tokens=12))
    with_loss, without = (
        compute_log_probs(model_of(output_router_logits=asked), samples, recipe)
        for asked in (True, False)
    )
    for mine, other in zip(with_loss, without, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_loss_of_the_model_that_is_no_sum_over_labels_is_refused() -> None:
    model, (batch,) = model_of(output_router_logits=True), batches_of(Packed(max_tokens=64))
    with pytest.raises(ConfigError, match="output_router_logits=True, but its load-balancing"):
        hf_kwargs(batch, model, labels=True)
    plan = make_plan([5], Recipe(layout=Packed(max_tokens=64)))
    with pytest.raises(ConfigError, match="output_router_logits=True, but its load-balancing"):
        HfCollate(model=model)(plan[0, 0][0], dict(enumerate(SAMPLES)))
    with pytest.raises(ConfigError, match="needs the model"):
        hf_kwargs(batch, labels=True)


def test_a_model_without_experts_has_no_router_logits() -> None:
    model, (batch,) = tiny_model(), batches_of(Packed(max_tokens=64))
    with pytest.raises(ConfigError, match="LlamaForCausalLM returns no router logits"):
        hf_forward(model, outputs="router_logits")(model, batch)


def test_a_model_with_another_loss_is_refused(tmp_path: Path) -> None:
    sizes = {**SIZES, "kv_channels": 8, "num_local_experts": 4}
    config = transformers.JetMoeConfig(**sizes, output_router_logits=True)
    with pytest.raises(ConfigError, match="does not define its load-balancing loss as Mixtral"):
        train(transformers.JetMoeForCausalLM(config), tmp_path, Padded(max_tokens=18), 5)
