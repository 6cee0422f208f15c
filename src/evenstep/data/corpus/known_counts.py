"""Numbers of tokens that need no tokenizer: of token files and of lists of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.data.corpus.formats import Format
from evenstep.data.corpus.saved_dataset import load_saved_dataset
from evenstep.data.sources.megatron import MegatronTokens
from evenstep.data.sources.source import MeasuredSource
from evenstep.data.sources.token_file import TokenFile
from evenstep.data.sources.token_lists import dataset_list_lengths, parquet_list_lengths


def known_counts(
    kind: Format, files: list[Path], field: str, progress: Callable[[int, int], None]
) -> IntArray | None:
    """The number of tokens of every sample of these files; None if they hold text."""
    match kind:
        case "tokens":
            return _lengths(TokenFile(files))
        case "megatron":
            return _lengths(MegatronTokens(files))
        case "parquet":
            return parquet_list_lengths(files, field, progress)
        case "dataset":
            datasets = {str(file): load_saved_dataset(file) for file in files}
            return dataset_list_lengths(datasets, field, progress)
    return None


def _lengths(source: MeasuredSource) -> IntArray:
    return source.lengths_of(np.arange(len(source)))
