"""torchtitan's loader. The base class is ours: PyPI has no release with this one.

It builds like `BaseDataLoader` of b5bcd76c: the config calls its owner with runtime arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch

from evenstep.compat.torchtitan import planned_dataloader
from evenstep.data import InMemory
from evenstep.errors import ConfigError


class BaseDataLoader:
    """What torchtitan's base classes do for a loader."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs: Any) -> Any:
            assert self._owner is not None
            return self._owner(config=replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            cls.Config._owner = cls


Loader: Any = planned_dataloader(BaseDataLoader)
LENGTHS = [5, 9, 3, 16, 7, 2, 21, 4, 8, 6, 11, 1]
SAMPLES = [{"input_ids": torch.arange(n) + 100 * i} for i, n in enumerate(LENGTHS)]


def build(rank: int = 0, ranks: int = 2, **config: Any) -> Any:
    made = Loader.Config(**{"source": InMemory(SAMPLES), "infinite": False, **config})
    return made.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer="tokens",
        max_context_length=16,
        num_tokens_per_batch=32,
    )


def test_batches_are_flat_of_one_length_and_hold_every_token_once() -> None:
    assert isinstance(build(), BaseDataLoader)
    ranks = [list(build(rank)) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) > 1
    seen = []
    for inputs, labels in [batch for rank in ranks for batch in rank]:
        tokens, positions = inputs["input"], inputs["positions"]
        assert tokens.shape == positions.shape == labels.shape == (32,)
        assert int(positions.max()) < 16
        labelled = labels != -100
        assert bool((labels[labelled] == tokens[labelled] + 1).all())
        seen += labels[labelled].tolist()
    wanted = [token for sample in SAMPLES for token in sample["input_ids"][1:].tolist()]
    assert sorted(seen) == sorted(wanted)


def test_it_resumes_after_any_batch_also_on_other_ranks() -> None:
    whole = [labels.tolist() for _, labels in build(ranks=1)]
    for done in range(len(whole)):
        loader = build(ranks=1)
        iterator = iter(loader)
        for _ in range(done):
            next(iterator)
        again = build(ranks=1)
        again.load_state_dict(loader.state_dict())
        assert [labels.tolist() for _, labels in again] == whole[done:]
    other = build(ranks=2)
    other.load_state_dict(loader.state_dict())
    other.load_state_dict({})
    assert len(list(other)) >= 1
    other.close()


def test_a_source_can_be_made_of_the_tokenizer_and_repeat() -> None:
    given = []

    def source(tokenizer: Any) -> InMemory:
        given.append(tokenizer)
        return InMemory(SAMPLES)

    loader = build(source=source, infinite=True, seed=3)
    assert given == ["tokens"]
    assert len(list(islice(loader, 20))) == 20


def test_a_batch_is_a_multiple_of_the_context() -> None:
    with pytest.raises(ConfigError, match="must be a multiple of max_context_length, 16"):
        Loader.Config(source=InMemory(SAMPLES)).build(
            dp_world_size=1, dp_rank=0, tokenizer=None, max_context_length=16,
            num_tokens_per_batch=40,
        )  # fmt: skip
