"""Real trainers on planned steps: every sample once per epoch, exact length, exact resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import IterableDataset
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    TrainingArguments,
)

from evenstep import Packed, Padded, PlannedStream, Recipe, Steps, Topology, World
from evenstep.data import InMemory, MeasuredMapped
from evenstep.errors import ConfigError, CursorError, PlanError
from evenstep.integrations.accelerate import StepLoader, accelerate_loader
from evenstep.integrations.huggingface import HfCollate
from tests.integrations.hybrids import alone, hybrid, samples_of
from tests.integrations.loops import (
    EPOCHS,
    LENGTHS,
    VOCAB,
    Events,
    KilledError,
    PlannedTrainer,
    Samples,
    alike,
    arguments_of,
    chain,
    crash,
    in_two,
    parameters,
    run_accelerate,
    run_on,
    run_steps_of_samples,
    run_trainer,
    tiny_model,
    without_name,
)
from tests.slow.measure import error_of, gradients_of
from tests.source_cases import Rows


@pytest.mark.parametrize("run", [run_trainer, run_accelerate])
def test_one_process_resumes_exactly(tmp_path: Path, run: Any) -> None:
    (tmp_path / "stopped").mkdir()
    whole = run(tmp_path / "whole", "packed", epochs=2, save_steps=100)
    run(tmp_path / "stopped", "packed", stop=18, epochs=2, save_steps=17)
    resumed = run(tmp_path / "stopped", "packed", resume=True, epochs=2, save_steps=100)
    assert [sorted(epoch) for epoch in whole["reads"]] == [list(range(len(LENGTHS)))] * 2
    assert whole["reads"][0] != whole["reads"][1]
    check_tail(whole["reads"], resumed["reads"])
    assert resumed["losses"] == whole["losses"]
    assert resumed["parameters"] == whole["parameters"]
    # Epochs of 14 and 13 steps. The Trainer needs equal ones: its last step changes nothing.
    if run is run_trainer:
        assert (whole["steps"], whole["fillers"]) == (28, [27])
        sums = whole["sums"]
        assert [n for n in range(1, 28) if sums[n] == sums[n - 1]] == [27]
    else:
        assert (whole["lengths"], whole["steps"]) == ([28, 26], 27)


def check_tail(whole: list[list[int]], resumed: list[list[int]]) -> None:
    """The resumed run reads what is left of its first epoch, and then whole epochs."""
    rest = whole[-len(resumed) :]
    assert 0 < len(resumed[0]) < len(rest[0])
    assert rest[0][-len(resumed[0]) :] == resumed[0]
    assert resumed[1:] == rest[1:]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("run", ["trainer", "accelerate", "sft"])
def test_two_processes_resume_exactly_in_later_epochs(
    tmp_path: Path, run: str, layout: str
) -> None:
    found = in_two(chain, tmp_path, run, layout)
    for epoch in range(EPOCHS):
        reads = [item for each in found for item in each["whole"]["reads"][epoch]]
        assert sorted(reads) == list(range(len(LENGTHS)))
    for each in found:
        whole, (_, second, third) = each["whole"], each["parts"]
        assert whole["reads"][0] != whole["reads"][1]
        check_tail(whole["reads"], third["reads"])
        assert whole["reads"][1][-len(second["reads"][0]) :] == second["reads"][0]
        assert third["losses"] == whole["losses"]
        assert third["parameters"] == whole["parameters"]
    assert found[0]["whole"]["parameters"] == found[1]["whole"]["parameters"]


def test_a_step_has_the_same_gradient_in_any_layout(tmp_path: Path) -> None:
    changes: Any = {"steps": Steps(samples=7), "gradient_accumulation_steps": 5, "optim": "sgd"}
    changes["epochs"] = 1
    runs = [run_trainer(tmp_path / name, name, **changes) for name in ("packed", "padded")]
    assert runs[0]["steps"] == 12
    assert runs[0]["fillers"] == []
    np.testing.assert_allclose(runs[0]["losses"], runs[1]["losses"], atol=1e-4)
    for mine, other in zip(runs[0]["parameters"], runs[1]["parameters"], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize("run", [run_trainer, run_accelerate])
def test_autocast_around_a_run_casts_weights_again_after_an_update(
    tmp_path: Path, run: Any
) -> None:
    found = []
    for cached in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            found.append(run(tmp_path, "packed", epochs=1, save_steps=100))
    assert found[0]["losses"] == found[1]["losses"]
    assert found[0]["parameters"] == found[1]["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["trainer", "accelerate"])
def test_a_run_goes_on_exactly_after_its_processes_died(tmp_path: Path, run: str) -> None:
    with pytest.raises(torch.multiprocessing.ProcessExitedException):
        in_two(crash, tmp_path, run)
    for found in in_two(run_on, tmp_path, run):
        check_tail(found["whole"]["reads"], found["resumed"]["reads"])
        assert found["resumed"]["losses"] == found["whole"]["losses"]
        assert found["resumed"]["parameters"] == found["whole"]["parameters"]


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    alone = run_steps_of_samples(tmp_path)
    for found in in_two(alike, tmp_path):
        np.testing.assert_allclose(found["losses"], alone["losses"], atol=1e-5)
        for mine, other in zip(found["parameters"], alone["parameters"], strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-6)


def planned_trainer(folder: Path, model: Any = None, recipe: Any = None, **changes: Any) -> Any:
    return PlannedTrainer(
        tiny_model() if model is None else model,
        arguments_of(TrainingArguments, folder, **changes),
        train_dataset=Samples(),
        lengths=LENGTHS,
        recipe=Recipe(layout=Packed(max_tokens=48)) if recipe is None else recipe,
    )


@pytest.mark.parametrize("where", ["label_smoothing_factor", "compute_loss_func"])
def test_a_loss_without_the_labels_between_segments_is_refused(tmp_path: Path, where: str) -> None:
    smoothing = {"label_smoothing_factor": 0.1} if where == "label_smoothing_factor" else {}
    options: dict[str, Any] = {} if smoothing else {where: lambda outputs, labels: outputs}
    trainer = PlannedTrainer(
        tiny_model(),
        arguments_of(TrainingArguments, tmp_path, **smoothing),
        train_dataset=Samples(),
        lengths=LENGTHS,
        recipe=Recipe(layout=Packed(max_tokens=16), overflow="split"),
        **options,
    )
    with pytest.raises(ConfigError, match=f"{where}.*where a sample is split"):
        trainer.train()


def test_labels_are_smoothed_alike_in_a_class_of_another_name(tmp_path: Path) -> None:
    """transformers shifts labels for the names of its own causal language models only."""

    class Derived(LlamaForCausalLM):  # type: ignore[misc]
        pass

    weights = []
    for kind in (LlamaForCausalLM, Derived):
        model = kind(tiny_model().config)
        model.load_state_dict(tiny_model().state_dict())
        options: Any = {"label_smoothing_factor": 0.1, "max_steps": 2, "save_strategy": "no"}
        planned_trainer(tmp_path, model, **options).train()
        weights.append(parameters(model))
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", ["dispatch_batches", "split_batches"])
def test_options_that_divide_batches_are_refused(tmp_path: Path, name: str) -> None:
    trainer = planned_trainer(tmp_path, accelerator_config={name: True})
    with pytest.raises(ConfigError, match=f"Set {name}=False"):
        trainer.train()


def test_what_the_trainer_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_sampling_strategy"):
        planned_trainer(tmp_path, train_sampling_strategy="group_by_length")
    with pytest.raises(ConfigError, match="neftune_noise_alpha"):
        planned_trainer(tmp_path, neftune_noise_alpha=5.0)
    three = Recipe(layout=Packed(max_tokens=48), steps=Steps(micro_batches=3))
    with pytest.raises(ConfigError, match=r"Set Steps\(micro_batches=2\)"):
        planned_trainer(tmp_path, recipe=three).train()
    many = Recipe(layout=Packed(max_tokens=48), steps=Steps(samples=40))
    with pytest.raises(PlanError, match="more than 2 gradient accumulation steps"):
        planned_trainer(tmp_path, recipe=many).train()
    sizes: Any = {"hidden_size": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ConfigError, match="does not support packed batches"):
        planned_trainer(tmp_path, BloomForCausalLM(BloomConfig(vocab_size=VOCAB, **sizes))).train()


def test_a_model_that_carries_state_trains_packed_as_padded(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    weights = []
    for layout in (Packed(max_tokens=96), Padded(max_tokens=96)):
        torch.manual_seed(0)
        model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, **sizes))
        recipe = Recipe(layout=layout, steps=Steps(samples=7))
        options: Any = {"gradient_accumulation_steps": 5, "optim": "sgd", "max_steps": 3}
        planned_trainer(tmp_path, model, recipe, save_strategy="no", **options).train()
        weights.append(parameters(model))
    for packed, padded in zip(*weights, strict=True):
        np.testing.assert_allclose(packed, padded, atol=1e-6)


@pytest.mark.parametrize("library", ["transformers", "accelerate"])
def test_a_model_that_selects_tokens_trains_padded_as_alone(tmp_path: Path, library: str) -> None:
    model, samples = hybrid("deepseek_v32"), samples_of((5, 23, 12, 23))
    expected = alone(model, samples)
    recipe, batches = Recipe(layout=Padded(samples=4), steps=Steps(micro_batches=1)), list[Any]()
    if library == "transformers":
        options: Any = {"gradient_accumulation_steps": 1, "num_train_epochs": 1}
        arguments = arguments_of(TrainingArguments, tmp_path, **options)
        data: Any = {"train_dataset": samples, "recipe": recipe}
        batches.extend(PlannedTrainer(model, arguments, **data).get_train_dataloader())
    else:
        stream = PlannedStream(InMemory(samples), recipe)
        batches.extend(accelerate_loader(Accelerator(cpu=True), stream, model=model))

    losses = [model(**{**batch, "num_items_in_batch": 1}).loss for batch in batches]

    assert error_of(gradients_of(model, losses), expected) <= 2e-6


def test_a_number_of_steps_ends_within_an_epoch(tmp_path: Path) -> None:
    found = planned_trainer(tmp_path, max_steps=17, save_strategy="no")
    found.train()
    assert found.state.global_step == 17
    assert found.state.epoch == pytest.approx(17 / 14)


@pytest.mark.slow
def test_a_number_of_steps_resumes_exactly_in_its_second_epoch(tmp_path: Path) -> None:
    changes: Any = {"max_steps": 20, "save_steps": 16}
    (tmp_path / "stopped").mkdir()
    whole = run_trainer(tmp_path / "whole", "packed", **changes)
    run_trainer(tmp_path / "stopped", "packed", stop=18, **changes)
    resumed = run_trainer(tmp_path / "stopped", "packed", resume=True, **changes)
    assert whole["steps"] == resumed["steps"] == 20
    assert sorted(whole["reads"][0]) == list(range(len(LENGTHS)))
    assert resumed["losses"] == whole["losses"]
    assert resumed["parameters"] == whole["parameters"]


@pytest.mark.parametrize("kind", ["list", "hugging face", "torch", "source"])
def test_samples_need_no_lengths(tmp_path: Path, kind: str) -> None:
    rows = [
        {"input_ids": [1 + k % 9] * n, "assistant_masks": [0] + [1] * (n - 1), "about": "x"}
        for k, n in enumerate(LENGTHS)
    ]
    data: Any = {
        "list": rows,
        "hugging face": datasets.Dataset.from_list(rows),
        "torch": Rows(rows),
        # A source is read as it is; of datasets, the collator gets the keys that it takes.
        "source": InMemory([{k: v for k, v in row.items() if k != "about"} for row in rows]),
    }[kind]
    arguments = arguments_of(TrainingArguments, tmp_path, max_steps=2, save_strategy="no")
    recipe = Recipe(layout=Packed(max_tokens=48))
    trainer = PlannedTrainer(tiny_model(), arguments, train_dataset=data, recipe=recipe)
    trainer.train()
    assert trainer.state.global_step == 2


class Streamed(IterableDataset):  # type: ignore[misc]
    """Samples in order, without a length."""

    def __iter__(self) -> Any:
        rows = Samples()
        return (rows[item] for item in range(len(LENGTHS)))


def run_streamed(
    folder: Path,
    stop: int | None = None,
    resume: bool = False,
    workers: int = 0,
    tokens: int = 48,
    allow: Any = (),
    **changes: Any,
) -> dict[str, Any]:
    """18 steps of a dataset without a length; an epoch has about 14."""
    arguments = arguments_of(
        TrainingArguments, folder, max_steps=18, save_steps=4, dataloader_num_workers=workers
    )
    trainer = PlannedTrainer(
        tiny_model(),
        arguments,
        train_dataset=changes.pop("dataset", Streamed()),
        recipe=Recipe(layout=Packed(max_tokens=tokens), **changes),
        callbacks=[Events(Samples(), stop)],
        allow=allow,
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KilledError:
        return {}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "parameters": parameters(trainer.model), "trainer": trainer}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_without_a_length_resumes_exactly(tmp_path: Path, workers: int) -> None:
    whole = run_streamed(tmp_path / "whole", workers=workers)
    assert len(whole["losses"]) == whole["trainer"].state.global_step == 18
    assert run_streamed(tmp_path / "stopped", stop=14, workers=workers) == {}
    resumed = run_streamed(tmp_path / "stopped", resume=True, workers=workers)
    assert resumed["losses"] == whole["losses"]
    assert resumed["parameters"] == whole["parameters"]


def test_a_dataset_without_a_length_resumes_with_another_budget(tmp_path: Path) -> None:
    assert run_streamed(tmp_path, stop=5) == {}
    with pytest.raises(CursorError, match=r"allow=\{'budget'\} to load_state_dict or the trainer"):
        run_streamed(tmp_path, resume=True, tokens=64)
    resumed = run_streamed(tmp_path, resume=True, tokens=64, allow={"budget"})
    assert resumed["trainer"].state.global_step == 18
    trainer = planned_trainer(tmp_path)
    trainer._allow = {"budget"}
    with pytest.raises(ConfigError, match="allow has no effect on a dataset with a length"):
        trainer.get_train_dataloader()


def test_a_dataset_without_a_length_needs_steps_of_micro_batches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without a length have 2 micro-batches"):
        run_streamed(tmp_path, steps=Steps(samples=4))
    data = datasets.Dataset.from_list([{"input_ids": [1, 2]}]).to_iterable_dataset()
    arguments = arguments_of(TrainingArguments, tmp_path, max_steps=1, save_strategy="no")
    recipe = Recipe(layout=Packed(max_tokens=48))
    trainer = PlannedTrainer(tiny_model(), arguments, train_dataset=data, recipe=recipe)
    trainer.train()
    (tmp_path / "checkpoint-1").mkdir()
    trainer = PlannedTrainer(tiny_model(), arguments, train_dataset=data, recipe=recipe)
    with pytest.raises(CursorError, match="has no position of the data"):
        _loaded(trainer, tmp_path)


def _loaded(trainer: Any, folder: Path) -> Any:
    trainer._resumed = folder / "checkpoint-1"
    return trainer.get_train_dataloader()


def accelerated(**changes: Any) -> StepLoader:
    world = changes.pop("world", World())
    recipe = Recipe(
        layout=Packed(max_tokens=48), steps=Steps(micro_batches=2), topology=Topology(dp=world.size)
    )
    stream = PlannedStream(
        MeasuredMapped(Samples(), lengths=LENGTHS, transform=without_name), recipe, world=world
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    return accelerate_loader(accelerator, stream, **{"model": tiny_model(), **changes})


def test_what_accelerate_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pass `collate`"):
        accelerated(collate_fn=list)
    with pytest.raises(ConfigError, match=r"world=World\(0, 1\)"):
        accelerated(world=World(1, 2))
    with pytest.raises(ConfigError, match="needs model=model"):
        accelerated(model=None)
    sizes: Any = {"hidden_size": 16, "n_layer": 1, "n_head": 2}
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, **sizes))
    for options in ({"model": bloom}, {"model": None, "collate": HfCollate(model=bloom)}):
        with pytest.raises(ConfigError, match="does not support packed batches"):
            accelerated(**options)
    with pytest.raises(ConfigError, match="skip_steps"):
        next(iter(skip_first_batches(accelerated(), 2)))
    with pytest.raises(ConfigError, match=r"differ in size.*num_steps"):
        _ = accelerated().total_batch_size


class Around(torch.nn.Module):  # type: ignore[misc]
    """A module around a model, as engines are."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


