"""Settings of a run that goes on: what matters is refused by name, the rest is noted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from evenstep import Limits, Packed, Padded, Recipe, Steps, Topology, World
from evenstep.cli import main
from evenstep.config import FaultsError, ModelSettings, OptimizerSettings, TrainerSettings
from evenstep.data import Corpus
from evenstep.errors import ConfigError
from evenstep.trainer import train
from tests.internals import USABLE, Ranks, SyncEvery, job_of, reduce_every, stored_samples
from tests.trainer.runs import logged, losses, settings, texts

STEPS = {"max_num_steps": 3}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"optimizer": {"lr": 1e-4}}, ["optimizer.lr was 0.003, is 0.0001"]),
        (
            {"optimizer": {"warmup_steps": 1}, "trainer": {"precision": "bfloat16"}},
            ["optimizer.warmup_steps", "trainer.precision was 'float32', is 'bfloat16'"],
        ),
        ({"stream": {**STEPS, "seed": 1}}, ["stream.seed was 0, is 1"]),
        ({"trainer": {"job": "pretrain"}}, ["trainer.job was 'sft', is 'pretrain'"]),
        ({"model": {"layers": 3}}, ["model.layers was 2, is 3"]),
        (
            {"recipe": Recipe(layout=Packed(max_tokens=512), steps=Steps(samples=8))},
            ["steps.samples was 6, is 8"],
        ),
    ],
)
def test_what_losses_depend_on_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], names: list[str]
) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    train(settings(out, data, stream=STEPS))
    before = (out / "settings.json").read_text()
    with pytest.raises(ConfigError, match="holds a run with other settings") as caught:
        train(settings(out, data, **{"stream": {"max_num_steps": 6}, **changes}))

    for name in names:
        assert name in str(caught.value)
    assert "Set them back, or set trainer.out" in str(caught.value)
    assert (out / "settings.json").read_text() == before
    assert len(losses(out)) == 3


@pytest.mark.parametrize("now", [None, 0.5, "held.jsonl"])
def test_a_share_that_was_held_out_stays_held_out(tmp_path: Path, now: Any) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    (tmp_path / "held.jsonl").write_text('{"text": "held out"}\n')
    now = str(tmp_path / now) if isinstance(now, str) else now
    train(settings(out, data, stream=STEPS, data=Corpus(paths=data, validation=0.25)))
    with pytest.raises(ConfigError, match=r"data\.validation was 0\.25, is"):
        train(settings(out, data, data=Corpus(paths=data, validation=now)))


def test_other_changes_are_noted_and_change_no_loss(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = texts(tmp_path)
    constant = {"schedule": "constant"}
    train(settings(tmp_path / "whole", data, optimizer=constant))
    train(settings(tmp_path / "run", data, stream=STEPS, optimizer=constant))
    capfd.readouterr()
    recipe = Recipe(layout=Padded(max_tokens=700), steps=Steps(samples=6))
    options = {"save_every": 2, "keep": 5}
    train(settings(tmp_path / "run", data, recipe=recipe, trainer=options, optimizer=constant))

    said = capfd.readouterr().err
    assert "trainer.keep was 2, is 5 from step 3 on" in said
    starts = (tmp_path / "run" / "starts.jsonl").read_text().splitlines()
    changed = json.loads(starts[-1])["changed"]
    assert changed["layout.kind"] == ["packed", "padded"]
    assert changed["stream.max_num_steps"] == [3, 12]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-6)


def test_a_layout_matters_where_samples_are_cut(tmp_path: Path) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    recipe = Recipe(layout=Packed(max_tokens=64), steps=Steps(samples=6), overflow="truncate")
    train(settings(out, data, recipe=recipe, stream=STEPS))
    with pytest.raises(ConfigError, match=r"layout.max_tokens was 64, is 128"):
        train(settings(out, data, recipe=replace(recipe, layout=Packed(max_tokens=128))))


def test_jobs_that_do_not_fit_the_data_are_refused(tmp_path: Path) -> None:
    data = texts(tmp_path)
    with pytest.raises(FaultsError, match=r"dpo, which trains on pairs. Set data.format to pairs"):
        train(settings(tmp_path / "run", data, trainer={"job": "dpo"}))
    with pytest.raises(FaultsError, match=r"trainer.save writes a Hugging Face model"):
        train(settings(tmp_path / "run", data, trainer={"save": "model"}))
    with pytest.raises(FaultsError, match=r"trainer.beta has no effect on sft"):
        train(settings(tmp_path / "run", data, trainer={"beta": 0.2}))
    with pytest.raises(FaultsError, match=r"trainer.save is trainer.out"):
        train(settings(tmp_path / "run", data, trainer={"save": str(tmp_path / "run")}))


def test_all_that_has_no_effect_or_does_not_exist_is_named_before_anything_is_read(
    tmp_path: Path,
) -> None:
    data = texts(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    recipe = Recipe(layout=Packed(max_tokens=512), limits=Limits(columns={"images": 4}))
    model = {"path": str(tmp_path / "config.json"), "hidden": 128, "vocab": 300}
    trainer = {"log": "nothing", "device": "mps", "max_skipped": 3}
    with pytest.raises(FaultsError) as caught:
        train(settings(tmp_path / "run", data, recipe=recipe, model=model, trainer=trainer))
    expected = (
        "limits.columns has images, which the samples of the trainer do not have.",
        "trainer.max_skipped has no effect where a step that is not finite ends the run.",
        "model.vocab, model.hidden would have no effect: the config of model.path has the sizes.",
        "trainer.log: 'nothing' is unknown; expected one of aim, comet_ml, mlflow, tensorboard",
        "trainer.device 'mps' is unknown.",
    )
    for fault, beginning in zip(caught.value.faults, expected, strict=True):
        assert fault.startswith(beginning)
    with pytest.raises(FaultsError, match=r"model.attention has no effect on the example decoder"):
        train(settings(tmp_path / "run", data, model={"attention": "sdpa"}))
    with pytest.raises(ConfigError, match=r"min_lr has no effect on a constant schedule"):
        OptimizerSettings(schedule="constant", min_lr=1e-5)
    assert not (tmp_path / "run").exists()


def test_pretraining_takes_the_loss_on_all_tokens(tmp_path: Path) -> None:
    row = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 0, 0, 1, 1]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 6)
    for job, tokens in {"sft": 12, "pretrain": 30}.items():
        options = {"stream": {"max_num_steps": 1}, "trainer": {"job": job}}
        train(settings(tmp_path / job, str(tmp_path / "rows.jsonl"), **options))
        assert logged(tmp_path / job)[0]["loss_tokens"] == tokens


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules_are_those_of_transformers(schedule: str) -> None:
    steps, warmup, decay = 40, 5, 8
    names = {"wsd": "warmup_stable_decay", "constant": "constant_with_warmup"}
    more: dict[str, Any] = {}
    if schedule == "wsd":
        more = {"num_decay_steps": decay, "decay_type": "linear"}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(
        names.get(schedule, schedule),
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=more or None,
    )
    ours = OptimizerSettings(
        lr=1.0,
        warmup_steps=warmup,
        schedule=schedule,  # type: ignore[arg-type]
        decay_steps=decay if schedule == "wsd" else None,
    )
    for step in range(steps):
        # Theirs begins with a learning rate of 0, so that the first step has no effect.
        expected = theirs.get_last_lr()[0] if step >= warmup else (step + 1) / warmup
        assert ours.rate(step, steps) == pytest.approx(expected, abs=1e-9)
        optimizer.step()
        theirs.step()


def test_gradients_are_scattered_by_micro_batches_if_summed_ones_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = settings(tmp_path / "run", texts(tmp_path), trainer={"parallel": "fsdp2"})
    job = job_of(whole, ranks=2)
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **sizes}))
    alone: Any = {"collective": None, "slow": None, "background": None}
    ranks = Ranks(world=World(0, 1), device=torch.device("cuda"), **alone)
    samples, _ = stored_samples(job, ranks)
    job = replace(job, settings=replace(job.settings, model=ModelSettings(path=str(config))))
    ranks = replace(ranks, world=World(0, 2))
    monkeypatch.setattr(Ranks, "any", lambda ranks, flag: flag)
    weights = 24 * (4 * 512**2 + 3 * 512 * 768 + 1024) + 512 * (2 * 256 + 1)
    model = torch.nn.Linear(weights, 1, bias=False, device="meta")

    def chosen(memory: float, job: Any = job, tokens: int = 400) -> str:
        properties = SimpleNamespace(total_memory=memory / USABLE)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        options: dict[str, Any] = {"layout": Packed(max_tokens=tokens), "steps": Steps(samples=24)}
        recipe = replace(job.settings.recipe, **options, topology=Topology(dp=2))
        return str(reduce_every(job, ranks, model, samples, recipe))

    # Of each weight, 6 bytes are state, 4 summed gradients or 2.5 scattered ones; 4 activations.
    assert chosen(15 * weights) == "step"
    assert chosen(13 * weights) == "micro_batch"
    assert chosen(9 * weights, tokens=4096) == "step"  # one micro-batch
    words: tuple[SyncEvery, ...] = ("step", "micro_batch")
    for asked in words:
        trainer = TrainerSettings(parallel="fsdp2", reduce_every=asked)
        other = replace(job, settings=replace(job.settings, trainer=trainer))
        assert chosen(13 * weights, other) == asked
    with pytest.raises(FaultsError, match=r"reduce_every has no effect on ddp\."):
        job_of(settings(tmp_path / "run", texts(tmp_path), trainer={"reduce_every": "step"}))


def test_a_dry_run_plans_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "layout: {max_tokens: 512}\nsteps: {samples: 6}\nstream: {max_num_steps: 8}\n"
        "data: {paths: texts.jsonl, validation: 0.25}\ntrainer: {out: run}\n"
        "model: {hidden: 32, heads: 2, kv_heads: 1, ffn: 48}\n"
    )
    command = ["train", str(tmp_path / "run.yaml"), "--dry-run", "--set", "topology.dp=3"]
    assert main([*command, "--json"]) == 0

    figures = json.loads(capsys.readouterr().out)
    assert (figures["samples"], figures["held_out_samples"]) == (18, 6)
    assert figures["steps"] == figures["planned_steps"] == 8
    assert figures["epochs"] == pytest.approx(8 / 3)
    assert figures["slots_of_the_largest_micro_batch"] <= 512
    assert not (tmp_path / "run" / "log.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
