"""From a chat file to a model that transformers loads and that answers from its training data."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    RoFormerConfig,
)

from evenstep import Padded, Recipe, Steps
from evenstep.cli import main
from evenstep.config import ModelSettings
from evenstep.errors import ConfigError, FileError
from evenstep.trainer import export_model, train
from tests.internals import QUESTIONS, chat, complete, export_module, write_chats
from tests.trainer.runs import ROOT, logged, settings, texts

GOOD = {question: answers[0] for question, answers in QUESTIONS.items()}
BAD = {question: answers[1] for question, answers in QUESTIONS.items()}


def answers(folder: Path, adapters: bool = False) -> dict[str, str]:
    """What the model in a folder says to each question."""
    if adapters:
        from peft import AutoPeftModelForCausalLM

        model: Any = AutoPeftModelForCausalLM.from_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = {}
    for question in QUESTIONS:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = asked["input_ids"]
        mask = torch.ones_like(ids)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
        said[question] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return said


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_file(folder: Path, *sets: str) -> list[str]:
    return ["train", str(folder / "run.yaml"), *(word for each in sets for word in ("--set", each))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt the ten chats by heart."""
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder)
    assert main(run_file(folder)) == 0
    return folder


def test_a_chat_file_becomes_a_model_that_answers(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = next(iter(QUESTIONS))
    out = tmp_path / "model"

    assert main(["export", str(trained / "run"), "--out", str(out), "--ask", question]) == 0

    assert capsys.readouterr().out.splitlines()[-1] == GOOD[question]
    assert answers(out) == GOOD
    generation = GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == AutoTokenizer.from_pretrained(out).eos_token_id


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `base`, that has seen both answers to each question equally often."""
    folder = tmp_path_factory.mktemp("undecided")
    write_chats(folder)
    both = [chat(question, each) for question, pair in QUESTIONS.items() for each in pair]
    write_rows(folder / "chats.jsonl", [{"messages": messages} for messages in both])
    sets = [f"trainer.out={folder / 'sft'}", f"trainer.save={folder / 'base'}", "steps.samples=20"]
    assert main([*run_file(folder, *sets), "--steps", "100"]) == 0
    assert answers(folder / "base") not in (GOOD, BAD)
    return folder


def test_adapters_are_merged_or_exported_alone(undecided: Path, tmp_path: Path) -> None:
    base = undecided / "base"
    write_rows(tmp_path / "chats.jsonl", [{"messages": chat(*each)} for each in BAD.items()])
    (tmp_path / "run.yaml").write_text((undecided / "run.yaml").read_text())
    sets = [f"model.path={base}", f"data.tokenizer={base}", "model.lora.rank=8"]
    saved = f"trainer.save={tmp_path / 'merged'}"
    assert main(run_file(tmp_path, *sets, saved)) == 0
    export_model(tmp_path / "run", tmp_path / "adapters", adapters=True)

    assert answers(tmp_path / "merged") == BAD
    assert answers(tmp_path / "adapters", adapters=True) == BAD
    assert not (tmp_path / "adapters" / "model.safetensors").exists()


@pytest.mark.parametrize("good", [True, False])
def test_pairs_decide_between_two_answers(undecided: Path, tmp_path: Path, good: bool) -> None:
    wanted, unwanted = (GOOD, BAD) if good else (BAD, GOOD)
    pairs = [{"prompt": q, "chosen": wanted[q], "rejected": unwanted[q]} for q in QUESTIONS]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    (tmp_path / "run.yaml").write_text((undecided / "run.yaml").read_text())
    sets = [
        "trainer.job=dpo",
        "data.format=pairs",
        f"data.paths={tmp_path / 'pairs.jsonl'}",
        f"data.tokenizer={undecided / 'base'}",
        f"model.path={undecided / 'base'}",
        "optimizer.lr=3e-4",
        "stream.max_num_steps=30",
        f"trainer.save={tmp_path / 'preferred'}",
    ]
    assert main(run_file(tmp_path, *sets)) == 0

    assert answers(tmp_path / "preferred") == wanted
    records = logged(tmp_path / "run")
    assert records[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # nothing has moved yet
    assert records[-1]["accuracy"] == 1.0
    assert all(record["padding"] == 0 for record in records)


def test_reference_log_probs_are_computed_once(tmp_path: Path) -> None:
    write_chats(tmp_path)
    sets = ["trainer.job=dpo", "data.format=pairs", f"data.paths={tmp_path / 'pairs.jsonl'}"]
    assert main([*run_file(tmp_path, *sets), "--steps", "2"]) == 0
    stored = tmp_path / "run" / "data.reference.npy"
    before = stored.stat().st_mtime_ns
    assert main([*run_file(tmp_path, *sets), "--steps", "4"]) == 0

    assert stored.stat().st_mtime_ns == before
    whole = f"trainer.out={tmp_path / 'whole'}"
    assert (
        main([*run_file(tmp_path, *sets, whole, "optimizer.schedule=constant"), "--steps", "4"])
        == 0
    )
    assert len(logged(tmp_path / "whole")) == 4


PAIRS_THAT_DO_NOT_FIT = {
    "overflow=error": r"sample 6 has 69 tokens but .*Raise layout.max_tokens",
    "overflow=truncate": r"group 3 has 2 segments and \d+ slots, .*Raise the layout's bounds",
    "overflow=alone": r"overflow='alone' would part .* Set overflow to error or truncate",
    "overflow=drop": r"overflow='drop' would part .* Set overflow to error or truncate",
    "overflow=split": r"overflow='split' would part .* Set overflow to error or truncate",
    "groups=step": r"groups is 'step', but dpo keeps .* raise layout.max_tokens or shorten",
}


@pytest.mark.parametrize("option", PAIRS_THAT_DO_NOT_FIT)
@pytest.mark.parametrize("dry", [False, True])
def test_pairs_that_do_not_fit_are_never_parted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, dry: bool
) -> None:
    write_chats(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    rows[3]["chosen"] = "word " * 20
    write_rows(tmp_path / "pairs.jsonl", rows)
    sets = ["trainer.job=dpo", "data.format=pairs", f"data.paths={tmp_path / 'pairs.jsonl'}"]
    sets += [option, "layout.max_tokens=60"]
    command = [*run_file(tmp_path, *sets), "--steps", "4", *(["--dry-run"] if dry else [])]

    assert main(command) == 2

    said = " ".join(capsys.readouterr().err.split())
    assert re.search(PAIRS_THAT_DO_NOT_FIT[option], said), said


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(1, "ddp"), (2, "ddp"), (2, "fsdp2")])
def test_a_killed_run_gives_the_model_that_answers(
    tmp_path: Path, ranks: int, parallel: str
) -> None:
    write_chats(tmp_path)
    command = [sys.executable, "-m", "evenstep"]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *launcher, "-m", "evenstep"]
    sets = ["trainer.save_every=7", f"trainer.parallel={parallel}"]
    command += run_file(tmp_path, *sets, f"trainer.save={tmp_path / 'model'}")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    while not complete(tmp_path / "run" / "checkpoints"):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(command, env=environment, check=True)

    assert [record["step"] for record in logged(tmp_path / "run")] == list(range(60))
    assert answers(tmp_path / "model") == GOOD


def test_any_checkpoint_is_exported_and_others_are_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained / "run"
    assert (
        main(["export", str(run), "--out", str(tmp_path / "m"), "--checkpoint", "step-000060"]) == 0
    )
    capsys.readouterr()
    for wrong, says in {
        "step-000099": "has no checkpoint 'step-000099'; it has step-000060",
        "best": "no best checkpoint: data.validation was not set",
    }.items():
        command = ["export", str(run), "--out", str(tmp_path / "n"), "--checkpoint", wrong]
        assert main(command) == 2
        assert says in capsys.readouterr().err
    assert main(["export", str(run), "--out", str(tmp_path / "n"), "--adapters"]) == 2
    assert "has no adapters" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "n")]) == 2
    assert "has no settings.json" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    assert main(["export", str(run), "--out", str(tmp_path / "full")]) == 2
    assert "is not an exported model" in capsys.readouterr().err
    assert (tmp_path / "full" / "thesis.txt").exists()


def test_the_example_decoder_is_not_exported(tmp_path: Path) -> None:
    train(settings(tmp_path / "run", texts(tmp_path), stream={"max_num_steps": 1}))
    with pytest.raises(ConfigError, match="no Hugging Face model"):
        export_model(tmp_path / "run", tmp_path / "model")


def test_weights_have_the_precision_of_the_model(trained: Path, tmp_path: Path) -> None:
    export_model(trained / "run", tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "half")
    (tmp_path / "run.yaml").write_text((trained / "run.yaml").read_text())
    chats = f"data.paths={trained / 'chats.jsonl'}"
    sets = [chats, f"model.path={tmp_path / 'half'}", f"data.tokenizer={tmp_path / 'half'}"]
    assert main([*run_file(tmp_path, *sets, "optimizer.warmup_steps=0"), "--steps", "1"]) == 0

    export_model(tmp_path / "run", tmp_path / "out")

    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert weights.dtype == torch.bfloat16


def test_a_damaged_checkpoint_is_not_exported(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    newest = complete(tmp_path / "run" / "checkpoints")[-1]
    shard = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)

    with pytest.raises(FileError, match=r"does not match its checksum\). Name another"):
        export_model(tmp_path / "run", tmp_path / "model")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.filterwarnings("ignore:balancing by tokens only")
def test_weights_that_are_tied_or_not_trained_are_exported_as_they_are(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RoFormerConfig(vocab_size=256, intermediate_size=16, is_decoder=True, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    frozen = "roformer.encoder.embed_positions.weight"
    weights[frozen] += 1
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    options: dict[str, Any] = {
        "recipe": Recipe(layout=Padded(samples=2), steps=Steps(samples=4)),
        "model": ModelSettings(path=str(tmp_path / "base")),
        "stream": {"max_num_steps": 1},
        "optimizer": {"lr": 1e-20},
    }
    train(settings(tmp_path / "run", texts(tmp_path), **options))

    export_model(tmp_path / "run", tmp_path / "model")

    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, expected in weights.items():
        assert torch.allclose(exported[name], expected, atol=1e-12), name


def test_only_an_earlier_export_is_replaced(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    for _ in range(2):
        export_model(trained / "run", out)
    (out / "checkpoint-500").mkdir()
    with pytest.raises(FileError, match="is not an exported model"):
        export_model(trained / "run", out)
    (out / "checkpoint-500").rmdir()
    (tmp_path / "run.yaml").write_text((trained / "run.yaml").read_text())
    sets = [f"model.path={out}", f"data.paths={trained / 'chats.jsonl'}", "trainer.keep=1"]

    assert main(run_file(tmp_path, *sets, f"trainer.save={out}")) == 2

    assert f"trainer.save: {out} holds the model that the run began with" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert (out / "model.safetensors").exists()


def test_a_run_is_exported_from_any_directory(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of the run were relative to where it was started."""
    shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("run"))
    monkeypatch.chdir(tmp_path)
    assert main([*run_file(Path("copy")), "--steps", "1"]) == 0
    monkeypatch.chdir(trained)

    export_model(tmp_path / "copy" / "run", tmp_path / "model")

    assert len(answers(tmp_path / "model")) == len(QUESTIONS)
    shutil.rmtree(tmp_path / "copy" / "start")
    with pytest.raises(FileError, match=r"config\.json, which .* began with, does not exist"):
        export_model(tmp_path / "copy" / "run", tmp_path / "other")


