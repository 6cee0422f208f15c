"""Checkpoints that are damaged, of another model, or cannot be written."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from evenstep import World
from evenstep.cli import main
from evenstep.config import ModelSettings
from evenstep.train import Alone
from evenstep.trainer import train
from tests.internals import Checkpoints, Place, Ranks, complete
from tests.trainer.runs import losses, settings, texts

ALONE = Ranks(
    world=World(0, 1),
    device=torch.device("cpu"),
    collective=Alone(),
    slow=None,
    background=None,
)
CONFIG = """
layout: {max_tokens: 512}
steps: {samples: 6}
stream: {max_num_steps: 8}
data: {paths: texts.jsonl}
model: {hidden: 32, heads: 2, kv_heads: 1, ffn: 48}
optimizer: {lr: 3e-3, schedule: constant}
trainer: {out: run, save_every: 3}
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps, with checkpoints after 3 and 6, and one of 8 beside it."""
    folder = tmp_path_factory.mktemp("ended")
    texts(folder)
    (folder / "run.yaml").write_text(CONFIG)
    assert main(["train", str(folder / "run.yaml"), "--steps", "6"]) == 0
    whole = f"trainer.out={folder / 'whole'}"
    assert main(["train", str(folder / "run.yaml"), "--set", whole]) == 0
    return folder


@pytest.fixture
def folder(ended: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ended, tmp_path / "copy"))


def shard(path: Path) -> Path:
    return max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)


def _truncate(path: Path) -> None:
    shard(path).write_bytes(shard(path).read_bytes()[:-100])


def _empty(path: Path) -> None:
    shard(path).write_bytes(b"")


def _flip(file: Path, at: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a truncated shard": _truncate,
    "an empty shard": _empty,
    "a missing shard": lambda path: shard(path).unlink(),
    "garbage metadata": lambda path: (path / ".metadata").write_bytes(b"garbage" * 99),
    "missing metadata": lambda path: (path / ".metadata").unlink(),
    "a flipped bit in a shard": lambda path: _flip(shard(path)),
    "a flipped bit in the metadata": lambda path: _flip(path / ".metadata", 0.9),
    "a flipped bit in the state": lambda path: _flip(path / "state.json", 0.05),
    "an empty state": lambda path: (path / "state.json").write_bytes(b""),
    "a deeply nested state": lambda path: (path / "state.json").write_text("[" * 100_000),
    "a missing state": lambda path: (path / "state.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_line(
    folder: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[damage](folder / "run" / "checkpoints" / "step-000006")
    before = losses(folder / "run")

    assert main(["train", str(folder / "run.yaml")]) == 2

    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "step-000006 is damaged" in said[0]
    assert "trainer.fall_back=true to continue from step-000003 or older." in said[0]
    assert losses(folder / "run") == before


@pytest.mark.parametrize("damage", ["a flipped bit in a shard", "a missing state"])
def test_a_run_continues_from_the_newest_checkpoint_that_is_not_damaged(
    folder: Path, damage: str
) -> None:
    DAMAGES[damage](folder / "run" / "checkpoints" / "step-000006")

    with pytest.warns(UserWarning, match="step-000006 is damaged .* continuing from step-000003"):
        assert main(["train", str(folder / "run.yaml"), "--set", "trainer.fall_back=true"]) == 0

    assert losses(folder / "run") == losses(folder / "whole")
    names = [path.name for path in complete(folder / "run" / "checkpoints")]
    assert names == ["step-000006", "step-000008"]
    assert (folder / "run" / "checkpoints" / "damaged-step-000006").is_dir()


def test_a_checkpoint_of_an_earlier_version_is_not_called_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "run" / "checkpoints" / "step-000006"
    state = json.loads((path / "state.json").read_text())
    earlier = {name: state[name] for name in ("step", "cursor", "skipped")}
    (path / "state.json").write_text(json.dumps(earlier))

    assert main(["train", str(folder / "run.yaml"), "--set", "trainer.fall_back=true"]) == 2

    (said,) = capsys.readouterr().err.splitlines()
    assert "step-000006 is of an earlier version" in said
    assert path.is_dir()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in complete(folder / "run" / "checkpoints"):
        _truncate(path)

    assert main(["train", str(folder / "run.yaml"), "--set", "trainer.fall_back=true"]) == 2

    (said,) = capsys.readouterr().err.splitlines()
    assert "no checkpoint" in said
    assert len(losses(folder / "run")) == 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.ffn=64", "shape (48, 32), but (64, 32) in the model"),
        ("model.layers=1", "it has blocks.1."),
        ("model.layers=3", "it lacks blocks.2."),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    folder: Path, change: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run" / "settings.json").unlink()  # as a run of an earlier version has none
    command = ["train", str(folder / "run.yaml"), "--set", change]
    for more in ([], ["--set", "trainer.fall_back=true"]):
        assert main([*command, *more]) == 2

        (said,) = capsys.readouterr().err.splitlines()
        assert "step-000006 is of another model" in said
        assert says in said


def test_a_disk_that_is_full_ends_the_run_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = folder / "run" / "checkpoints"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert main(["train", str(folder / "run.yaml")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    said = capsys.readouterr().err.splitlines()
    (error,) = [line for line in said if line.startswith("error: ")]
    assert "step-000008 cannot be written (File too large)" in error
    assert said[-1] == error
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000003", "step-000006"]
    assert main(["train", str(folder / "run.yaml")]) == 0
    assert losses(folder / "run") == losses(folder / "whole")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_a_checkpoint_starts_no_second_pool_of_threads(tmp_path: Path) -> None:
    """With one, torch waits otherwise: every step after a checkpoint took 1.2 times as long."""
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    threads = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        model(torch.ones(64, 512)).sum().backward()  # starts the first pool
        optimizer.step()
        checkpoints = Checkpoints(tmp_path, 1, ALONE)
        before = len(list(Path("/proc/self/task").iterdir()))
        checkpoints.save(Place(1, None), model, optimizer)
        checkpoints.finish()
        after = len(list(Path("/proc/self/task").iterdir()))
        checkpoints.wait()
    finally:
        torch.set_num_threads(threads)

    assert [path.name for path in complete(tmp_path)] == ["step-000001"]
    assert after - before < 4


def test_fewer_steps_than_are_done_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(folder / "run.yaml"), "--steps", "4"]) == 2

    (said,) = capsys.readouterr().err.splitlines()
    assert "stream.max_num_steps is 4, but 6 steps are done" in said
    assert main(["train", str(folder / "run.yaml"), "--steps", "6"]) == 0
    assert "6 steps were done before" in capsys.readouterr().out


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(),
                                                                reason="needs a GPU"))]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_continues_exactly(tmp_path: Path, device: str) -> None:
    GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    data = texts(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    model = ModelSettings(path=str(tmp_path / "config.json"), attention="eager")
    options = {"model": model, "optimizer": {"schedule": "constant"}, "trainer": {"device": device}}

    train(settings(whole, data, stream={"max_num_steps": 6}, **options))
    for steps in (2, 6):
        train(settings(parts, data, stream={"max_num_steps": steps}, **options))

    assert losses(parts) == losses(whole)
