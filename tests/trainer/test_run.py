"""A run in this process: logs, checkpoints, resume, faults."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.optim import Optimizer
from transformers import BloomConfig, LlamaConfig

from evenstep import Topology
from evenstep.config import FaultsError, LoraSettings, ModelSettings, Settings
from evenstep.data import Corpus
from evenstep.errors import ConfigError, EvenstepError
from evenstep.train import StepResult
from evenstep.trainer import train
from tests.internals import complete, read_place, record, run_module
from tests.trainer.runs import logged, losses, settings, texts


def test_a_run_learns_and_leaves_logs_and_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "run"

    ended = train(settings(out, texts(tmp_path), trainer={"keep": 2}))

    assert (ended.steps, ended.stopped) == (12, False)
    assert [path.name for path in complete(out / "checkpoints")] == ["step-000009", "step-000012"]
    records = logged(out)
    assert [record["step"] for record in records] == list(range(12))
    assert records[-1]["loss"] < records[0]["loss"] - 0.2
    assert {"lr", "tokens_per_second", "padding", "grad_norm", "epoch"} <= set(records[0])
    costs, busy = (np.array(records[3][f"micro_batches/{name}"]) for name in ("cost", "busy"))
    assert costs.shape == busy.shape
    assert (costs > 0).all()
    assert (busy > 0).all()


def test_a_run_that_was_stopped_continues_exactly(tmp_path: Path) -> None:
    data = texts(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # A cosine depends on the number of steps of the run.
    optimizer = {"schedule": "constant"}
    train(settings(whole, data, optimizer=optimizer))
    for steps in (4, 5, 12):
        train(settings(parts, data, stream={"max_num_steps": steps}, optimizer=optimizer))

    assert losses(parts) == losses(whole)


def test_lines_of_a_log_after_the_checkpoint_are_written_again(tmp_path: Path) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    train(settings(out, data))
    before = losses(out)
    newest = complete(out / "checkpoints")[-1]
    newest.rename(out / "checkpoints" / ".step-000012")  # as if it had not been finished
    with (out / "log.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')  # as a killed process leaves it

    train(settings(out, data))

    assert losses(out) == before
    assert read_place(complete(out / "checkpoints")[-1]).step == 12


def test_a_signal_saves_and_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    whole = tmp_path / "whole"
    train(settings(whole, data))
    seen: list[int] = []

    def record_and_signal(result: StepResult, optimizer: Optimizer) -> dict[str, Any]:
        seen.append(1)
        if len(seen) == 5:
            signal.raise_signal(signal.SIGTERM)
        return record(result, optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "record", record_and_signal)
        ended = train(settings(out, data))

    assert (ended.steps, ended.stopped) == (5, True)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(settings(out, data))
    assert losses(out) == losses(whole)


def test_checkpoints_of_other_data_are_refused(tmp_path: Path) -> None:
    data, out = texts(tmp_path), tmp_path / "run"
    train(settings(out, data, stream={"max_num_steps": 3}))
    texts(tmp_path, count=30)

    with pytest.raises(EvenstepError, match="belongs to another stream: data was 24 samples"):
        train(settings(out, data))


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_a_hugging_face_model_is_trained_packed(tmp_path: Path, lora: LoraSettings | None) -> None:
    folder = tmp_path / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    LlamaConfig(vocab_size=256, num_attention_heads=2, **sizes).save_pretrained(folder)
    out, data = tmp_path / "run", texts(tmp_path)
    model = ModelSettings(path=str(folder / "config.json"), lora=lora)
    run = settings(out, data, model=model, stream={"max_num_steps": 6})

    train(run)
    first = losses(out)
    (out / "checkpoints" / "step-000006").rename(out / "checkpoints" / ".step-000006")
    train(run)

    assert losses(out) == first
    assert all(record["padding"] == 0 for record in logged(out))


@pytest.mark.parametrize("attention", ["evenstep", "eager"])
def test_a_model_that_cannot_pack_is_padded_with_a_warning(tmp_path: Path, attention: str) -> None:
    folder = tmp_path / "model"
    BloomConfig(vocab_size=256, hidden_size=32, n_layer=2, n_head=2).save_pretrained(folder)
    model = ModelSettings(path=str(folder / "config.json"), attention=attention)
    run = settings(tmp_path / "run", texts(tmp_path), model=model, stream={"max_num_steps": 2})

    with (
        pytest.warns(UserWarning, match="does not support packed"),
        pytest.warns(UserWarning, match="balancing by tokens only"),
    ):
        train(run)

    assert all(0 < record["padding"] < 0.5 for record in logged(tmp_path / "run"))


@pytest.mark.parametrize("options", [{"precision": "bfloat16"}, {"checkpointing": True}])
def test_options_change_the_loss_little_or_not_at_all(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    data = texts(tmp_path)
    train(settings(tmp_path / "plain", data, stream={"max_num_steps": 4}))
    train(settings(tmp_path / "other", data, stream={"max_num_steps": 4}, trainer=options))

    close = 2e-2 if "precision" in options else 1e-12
    assert np.allclose(losses(tmp_path / "plain"), losses(tmp_path / "other"), atol=close)


def test_faults_are_found_before_the_first_step(tmp_path: Path) -> None:
    data = texts(tmp_path)
    with pytest.raises(ConfigError, match="no files"):
        train(settings(tmp_path / "run", str(tmp_path / "nothing*.jsonl")))
    with pytest.raises(ConfigError, match="ids up to 255"):
        train(settings(tmp_path / "run", data, model=ModelSettings(vocab=100)))
    with pytest.raises(ConfigError, match="does not exist"):
        train(settings(tmp_path / "run", data, model=ModelSettings(path=str(tmp_path / "no"))))
    recipe = settings(tmp_path, data).recipe
    two, shared = (replace(recipe, topology=each) for each in (Topology(dp=2), Topology(cp=2)))
    with pytest.raises(ConfigError, match="2, but the number of processes is 1"):
        train(settings(tmp_path / "run", data, recipe=two))
    with pytest.raises(FaultsError) as caught:
        train(Settings(recipe=shared))
    assert len(caught.value.faults) == 4
    assert not (tmp_path / "run" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (("q_proj", "nope"), "no layer 'nope'; it has embed_tokens, q_proj"),
        (("norm",), "model.lora does not fit the model"),
    ],
)
def test_adapters_of_layers_that_cannot_have_them_are_refused(
    tmp_path: Path, targets: tuple[str, ...], says: str
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    LlamaConfig(vocab_size=256, num_attention_heads=2, **sizes).save_pretrained(tmp_path / "model")
    lora = LoraSettings(rank=2, targets=targets)
    model = ModelSettings(path=str(tmp_path / "model" / "config.json"), lora=lora)
    with pytest.raises(ConfigError, match=says):
        train(settings(tmp_path / "run", texts(tmp_path), model=model))


def test_a_chat_takes_loss_on_the_assistant_only(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat}) + "\n")
    out = tmp_path / "run"

    train(
        settings(
            out, str(path), data=Corpus(paths=str(path), format="chat"), stream={"max_num_steps": 1}
        )
    )

    assert logged(out)[0]["loss_tokens"] == len("2</assistant>\n")
