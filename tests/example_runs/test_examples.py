"""The examples, each run as a user runs it, in an empty folder."""

from __future__ import annotations

import ast
import importlib
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate.packages import PACKAGES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUMBER = r"[\d.]+e[-+]\d+"


def run(folder: Path, script: str, *launcher: str) -> str:
    """What an example prints. `launcher` is run as a module, such as torch.distributed.run."""
    command = [sys.executable, *launcher, str(EXAMPLES / script)]
    # Ray would write a token to the home directory. One thread: tests run side by side.
    environment = {
        **os.environ,
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def padding(printed: str) -> list[float]:
    """The percentages of padding: the first of each line that has a table's row."""
    return [float(found) for found in re.findall(r"^\S.*? +([\d.]+)%  ", printed, re.M)]


def differences(printed: str) -> list[float]:
    """All numbers in scientific notation."""
    return [float(found) for found in re.findall(NUMBER, printed)]


def check_two_layouts(printed: str, number: int, least: float = 1e-5) -> None:
    """Padding falls from a third or more to nothing, and losses stay the same."""
    before, *after = padding(printed)
    assert before > 30
    assert after
    assert set(after) == {0.0}
    found = differences(printed)
    assert len(found) == number
    assert max(found) < least


def test_an_own_trainer_is_checked_and_each_fault_is_caught(tmp_path: Path) -> None:
    printed = run(tmp_path, "check_your_trainer.py")
    for what in ("gradient", "leaks", "resume"):
        assert f"{what}, right: passed" in printed
        assert f"{what}, wrong: CAUGHT" in printed
    assert "the gradient of 'padded, 3 samples' differs" in printed
    assert "changing segment 0 moved the outputs of 1, 2" in printed
    assert "data is lost" in printed


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_packed_chats_and_resumes(tmp_path: Path) -> None:
    printed = run(tmp_path, "sft_own_loop.py")
    check_two_layouts(printed, number=3)
    first, last = map(float, re.findall(r"^packed +\S+ +\S+ +(\S+) +(\S+)", printed, re.M)[0])
    assert last < first - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "number"), [("hf_trainer.py", 3), ("accelerate_loop.py", 3), ("trl_sft.py", 2)]
)
def test_trainers_of_others_log_the_same_losses_in_both_layouts(
    tmp_path: Path, script: str, number: int
) -> None:
    check_two_layouts(run(tmp_path, script), number)


@pytest.mark.slow
def test_accelerate_has_the_same_losses_on_two_processes(tmp_path: Path) -> None:
    one = run(tmp_path, "accelerate_loop.py")
    launcher = ("-m", "accelerate.commands.accelerate_cli", "launch", "--cpu")
    two = run(tmp_path, "accelerate_loop.py", *launcher, "--num_processes", "2")
    check_two_layouts(two, 3)
    ends = [re.findall(r"^p\w+.*?% +\S+ +(\S+ +\S+)  ", printed, re.M) for printed in (one, two)]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 2


@pytest.mark.slow
def test_rollouts_learn_alike_without_padding(tmp_path: Path) -> None:
    printed = run(tmp_path, "ppo_rollouts.py")
    check_two_layouts(printed, number=3, least=1e-9)
    rewards = re.findall(r"([\d.]+) -> ([\d.]+)", printed)
    assert rewards[0] == rewards[1]
    assert float(rewards[0][1]) > float(rewards[0][0]) + 0.1


@pytest.mark.slow
def test_token_files_train_from_a_saved_plan_on_any_ranks(tmp_path: Path) -> None:
    printed = run(tmp_path, "pretrain_token_file.py")
    check_two_layouts(printed, number=2)
    usual, even = (float(n) for n in re.findall(r"%.* ([\d.]+)$", printed, re.M))
    assert usual > 1.5 > even


@pytest.mark.slow
def test_sharded_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    check_two_layouts(run(tmp_path, "fsdp2.py", *launcher), number=2)


@pytest.mark.slow
def test_a_killed_actor_is_replaced_and_changes_no_result(tmp_path: Path) -> None:
    printed = run(tmp_path, "ray_rollouts.py")
    assert "killed rank 1, replaced [1], other actors kept: True" in printed
    assert max(differences(printed)) < 1e-5
    assert len(differences(printed)) == 2


@pytest.mark.slow
def test_images_and_text_have_the_gradient_of_samples_one_by_one(tmp_path: Path) -> None:
    printed = run(tmp_path, "vision_language.py")
    apart, largest = differences(printed)
    assert apart < 1e-5 * largest
    ranks = [ast.literal_eval(found) for found in re.findall(r"\[[\d, ]+\]", printed)]
    spread = [max(each) - min(each) for each in ranks]
    assert spread[1] < spread[0] / 2
    (most,) = re.findall(r"tokens and patches .*\] +(\d+)", printed)
    assert int(most) <= 256


def test_a_run_is_planned_without_a_gpu(tmp_path: Path) -> None:
    printed = run(tmp_path, "plan_without_gpu.py")
    seconds = {
        name: float(found)
        for name, found in re.findall(r"^(\S.*?) {2,}\S+% +\S+% +([\d.]+) ", printed, re.M)
    }
    assert seconds["packed, even"] < seconds["packed, in order"] < seconds["padded batches of 8"]
    assert seconds["512 samples a step"] < seconds["packed, even"]
    assert seconds["2,048 samples a step"] < 2 * seconds["packed, even"]
    assert "0 violations" in printed
    assert (tmp_path / "steps.plan").stat().st_size
    assert (tmp_path / "steps.svg").read_text().startswith("<svg")


def test_every_example_is_run_by_a_test_and_listed_with_its_command() -> None:
    scripts = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.py"))
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert len(scripts) >= 12
    for script in scripts:
        assert f'"{script.name}"' in tests, f"no test runs {script}"
        assert f"[{script}]({script})" in listed
        started = rf"`(python|torchrun --nproc-per-node 2) examples/{script}`"
        assert re.search(started, listed)
        said = ast.get_docstring(ast.parse((EXAMPLES / script).read_text("utf-8")))
        assert said
        assert f"examples/{script}" in said


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_examples_import_public_names_alone(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("evenstep"):
            assert node.module in PACKAGES
            for alias in node.names:
                assert alias.name in importlib.import_module(str(node.module)).__all__
