"""Lengths for benchmarks: measured corpora if available, generated ones otherwise.

Each `.npy` file of a folder is one corpus. Without a folder, five seeded distributions with similar
quantiles are used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray

GENERATED = 100_000


def load(folder: Path) -> dict[str, IntArray]:
    """Load every `.npy` file of a folder, by name."""
    return {
        path.stem: np.load(path, allow_pickle=False).astype(np.int64)
        for path in sorted(folder.glob("*.npy"))
    }


def generate(seed: int = 0) -> dict[str, IntArray]:
    """Generate five corpora from a seed."""
    kinds: dict[str, Callable[[Generator], NDArray[np.float64]]] = {
        "agent_conversations": _conversations,
        "gsm8k_sft": _short_answers,
        "pretrain_mix": _pretraining_mix,
        "prolong_documents": _documents,
        "rl_rollouts_synthetic": _rollouts,
    }
    return {
        f"{name} (generated)": kind(np.random.default_rng([seed, number])).astype(np.int64)
        for number, (name, kind) in enumerate(kinds.items())
    }


def draw(corpus: IntArray, count: int, capacity: int | None = None, seed: int = 0) -> IntArray:
    """Draw `count` lengths with replacement, truncated to the capacity."""
    drawn = np.random.default_rng([seed, count]).choice(corpus, count)
    return drawn if capacity is None else np.minimum(drawn, capacity)


def log_normal(count: int, sigma: float, seed: int = 0) -> IntArray:
    """Log-normal lengths around a median of 3000, none longer than 32,768."""
    lengths = np.random.default_rng(seed).lognormal(np.log(3000), sigma, count)
    return np.clip(lengths, 1, 32768).astype(np.int64)


def _conversations(rng: Generator) -> NDArray[np.float64]:
    return np.clip(rng.lognormal(np.log(7000), 1.15, GENERATED), 900, 130_000)


def _short_answers(rng: Generator) -> NDArray[np.float64]:
    return np.clip(rng.lognormal(np.log(121), 0.39, GENERATED), 31, 420)


def _pretraining_mix(rng: Generator) -> NDArray[np.float64]:
    body = rng.lognormal(np.log(520), 1.2, GENERATED)
    tail = 8000 * (1 + rng.pareto(1.2, GENERATED))
    return np.clip(np.where(rng.random(GENERATED) < 0.03, tail, body), 1, 200_000)


def _documents(rng: Generator) -> NDArray[np.float64]:
    return np.clip(575 + rng.lognormal(np.log(1340), 1.1, GENERATED), 575, 350_000)


def _rollouts(rng: Generator) -> NDArray[np.float64]:
    prompt = np.clip(rng.lognormal(np.log(200), 0.6, GENERATED), 50, 1024)
    return prompt + np.minimum(rng.lognormal(np.log(950), 1.1, GENERATED), 4096)
