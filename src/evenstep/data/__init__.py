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
    from evenstep.data.corpus.chat import ChatEncoder
    from evenstep.data.corpus.corpus import Corpus
    from evenstep.data.sources.as_source import as_source
    from evenstep.data.sources.iterated import Iterated
    from evenstep.data.sources.jsonl import Jsonl
    from evenstep.data.sources.lengths import Lengths
    from evenstep.data.sources.mapped import Mapped, MeasuredMapped
    from evenstep.data.sources.megatron import MegatronTokens
    from evenstep.data.sources.memory import InMemory
    from evenstep.data.sources.parquet import ParquetText
    from evenstep.data.sources.source import (
        Draw,
        MeasuredSource,
        SampleSource,
        SeededSource,
        SequentialSource,
    )
    from evenstep.data.sources.token_file import TokenFile
    from evenstep.data.sources.token_writer import TokenFileWriter, write_token_file
    from evenstep.data.streams.feed import FedMicroBatch, Feed
    from evenstep.data.streams.pool import Pool
    from evenstep.data.streams.pooled_cursor import merge_cursors
    from evenstep.data.streams.separate import separate_lengths
    from evenstep.data.streams.stream import until_all_end

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
            "sources.as_source": ["as_source"],
            "corpus.chat": ["ChatEncoder"],
            "corpus.corpus": ["Corpus"],
            "sources.iterated": ["Iterated"],
            "sources.jsonl": ["Jsonl"],
            "sources.lengths": ["Lengths"],
            "sources.mapped": ["Mapped", "MeasuredMapped"],
            "sources.megatron": ["MegatronTokens"],
            "sources.memory": ["InMemory"],
            "sources.parquet": ["ParquetText"],
            "sources.source": [
                "Draw",
                "MeasuredSource",
                "SampleSource",
                "SeededSource",
                "SequentialSource",
            ],
            "sources.token_file": ["TokenFile"],
            "sources.token_writer": ["TokenFileWriter", "write_token_file"],
            "streams.feed": ["FedMicroBatch", "Feed"],
            "streams.pool": ["Pool"],
            "streams.pooled_cursor": ["merge_cursors"],
            "streams.separate": ["separate_lengths"],
            "streams.stream": ["until_all_end"],
        },
    )
