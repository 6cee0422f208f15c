"""SampleColumns: what the samples of a pool take of the limited columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from evenstep.core.ragged import sample_name
from evenstep.core.recipe import Recipe
from evenstep.core.text import whole_number
from evenstep.data.sources.measure import loss_tokens_of
from evenstep.data.sources.source import Sample
from evenstep.data.streams.cut import Piece
from evenstep.errors import ConfigError, SampleError

ColumnOf: TypeAlias = Callable[[Sample], int]
"""What a sample takes of a column, such as its number of image patches."""


class SampleColumns:
    """The columns in `recipe.limits.columns`, by the functions in `given`.

    `loss_tokens` needs no function: they are counted from `labels` and the loss mask, per segment.
    Every segment of a split sample counts its other columns in full, as in plans.

    >>> from evenstep import Limits, Packed
    >>> recipe = Recipe(layout=Packed(max_tokens=9), limits=Limits(columns={"images": 4}))
    >>> SampleColumns(recipe, {"images": lambda sample: len(sample["images"])}).names
    ('images',)
    """

    def __init__(self, recipe: Recipe, given: Mapping[str, ColumnOf]) -> None:
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"columns must map names to functions of a sample, got {type(given).__name__}. "
                f"Pass columns={{'images': lambda sample: len(sample['images'])}}."
            )
        self.names = tuple(recipe.limits.columns)
        packs = recipe.layout.packs_per_micro_batch
        self.shares = tuple(most // packs for most in recipe.limits.columns.values())
        """What one row of a micro-batch may hold of each; padded: the micro-batch."""
        self._given, self._alone = dict(given), recipe.overflow == "alone"
        for name in given:
            if name not in self.names:
                raise ConfigError(
                    f"columns has {name!r}, which has no limit. Set limits.columns.{name}, or "
                    f"leave it out."
                )
        for name in self.names:
            if name not in given and name != "loss_tokens":
                raise ConfigError(
                    f"limits.columns.{name} needs the values of samples. Pass "
                    f"columns={{{name!r}: function of a sample}} to the PooledStream, or use a "
                    f"PlannedStream."
                )

    def of(self, sample_id: int, sample: Sample, piece: Piece) -> tuple[int, ...]:
        """What a piece of a sample takes of each column."""
        return tuple(
            self._value(name, share, sample_id, sample, piece)
            for name, share in zip(self.names, self.shares, strict=True)
        )

    def _value(self, name: str, share: int, sample_id: int, sample: Sample, piece: Piece) -> int:
        if name in self._given:
            value = whole_number(f"column {name}", self._given[name](sample), least=0)
        else:
            value = loss_tokens_of(sample, piece.start, piece.start + piece.length, piece.end)
        if value > share and not self._alone:
            raise SampleError(
                f"sample {sample_name(sample_id)} takes {value} of limits.columns.{name}, more "
                f"than the {share} that fit. Raise the limit, remove the sample, or set "
                f"overflow='alone'."
            )
        return value