def test_the_working_directory_is_not_replaced_and_a_link_remains(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is the working directory"):
        export_model(trained / "run", Path())
    link = tmp_path / "newest"
    link.symlink_to("model")
    for _ in range(2):
        export_model(trained / "run", link)

    assert link.is_symlink()
    assert (tmp_path / "model" / "config.json").exists()


def test_a_checkpoint_that_a_run_removes_meanwhile_is_one_sentence(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    build = vars(export_module)["build"]

    def slow(*arguments: Any) -> Any:
        shutil.rmtree(complete(tmp_path / "run" / "checkpoints")[-1])
        return build(*arguments)

    monkeypatch.setattr(export_module, "build", slow)

    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model")]) == 2

    (said,) = capfd.readouterr().err.splitlines()
    assert "step-000060 was removed. A run that goes on removes old ones: export again" in said


def test_a_kill_leaves_no_reference_log_probs_of_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chats(tmp_path)
    sets = ["trainer.job=dpo", "data.format=pairs", f"data.paths={tmp_path / 'pairs.jsonl'}"]
    command = [*run_file(tmp_path, *sets), "--steps", "1"]
    assert main(command) == 0
    path = tmp_path / "run" / "data.reference.npy"
    before = np.load(path)

    def half(file: Any, values: Any, save: Any = np.save) -> None:
        save(file, values * 0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", half)
        with suppress(KeyboardInterrupt):
            main([*command, "--set", "model.attention=eager"])
    assert not np.array_equal(np.load(path), before)

    assert main(command) == 0

    assert np.array_equal(np.load(path), before)


def test_adapters_of_random_weights_are_not_exported_alone(tmp_path: Path) -> None:
    write_chats(tmp_path)
    assert main([*run_file(tmp_path, "model.lora.rank=4"), "--steps", "1"]) == 0

    with pytest.raises(ConfigError, match=r"no adapters to use alone: model\.path has no"):
        export_model(tmp_path / "run", tmp_path / "model", adapters=True)

    export_model(tmp_path / "run", tmp_path / "model")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft, which leaves the weights tied
@pytest.mark.parametrize("targets", ["lm_head", "embed_tokens", "q_proj"])
def test_adapters_of_tied_weights_are_merged_into_their_own_layer(
    tmp_path: Path, targets: str
) -> None:
    from peft import AutoPeftModelForCausalLM

    write_chats(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "start")
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    sets = ["model.lora.rank=4", f"model.lora.targets=[{targets}]", "optimizer.lr=0.05"]
    sets += [f"model.path={tmp_path / 'base'}", "stream.max_num_steps=3"]
    assert main(run_file(tmp_path, *sets)) == 0
    export_model(tmp_path / "run", tmp_path / "merged")
    export_model(tmp_path / "run", tmp_path / "adapters", adapters=True)

    ids = torch.arange(3, 20)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")(ids).logits
        assert torch.allclose(merged(ids).logits, expected, atol=1e-4)
    assert merged.config.tie_word_embeddings == (targets == "q_proj")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_adapters_of_two_ranks_are_exported_by_one(tmp_path: Path, parallel: str) -> None:
    write_chats(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "start")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    sets = ["model.lora.rank=4", f"trainer.parallel={parallel}", "stream.max_num_steps=4"]
    sets.append(f"model.path={tmp_path / 'base'}")
    assert main(run_file(tmp_path, *sets, f"trainer.out={tmp_path / 'one'}")) == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = run_file(tmp_path, *sets, f"trainer.out={tmp_path / 'two'}")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *launcher, "-m", "evenstep", *arguments]
    subprocess.run(command, env=environment, check=True)

    for adapters, file in ((True, "adapter_model.safetensors"), (False, "model.safetensors")):
        folders = [tmp_path / f"{name}-{adapters}" for name in ("one", "two")]
        for folder in folders:
            export_model(tmp_path / folder.name.partition("-")[0], folder, adapters=adapters)
        one, two = (load_file(folder / file) for folder in folders)
        assert one.keys() == two.keys()
        assert all("lora" in name for name in one) == adapters
        for name, expected in one.items():
            assert torch.allclose(two[name], expected, atol=1e-5), name