class Own(torch.nn.Module):  # type: ignore[misc]
    """A model without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Embedding(VOCAB, VOCAB)

    def forward(self, input_ids: Any, labels: Any = None, **inputs: Any) -> Any:
        return self.head(input_ids)


def test_own_modules_are_left_to_their_authors() -> None:
    batch = next(iter(accelerated()))
    found = next(iter(accelerated(model=Own())))
    assert torch.equal(found["input_ids"], batch["input_ids"])


def test_a_model_inside_another_module_is_judged_as_itself() -> None:
    batch = next(iter(accelerated()))
    found = next(iter(accelerated(model=Around(tiny_model()))))
    assert torch.equal(found["input_ids"], batch["input_ids"])
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="Around does not support packed batches: its forward"):
        accelerated(model=Around(bloom))
    with pytest.raises(ConfigError, match="labels=True needs the model"):
        next(iter(accelerated(model=None, collate=HfCollate(model=None))))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_resumes_after_any_step(workers: int) -> None:
    loader = accelerated(num_workers=workers)
    tokens, states = [], []
    for _ in range(2):
        for number, batch in enumerate(loader, 1):
            tokens.append(batch["input_ids"].tolist())
            if number % 2 == 0:
                states.append(copy.deepcopy(loader.state_dict()))
    first = loader.num_steps(1)
    for done in (1, first - 1, first, first + 5) if workers == 0 else (first + 1,):
        resumed = accelerated(num_workers=workers)
        resumed.load_state_dict(states[done - 1])
        assert resumed.epoch == (done >= first)
        rest = [batch["input_ids"].tolist() for _ in range(resumed.epoch, 2) for batch in resumed]
        assert rest == tokens[2 * done :]
    skipped = accelerated()
    skipped.set_epoch(1)
    skipped.skip_steps(3)
    assert [batch["input_ids"].tolist() for batch in skipped] == tokens[2 * (first + 3) :]


def test_a_loader_loads_a_state_that_wraps_its_cursor_and_refuses_others() -> None:
    loader, resumed = accelerated(), accelerated()
    tokens = [batch["input_ids"].tolist() for batch in loader]
    resumed.skip_steps(3)
    cursor = resumed.state_dict()
    resumed = accelerated()
    resumed.load_state_dict({"cursor": cursor, "done": 3})  # as version 0.1.0 wrote it
    assert [batch["input_ids"].tolist() for batch in resumed] == tokens[6:]
    nothing: Any = None
    with pytest.raises(CursorError, match=r"Pass what state_dict\(\) returned"):
        resumed.load_state_dict(nothing)


def test_a_checkpoint_is_refused_if_its_steps_end_elsewhere_now(tmp_path: Path) -> None:
    """The Trainer resumes from a number of steps, which once meant other samples silently."""
    run_trainer(tmp_path, "packed", stop=20, save_steps=5)
    with pytest.raises(
        CursorError, match=r"saved at sample 36 of epoch 1, .* sample 19 of epoch 2"
    ):
        run_trainer(tmp_path, "packed", resume=True, gradient_accumulation_steps=3)
    with pytest.raises(CursorError, match="shuffled by seed 42 and is shuffled by seed 7"):
        run_trainer(tmp_path, "packed", resume=True, seed=7)
    trainer = planned_trainer(tmp_path)
    trainer._lengths = [1, *LENGTHS[1:]]
    with pytest.raises(CursorError, match="lengths was"):
        trainer.train(resume_from_checkpoint=True)
    again = run_trainer(tmp_path, "packed", resume=True, epochs=6, save_strategy="no")
    assert [len(epoch) for epoch in again["reads"]] == [83 - 36, 83, 83, 83, 83]


def test_steps_counted_in_samples_resume_with_other_batches(tmp_path: Path) -> None:
    changes: Any = {"steps": Steps(samples=7), "epochs": 2, "save_steps": 17}
    run_trainer(tmp_path, "packed", stop=18, gradient_accumulation_steps=5, **changes)
    resumed = run_trainer(tmp_path, "padded", resume=True, gradient_accumulation_steps=6, **changes)
    whole = run_trainer(tmp_path / "whole", "padded", gradient_accumulation_steps=6, **changes)
    assert sorted(resumed["reads"][0]) == sorted(whole["reads"][1][5 * 7 :])
