"""How VeOmni counts the tokens of a sample, and where this process is among its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from evenstep.errors import ConfigError
from evenstep.tensors.batch import IGNORE_INDEX

Length: TypeAlias = Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class ParallelState:
    """One process without parallelism."""

    dp_size: int = 1
    dp_rank: int = 0
    sp_size: int = 1
    sp_rank: int = 0
    sp_enabled: bool = False


def get_parallel_state() -> Any:
    """The parallel state of VeOmni if it is loaded; else that of a single process."""
    running = sys.modules.get("veomni.distributed.parallel_state")
    return ParallelState() if running is None else running.get_parallel_state()


def get_length_by_attention_mask_fn(sample: Any) -> int:
    """The sum of the attention mask.

    >>> get_length_by_attention_mask_fn({"attention_mask": [1, 1, 0]})
    2
    """
    return int(np.asarray(sample["attention_mask"]).sum())


def get_length_by_input_ids_fn(sample: Any) -> int:
    """The number of tokens.

    >>> get_length_by_input_ids_fn({"input_ids": [5, 6, 7]})
    3
    """
    return int(np.asarray(sample["input_ids"]).size)


def get_length_by_labels_fn(sample: Any) -> int:
    """The number of labels other than -100, or without labels that of the tokens.

    A list counts as the sum of its samples. What is no sample counts as 1, and None as 0.

    >>> get_length_by_labels_fn({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})
    2
    """
    if sample is None:
        return 0
    if isinstance(sample, list):
        return sum(map(get_length_by_labels_fn, sample))
    if not isinstance(sample, Mapping):
        return 1
    labels = sample.get("labels")
    if labels is not None and not isinstance(labels, tuple):
        return int((np.asarray(labels) != IGNORE_INDEX).sum())
    if "attention_mask" in sample:
        return get_length_by_attention_mask_fn(sample)
    return get_length_by_input_ids_fn(sample) if "input_ids" in sample else 1


_COUNTS = {"total": get_length_by_attention_mask_fn, "effective": get_length_by_labels_fn}


def get_length_fn_by_count_mode(count_mode: str) -> Length:
    """The function that counts a sample: `total` all its tokens, `effective` its labels.

    >>> get_length_fn_by_count_mode("total") is get_length_by_attention_mask_fn
    True
    """
    if count_mode not in _COUNTS:
        raise ConfigError(
            f"Unknown dyn_bsz count_mode {count_mode!r}; expected one of: {', '.join(_COUNTS)}."
        )
    return _COUNTS[count_mode]
