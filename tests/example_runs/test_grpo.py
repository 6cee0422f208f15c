"""The GRPO example, run as a user runs it."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "grpo" / "grpo.py"
ROW = re.compile(r"^(\w+) +([\d.]+) -> ([\d.]+) +([\d.]+)% .*? ([\d.e+-]+)$", re.M)
SMALL = ("--iterations", "1", "--prompts", "4", "--warm-up", "0.6")


def run(*options: str) -> str:
    # A token of its own: Ray would write one to the home directory.
    environment = {**os.environ, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(printed: str) -> dict[str, tuple[float, ...]]:
    """(reward before, reward after, percentage of padding, largest difference) of each layout."""
    return {name: tuple(map(float, rest)) for name, *rest in ROW.findall(printed)}


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss +(-?[\d.]+)", printed)]


@pytest.mark.slow
def test_losses_are_the_same_in_every_layout_and_padding_is_not() -> None:
    printed = run(*SMALL)
    found = rows(printed)
    assert list(found) == ["padded", "dynamic", "packed"]
    assert all(differs < 1e-9 for *_, differs in found.values())
    assert all(losses(printed))
    padding = [percentage for _, _, percentage, _ in found.values()]
    assert padding[0] > 30 > padding[1] > padding[2] == 0


@pytest.mark.slow
def test_rewards_are_the_same_with_shared_prompts_at_fewer_tokens() -> None:
    printed = run("--share-prompts", "--iterations", "3", "--prompts", "16")
    assert all(differs < 1e-9 for *_, differs in rows(printed).values())
    ((saved, differs),) = re.findall(r"\(([\d.]+)x fewer\); rewards differ by (\S+)", printed)
    assert float(saved) > 2
    assert float(differs) < 1e-6


@pytest.mark.slow
def test_feeding_and_ray_run_the_same_file() -> None:
    options = (*SMALL, "--layout", "packed")
    assert losses(run(*options, "--ray", "2")) == pytest.approx(losses(run(*options)), abs=2e-6)
    fed = [losses(run(*options, "--feed", *more)) for more in ([], ["--ray", "2"])]
    assert fed[0] == pytest.approx(fed[1], abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises(seed: int) -> None:
    ((before, after, _, _),) = rows(run("--layout", "packed", "--seed", str(seed))).values()
    assert before < 0.6
    assert after > before + 0.15
