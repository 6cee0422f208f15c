"""Sources and streams: where samples come from -> **steps with a cursor**. No torch here.

sources  samples by index or one after the other: in memory, in files, from other datasets
streams  sources -> steps: planned, pooled, or fed while samples are produced

`PlannedStream` and `PooledStream` are in `evenstep` itself.

>>> from evenstep.data import InMemory
>>> len(InMemory([{"input_ids": [1, 2, 3]}]))
1
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.data.corpus import ChatEncoder, Corpus
    from evenstep.data.dataset import InMemory, Iterated, Lengths, Mapped, MeasuredMapped, as_source
    from evenstep.data.feed import FedMicroBatch, Feed
    from evenstep.data.files import Jsonl, ParquetText
    from evenstep.data.pool import Pool
    from evenstep.data.pooled import merge_cursors
    from evenstep.data.source import (
        Draw,
        MeasuredSource,
        SampleSource,
        SeededSource,
        SequentialSource,
    )
    from evenstep.data.stream import separate_lengths, until_all_end
    from evenstep.data.token_file import (
        MegatronTokens,
        TokenFile,
        TokenFileWriter,
        write_token_file,
    )

__all__ = [
    "ChatEncoder",
    "Corpus",
    "Draw",
    "FedMicroBatch",
    "Feed",
    "InMemory",
    "Iterated",
    "Jsonl",
    "Lengths",
    "Mapped",
    "MeasuredMapped",
    "MeasuredSource",
    "MegatronTokens",
    "ParquetText",
    "Pool",
    "SampleSource",
    "SeededSource",
    "SequentialSource",
    "TokenFile",
    "TokenFileWriter",
    "as_source",
    "merge_cursors",
    "separate_lengths",
    "until_all_end",
    "write_token_file",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "corpus": ["ChatEncoder", "Corpus"],
            "dataset": ["InMemory", "Iterated", "Lengths", "Mapped", "MeasuredMapped", "as_source"],
            "feed": ["FedMicroBatch", "Feed"],
            "files": ["Jsonl", "ParquetText"],
            "pool": ["Pool"],
            "pooled": ["merge_cursors"],
            "source": [
                "Draw",
                "MeasuredSource",
                "SampleSource",
                "SeededSource",
                "SequentialSource",
            ],
            "stream": ["separate_lengths", "until_all_end"],
            "token_file": ["MegatronTokens", "TokenFile", "TokenFileWriter", "write_token_file"],
        },
    )
