"""`evenstep train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.cli import main
from tests.trainer.runs import losses, texts

CONFIG = """
layout: {max_tokens: 512}
steps: {samples: 6}
stream: {max_num_steps: 3}
data: {paths: texts.jsonl}
model: {hidden: 32, heads: 2, kv_heads: 1, ffn: 48}
optimizer: {lr: 3e-3}
trainer: {out: run}
"""


def test_a_configuration_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG)

    assert main(["train", str(config), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert len(losses(tmp_path / "run")) == 3
    assert main(["train", str(config), "--steps", "4"]) == 0
    assert "done after 4 steps, loss" in capsys.readouterr().out


WITHOUT_TORCH = """
import sys
from pathlib import Path

sys.modules["torch"] = None  # as if it were not installed
from evenstep.cli import main

for line in Path("commands.txt").read_text().splitlines():
    command = line.split()
    print(main(command), *command, file=sys.stderr)
"""
COMMANDS = """
lengths texts.jsonl --out lengths.npy
lengths chats.jsonl --format chat --out chats.npy
plan lengths.npy --max-tokens 512 --samples-per-step 6 --out saved.plan
check saved.plan
report saved.plan
compare lengths.npy --max-tokens 512 --samples-per-step 6
simulate lengths.npy --max-tokens 512 --model llama-3-8b --gpu h100
config check run.yaml
config show run.yaml
"""


def test_only_train_needs_torch_and_says_so(tmp_path: Path) -> None:
    texts(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    commands = [*COMMANDS.strip().splitlines(), "train run.yaml"]
    (tmp_path / "commands.txt").write_text("\n".join(commands))

    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )

    said = ended.stderr.splitlines()
    assert [f"0 {command}" for command in commands[:-1]] == [x for x in said if x[:2] == "0 "]
    assert said[-2].startswith("error: evenstep train needs torch, which is not installed. Run pip")
    assert said[-1] == "2 train run.yaml"


def test_all_mistakes_are_listed_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "layout: {max_tokens: 0}\ndata: {path: a}\nmodel: {hiden: 4}\noptimizer: {lr: -1}\n"
        "trainer: {parallel: zero}\n"
    )

    assert main(["train", str(config)]) == 2

    said = capsys.readouterr().err
    for fault in ("layout.max_tokens", "data.path", "model.hiden", "optimizer.lr", "parallel"):
        assert fault in said
    assert list(tmp_path.iterdir()) == [config]


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("layout: {max_tokens: 512}\n")

    assert main(["train", str(config)]) == 2

    said = capsys.readouterr().err
    assert "has 3 faults" in said
    assert "data is missing" in said


def test_all_that_does_not_exist_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "layout: {max_tokens: 512}\nstream: {max_num_steps: 5}\ntopology: {dp: 3}\n"
        "data: {paths: no/*.jsonl, format: chat, tokenizer: none, template: nil.jinja}\n"
        "model: {path: nowhere}\ntrainer: {out: run, device: gpu7}\n"
    )

    assert main(["train", str(config)]) == 2

    said = capsys.readouterr().err
    assert "has 6 faults" in said
    for fault in ("data.paths", "data.tokenizer", "data.template", "model.path", "topology.dp"):
        assert fault in said
    assert "trainer.device 'gpu7' is unknown" in said
    assert list(tmp_path.iterdir()) == [config]


def test_help_wraps_where_the_terminal_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "SIGINT and SIGTERM save a checkpoint" in capsys.readouterr().out
