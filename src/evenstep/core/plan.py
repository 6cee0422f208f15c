"""Plan: which tokens of which samples run in which step, rank and micro-batch. Pure data."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.core import archive, summary
from evenstep.core import stats as measures
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.ragged import FloatArray, IntArray, frozen
from evenstep.core.recipe import Recipe
from evenstep.core.rounding import rounded_up
from evenstep.core.segments import Segments
from evenstep.errors import FileError, InputError

_HASHED = 64  # segments and micro-batches that a hash looks at
_OFFSETS = ("row_offsets", "micro_offsets", "cell_offsets")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Segments in execution order, divided into rows, micro-batches and cells.

    Three nested offsets: row r holds segments `row_offsets[r]` up to `row_offsets[r + 1]`,
    micro-batch m holds rows `micro_offsets[m]` onwards, and the cell of (step, rank), number
    `step * ranks + rank`, holds micro-batches `cell_offsets[cell]` onwards. `widths` gives each
    micro-batch's width. `step_of` is the step that each sample is assigned to, -1 if it is dropped.
    `sample_ids` gives the id of each sample in a source, if samples were planned in another order.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8)))
    >>> plan
    Plan(1 step, 1 rank, 2 samples, 1 micro-batch, fill 100%, imbalance 1.000)
    >>> plan.segments.length.tolist(), plan.widths.tolist()
    ([5, 3], [8])
    """

    recipe: Recipe
    lengths: IntArray
    step_of: IntArray
    segments: Segments
    row_offsets: IntArray
    micro_offsets: IntArray
    cell_offsets: IntArray
    widths: IntArray
    groups: IntArray | None = None
    columns: Mapping[str, IntArray] = field(default_factory=dict)
    sample_ids: IntArray | None = None

    def __post_init__(self) -> None:
        for name in ("lengths", "step_of", "widths", *_OFFSETS):
            object.__setattr__(self, name, frozen(getattr(self, name)))
        for name in ("groups", "sample_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, frozen(getattr(self, name)))
        columns = {name: frozen(column) for name, column in self.columns.items()}
        object.__setattr__(self, "columns", MappingProxyType(columns))

    # Shape -------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return self.recipe.topology.dp

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return (len(self.cell_offsets) - 1) // self.num_ranks

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of all steps and ranks, including empty ones."""
        return len(self.widths)

    def __len__(self) -> int:
        return self.num_steps

    @overload
    def __getitem__(self, at: SupportsIndex) -> list[list[MicroBatch]]: ...
    @overload
    def __getitem__(self, at: tuple[SupportsIndex, SupportsIndex]) -> list[MicroBatch]: ...
    def __getitem__(
        self, at: SupportsIndex | tuple[SupportsIndex, SupportsIndex]
    ) -> list[list[MicroBatch]] | list[MicroBatch]:
        """`plan[step, rank]`: the micro-batches of one rank, in execution order.

        `plan[step]` is the list of these for all ranks. `plan[-1]` is the last step.
        """
        if isinstance(at, tuple) and len(at) != 2:
            raise IndexError(f"expected plan[step] or plan[step, rank], got {len(at)} indices")
        if not isinstance(at, tuple):
            step = self._step(at)
            return [self._cell(step, rank) for rank in range(self.num_ranks)]
        step, rank = self._step(at[0]), operator.index(at[1])
        if not 0 <= rank < self.num_ranks:
            raise IndexError(
                f"rank {rank} is out of range: the plan has ranks 0 to {self.num_ranks - 1}"
            )
        return self._cell(step, rank)

    def __iter__(self) -> Iterator[list[list[MicroBatch]]]:
        """The steps, each as `plan[step]`."""
        return (self[step] for step in range(self.num_steps))

    def _step(self, index: SupportsIndex) -> int:
        step = operator.index(index)
        if not -self.num_steps <= step < self.num_steps:
            raise IndexError(
                f"step {step} is out of range: "
                f"the plan has {summary.counted(self.num_steps, 'step')}"
            )
        return step % self.num_steps

    def _cell(self, step: int, rank: int) -> list[MicroBatch]:
        at = step * self.num_ranks + rank
        return [self._micro(m) for m in range(self.cell_offsets[at], self.cell_offsets[at + 1])]

    def _micro(self, micro: int) -> MicroBatch:
        rows = self.row_offsets[self.micro_offsets[micro] : self.micro_offsets[micro + 1] + 1]
        segments = self.segments.take(slice(int(rows[0]), int(rows[-1])))
        together = self.groups if self.recipe.groups == "micro_batch" else None
        return MicroBatch(
            segments,
            rows - rows[0],
            int(self.widths[micro]),
            self.lengths[segments.sample],
            self.recipe.topology.alignment,
            self.ends(segments.sample),
            None if together is None else together[segments.sample],
            self.recipe.width_unit,
        )

    def ends(self, samples: IntArray) -> IntArray:
        """Where each of `samples` ends in this plan: its length, also after truncation.

        A segment that ends earlier is one of several segments of its sample.
        """
        lengths = self.lengths[samples]
        limit = self.recipe.longest_segment if self.recipe.overflow == "truncate" else None
        return lengths if limit is None else np.minimum(lengths, limit)

    # Columns per micro-batch -------------------------------------------------------------------

    @property
    def segment_offsets(self) -> IntArray:
        """The first segment of each micro-batch, and the end of the last."""
        return self.row_offsets[self.micro_offsets]

    @property
    def rows(self) -> IntArray:
        """Rows of each micro-batch."""
        return np.diff(self.micro_offsets)

    @property
    def slots(self) -> IntArray:
        """Slots of each micro-batch: rows times width."""
        return self.rows * self.widths

    @property
    def tokens(self) -> IntArray:
        """Real tokens of each micro-batch."""
        return self.sum_by_micro_batch(self.segments.length)

    @property
    def costs(self) -> FloatArray:
        """Modelled work of each micro-batch, including padding; an empty one costs its slots.

        See `micro_batch_costs` of the layouts.
        """
        return self.recipe.layout.micro_batch_costs(
            self.recipe.cost,
            self.rows,
            self.widths,
            self.micro_batch_of_segment,
            self.aligned_lengths,
        )

    @property
    def aligned_lengths(self) -> IntArray:
        """The slots of each segment in its row, without the padding at the end of the row."""
        return rounded_up(self.segments.length, self.recipe.topology.alignment)

    def sum_by_micro_batch(self, per_segment: IntArray) -> IntArray:
        """Sum a per-segment column over each micro-batch; an empty one gives 0."""
        total = np.zeros(len(per_segment) + 1, np.int64)
        np.cumsum(per_segment, out=total[1:])
        return np.diff(total[self.segment_offsets])

    @property
    def cell_of_micro_batch(self) -> IntArray:
        """`step * ranks + rank` of each micro-batch."""
        return np.repeat(np.arange(len(self.cell_offsets) - 1), np.diff(self.cell_offsets))

    @property
    def micro_batch_of_segment(self) -> IntArray:
        """The micro-batch of each segment."""
        return np.repeat(np.arange(self.num_micro_batches), np.diff(self.segment_offsets))

    # Order of samples --------------------------------------------------------------------------

    @property
    def order(self) -> IntArray:
        """Forward permutation: the i-th segment to run is number `order[i]` in sample order.

        Sample order is by sample, then by start. Without splitting or dropping, `order[i]` is
        the sample that runs i-th.
        """
        by_sample = np.lexsort((self.segments.start, self.segments.sample))
        order = np.empty(len(by_sample), np.int64)
        order[by_sample] = np.arange(len(by_sample))
        return order

    def restore(self, values: ArrayLike) -> NDArray[Any]:
        """Put one value (or row) per segment, given in execution order, back in sample order.

        An execution order of [3, 0, 2, 1] with rows [30, 0, 20, 10] restores [0, 10, 20, 30].
        """
        array = np.asarray(values)
        if len(array) != len(self.segments):
            raise InputError(
                f"restore got {len(array)} values but the plan has {len(self.segments)} segments. "
                f"Pass one value per segment, in execution order."
            )
        restored = np.empty_like(array)
        restored[self.order] = array
        return restored

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[Recipe, dict[str, bytes]]]:
        """Pickle the recipe, and arrays as bytes: they are read without a copy, and read-only."""
        data = {name: array.tobytes() for name, array in self._arrays().items()}
        return Plan._of_bytes, (self.recipe, data)

    def __copy__(self) -> Plan:
        """A plan never changes, so it is its own copy."""
        return self

    def __deepcopy__(self, memo: object) -> Plan:
        return self

    # Measures, identity, files -----------------------------------------------------------------

    def __repr__(self) -> str:
        """Sizes, fill and imbalance in one line."""
        return summary.of_plan(self)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same recipe and the same arrays."""
        if not isinstance(other, Plan):
            return NotImplemented
        if self is other:
            return True
        mine, others = self._arrays(), other._arrays()
        return (
            {name: len(array) for name, array in mine.items()}
            == {name: len(array) for name, array in others.items()}
            and self.recipe == other.recipe
            and all(np.array_equal(mine[name], others[name]) for name in mine)
        )

    def __hash__(self) -> int:
        """A cheap hash of the recipe, the sizes and the first segments."""
        segments = self.segments.take(slice(_HASHED))
        return hash(
            (
                self.recipe,
                len(self.lengths),
                len(self.segments),
                self.widths[:_HASHED].tobytes(),
                segments.sample.tobytes(),
                segments.length.tobytes(),
            )
        )

    def stats(
        self, width: int | None = None, *, progress: measures.Progress | None = None
    ) -> dict[str, measures.Value]:
        """Padding, imbalance and distance from the bounds. See `core.stats`.

        `progress(done, total)` is called with the number of steps measured so far.
        """
        measured = measures.of_plan(self, width, progress)
        return {"cost": self.recipe.cost.description, **measured}

    def step_stats(self) -> list[dict[str, measures.Value]]:
        """The same measures for each step by itself."""
        return measures.of_steps(self)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan: equal plans, and only these, have equal fingerprints."""
        return hashlib.sha256(self._encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically."""
        archive.write(path, self._encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan. Raises `FileError` if the file is damaged, truncated or not a plan."""
        return cls._read(archive.read(path), path)

    def to_bytes(self) -> bytes:
        """The bytes of the file that `save` writes."""
        return archive.pack(self._encode())

    @classmethod
    def from_bytes(cls, data: bytes, name: str | os.PathLike[str] = "the plan") -> Plan:
        """Read a plan from the bytes of its file; `name` is what an error calls it."""
        return cls._read(archive.unpack(data, name), name)

    @classmethod
    def _read(cls, payload: bytes, name: str | os.PathLike[str]) -> Plan:
        try:
            return cls._decode(payload)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            raise FileError(
                f"{os.fspath(name)} holds a plan that this version cannot read ({error}). Make the "
                f"plan again with this version."
            ) from None

    def _arrays(self) -> dict[str, IntArray]:
        """All arrays of the plan, by name."""
        arrays = {
            "lengths": self.lengths,
            "step_of": self.step_of,
            "sample": self.segments.sample,
            "start": self.segments.start,
            "length": self.segments.length,
            "widths": self.widths,
            **{name: getattr(self, name) for name in _OFFSETS},
            **{f"column:{name}": column for name, column in self.columns.items()},
        }
        optional = {"groups": self.groups, "sample_ids": self.sample_ids}
        return arrays | {name: array for name, array in optional.items() if array is not None}

    def _encode(self) -> bytes:
        return archive.encode(self.recipe.to_dict(), self._arrays())

    @classmethod
    def _decode(cls, payload: bytes) -> Plan:
        recipe, arrays = archive.decode(payload)
        return cls._of_arrays(Recipe.from_dict(recipe), arrays)

    @classmethod
    def _of_bytes(cls, recipe: Recipe, data: dict[str, bytes]) -> Plan:
        arrays = {name: np.frombuffer(held, np.int64) for name, held in data.items()}
        return cls._of_arrays(recipe, arrays)

    @classmethod
    def _of_arrays(cls, recipe: Recipe, arrays: dict[str, IntArray]) -> Plan:
        """The inverse of `_arrays`."""
        columns = {
            name.removeprefix("column:"): arrays.pop(name)
            for name in list(arrays)
            if name.startswith("column:")
        }
        segments = Segments(arrays.pop("sample"), arrays.pop("start"), arrays.pop("length"))
        return cls(
            recipe=recipe,
            segments=segments,
            columns=columns,
            **arrays,
        )
