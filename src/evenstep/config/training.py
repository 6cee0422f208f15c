"""The model and the optimizer of a training run, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Literal, TypeAlias

from evenstep.core.text import one_of, real_field, whole_field
from evenstep.errors import ConfigError

Schedule: TypeAlias = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Low-rank adapters, trained instead of the weights of a Hugging Face model (with peft).

    rank     rank of the adapters
    alpha    their outputs are scaled by alpha / rank
    targets  names of the linear layers that get one; none chooses all but the head

    >>> ModelSettings(path="models/llama", lora=LoraSettings(rank=4)).lora.rank
    4
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole_field(self, "model.lora.rank")
        _positive(self, "model.lora.alpha")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The model: a Hugging Face causal language model, or our small decoder.

    path       folder of a Hugging Face model with its weights; or a config.json, for random
               weights. None: the decoder of the sizes below
    attention  attention implementation of a Hugging Face model; one that cannot call "evenstep"
               keeps its own
    lora       train low-rank adapters instead of all weights
    vocab      size of the decoder's vocabulary; None: that of the tokenizer
    hidden     size of the decoder's hidden states
    layers     number of its layers
    heads      number of its attention heads
    kv_heads   number of its key and value heads
    ffn        width of its feed-forward layers

    >>> ModelSettings(hidden=128).heads
    4
    """

    path: str | None = None
    attention: str = "evenstep"
    lora: LoraSettings | None = None
    vocab: int | None = None
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 192

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "ffn"):
            whole_field(self, f"model.{name}")
        whole_field(self, "model.vocab", optional=True)
        if self.path is None and self.lora is not None:
            raise ConfigError(
                "model.lora needs a Hugging Face model. Set model.path, or remove model.lora."
            )
        if self.path is None and (self.hidden % (2 * self.heads) or self.heads % self.kv_heads):
            raise ConfigError(
                f"model.hidden must be a multiple of 2 * heads and heads a multiple of kv_heads, "
                f"got hidden {self.hidden}, heads {self.heads} and kv_heads {self.kv_heads}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW, and how its learning rate changes: up over `warmup_steps`, then along `schedule`.

    lr            the highest learning rate
    betas         of the running means of gradients and their squares
    eps           added to the denominator
    weight_decay  of matrices; vectors, such as those of norms, have none
    warmup_steps  steps over which the learning rate rises
    schedule      how it falls afterwards: along a cosine, along a line, only in the last
                  `decay_steps` (wsd: warm up, stay, decay), or not at all
    min_lr        the learning rate that it falls to
    decay_steps   steps of the fall of a wsd schedule; None: a tenth of all steps
    clip          the largest norm of the gradient; None does not clip

    >>> [round(OptimizerSettings(lr=1.0, warmup_steps=2).rate(step, 10), 2) for step in (0, 1, 9)]
    [0.5, 1.0, 0.04]
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    min_lr: float = 0.0
    decay_steps: int | None = None
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            _positive(self, f"optimizer.{name}")
        for name in ("weight_decay", "min_lr"):
            if real_field(self, f"optimizer.{name}") < 0:
                raise ConfigError(f"optimizer.{name} must not be negative.")
        if self.clip is not None:
            _positive(self, "optimizer.clip")
        whole_field(self, "optimizer.warmup_steps", least=0)
        one_of("optimizer.schedule", self.schedule, Schedule)
        if self.decay_steps is not None:
            whole_field(self, "optimizer.decay_steps")
            if self.schedule != "wsd":
                raise ConfigError(
                    f"optimizer.decay_steps has no effect on a {self.schedule} schedule. Set "
                    f"optimizer.schedule to wsd, or remove it."
                )
        if self.schedule == "constant" and self.min_lr:
            raise ConfigError(
                "optimizer.min_lr has no effect on a constant schedule. Set optimizer.schedule to "
                "another, or remove it."
            )
        object.__setattr__(self, "betas", tuple(self.betas))
        if [0 <= beta < 1 for beta in self.betas] != [True, True]:
            raise ConfigError(f"optimizer.betas must be two numbers in [0, 1), got {self.betas}.")
        if self.min_lr > self.lr:
            raise ConfigError(
                f"optimizer.min_lr must be at most lr {self.lr:g}, got {self.min_lr:g}."
            )

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step `step`, counted from 0, of `steps`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        falls = max(1, steps - self.warmup_steps)
        if self.schedule == "wsd":
            falls = min(falls, self.decay_steps or max(1, steps // 10))
        done = min(max(0, step - (steps - falls)) / falls, 1.0)
        left = {"cosine": (1 + cos(pi * done)) / 2, "constant": 1.0}.get(self.schedule, 1 - done)
        return self.min_lr + (self.lr - self.min_lr) * left


def _positive(owner: object, name: str) -> None:
    if not real_field(owner, name) > 0:
        raise ConfigError(f"{name} must be above 0.")
