"""Recipe: everything that determines a plan, except the lengths."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from evenstep.core.cost import Cost
from evenstep.core.layout import LAYOUTS, PACKER_NAMES, BaseLayout, Layout
from evenstep.core.ragged import FloatArray, IntArray, rounded_up
from evenstep.core.text import (
    MOST,
    MOST_RANKS,
    Derived,
    constructor,
    one_of,
    real_field,
    seed_number,
    set_fields,
    short_repr,
    truth_field,
    whole_field,
    whole_number,
)
from evenstep.errors import ConfigError

Fp8Recipe: TypeAlias = Literal["tensorwise", "mxfp8", "blockwise"]
# Slots that a scale of each recipe covers.
_FP8: dict[Fp8Recipe, int] = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128}


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology(Derived):
    """The sizes of the data-, context-, tensor- and pipeline-parallel groups.

    dp   data-parallel ranks
    cp   context-parallel ranks, each of which runs a part of every sample
    tp   tensor-parallel ranks
    pp   pipeline stages
    vpp  virtual stages per pipeline stage
    sequence_parallel     tensor-parallel ranks share the tokens as well
    variable_seq_lengths  pipeline stages exchange the shape of each micro-batch, so widths may
                          differ

    >>> Topology(dp=8, cp=2, tp=2).alignment, Topology(dp=8, pp=4, vpp=2).multiple
    (8, 4)
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    variable_seq_lengths: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp", "pp", "vpp"):
            whole_field(self, f"topology.{name}", most=MOST_RANKS)
        for name in ("sequence_parallel", "variable_seq_lengths"):
            truth_field(self, f"topology.{name}")
        for name, axis in (("sequence_parallel", "tp"), ("variable_seq_lengths", "pp")):
            if getattr(self, name) and getattr(self, axis) == 1:
                raise ConfigError(
                    f"topology.{name} has no effect, because topology.{axis} is 1. Set {axis} "
                    f"above 1, or leave it out."
                )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(
                f"topology.vpp is {self.vpp} but topology.pp is 1; virtual stages need a pipeline. "
                f"Set pp above 1 or vpp to 1."
            )

    @cached_property
    def alignment(self) -> int:
        """The multiple that each segment's slots are rounded up to.

        Two chunks per context-parallel rank, each divisible by tp; tp alone with sequence
        parallelism.
        """
        if self.cp > 1:
            return 2 * self.cp * self.tp
        return self.tp if self.sequence_parallel else 1

    def fp8_multiple(self, recipe: Fp8Recipe) -> int:
        """The multiple that a pack's slots are rounded up to for FP8; set it as `layout.round_to`.

        16, 32 or 128 by the recipe, times two chunks per context-parallel rank, times tp with
        sequence parallelism: each rank's part is a multiple by itself.

        >>> Topology().fp8_multiple("mxfp8"), Topology(cp=4, tp=2).fp8_multiple("blockwise")
        (32, 1024)
        """
        one_of("fp8 recipe", recipe, Fp8Recipe)
        # Context-parallel ranks hold two chunks each, so that causal attention is even.
        chunks = 2 * self.cp if self.cp > 1 else 1
        return _FP8[recipe] * chunks * (self.tp if self.sequence_parallel else 1)

    @cached_property
    def multiple(self) -> int:
        """The divisor of the number of micro-batches per rank (interleaved stages)."""
        return self.pp if self.vpp > 1 else 1

    @cached_property
    def equal_widths(self) -> bool:
        """Whether all micro-batches of a step have one shape (fixed pipeline buffers)."""
        return self.pp > 1 and not self.variable_seq_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondWork:
    """A phase of each micro-batch whose work is not in the tokens, such as an image encoder.

    column      the per-sample column that measures it, for example image patches
    cost        what a sample costs in this phase, by its column, in the unit of `Recipe.cost`;
                None makes both works of a step equally large
    same_waves  in each wave, either every rank has a sample with this work or no rank has: an
                encoder that communicates would wait for ranks without images

    A plan evens out both works: its modelled time is the sum of the two, each as `sync_every` says.

    >>> SecondWork(column="patches").column
    'patches'
    """

    column: str
    cost: Cost | None = None
    same_waves: bool = False

    def __post_init__(self) -> None:
        if self.column == "" or type(self.column) is not str:
            raise ConfigError(
                f"second_work.column must be the name of a column, got {self.column!r}."
            )
        if self.cost is not None and not isinstance(self.cost, Cost):
            raise ConfigError(f"second_work.cost must be Cost, got {self.cost!r}.")
        if self.cost is not None and self.cost.per_micro_batch:
            raise ConfigError(
                f"second_work.cost.per_micro_batch must be 0, got {self.cost.per_micro_batch:g}. "
                f"Set cost.per_micro_batch."
            )
        truth_field(self, "second_work.same_waves")

    def of_column(self, column: IntArray) -> FloatArray:
        """The work of samples with this column; none where the column is 0.

        Without a cost, in units of the column: see `scale`.
        """
        cost = Cost() if self.cost is None else self.cost
        return np.where(column > 0, cost.of_lengths(column), 0.0)

    def scale(self, first: float, second: float) -> float:
        """What the works of a step are multiplied with, given the totals of both works."""
        return 1.0 if self.cost is not None or not second else first / second


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Ranks share long sequences: several ranks of a wave compute one of them together.

    most_ranks    the most ranks that share a sequence; by default all
    max_received  the most tokens whose keys and values a rank receives in a wave; by default the
                  larger of the budget and the longest sample

    >>> Sharing(most_ranks=4).most_ranks
    4
    """

    most_ranks: int | None = None
    max_received: int | None = None

    def __post_init__(self) -> None:
        for name in ("most_ranks", "max_received"):
            whole_field(self, f"sharing.{name}", optional=True)


@dataclass(frozen=True, slots=True)
class World:
    """One data-parallel rank of `size`. It is passed explicitly, never looked up.

    >>> [World(rank, 2).rank for rank in range(2)]
    [0, 1]
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        whole_field(self, "world.size", most=MOST_RANKS)
        whole_field(self, "world.rank", least=0, most=self.size - 1)

    @classmethod
    def detect(
        cls, topology: Topology | None = None, environment: Mapping[str, str] | None = None
    ) -> World:
        """The world from the environment that a launcher sets (`torchrun`, Ray, `accelerate`).

        With a topology, the data-parallel rank within it, in Megatron's order of ranks:
        tensor-parallel ranks are adjacent, then context, data, and pipeline stages.

        >>> World.detect(Topology(dp=2, tp=2), {"RANK": "3", "WORLD_SIZE": "4"})
        World(rank=1, size=2)
        """
        environment = os.environ if environment is None else environment
        try:
            rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        except ValueError:
            raise ConfigError(
                f"RANK and WORLD_SIZE must be integers, got {environment.get('RANK')!r} and "
                f"{environment.get('WORLD_SIZE')!r}. Start with torchrun, or pass a World."
            ) from None
        if topology is None:
            return cls(rank, size)
        # Megatron's order: rank = ((pipeline * dp + data) * cp + context) * tp + tensor.
        processes = topology.dp * topology.cp * topology.tp * topology.pp
        if size != processes:
            raise ConfigError(
                f"WORLD_SIZE is {size} but the topology has {processes} processes "
                f"(dp {topology.dp} x cp {topology.cp} x tp {topology.tp} x pp {topology.pp}). "
                f"Start {processes} processes or correct the topology."
            )
        return cls(rank // (topology.tp * topology.cp) % topology.dp, topology.dp)


class FixedMapping(Mapping[str, int]):
    """Numbers by name that cannot change: a field of a frozen dataclass, which prints as a dict.

    >>> FixedMapping({"patches": 4096})
    {'patches': 4096}
    >>> FixedMapping({"patches": 4096}) == {"patches": 4096}
    True
    """

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers = dict(numbers)

    def __getitem__(self, name: str) -> int:
        return self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        """As a dict."""
        return repr(self._numbers)

    def __reduce__(self) -> tuple[type[FixedMapping], tuple[dict[str, int]]]:
        return FixedMapping, (self._numbers,)

    def __deepcopy__(self, memo: object) -> dict[str, int]:
        """Plain data: `dataclasses.asdict` copies fields in this way."""
        return dict(self._numbers)


Overflow: TypeAlias = Literal["error", "alone", "truncate", "split", "drop"]
Balance: TypeAlias = Literal["refined", "lpt", "karmarkar_karp", "stride", "none"]
SyncEvery: TypeAlias = Literal["micro_batch", "step"]
Scope: TypeAlias = Literal["micro_batch", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The size of an optimizer step in samples, tokens, or micro-batches per rank.

    samples        samples of a step, over all ranks
    tokens         the most tokens of a step, over all ranks
    micro_batches  micro-batches of a step on each rank

    A step takes the next samples in order, independent of layout, packer and balance. With none of
    the three, all samples form one step. Steps counted in micro-batches depend on the budget and
    the number of ranks. `overflow="drop"` depends on the budget too, because a dropped sample
    belongs to no step:

    lengths [5, 600, 5, 5], 2 samples per step, drop -> steps [0, -1, 0, 1] at a budget of 512 and
    [0, 0, 1, 1] at 1024

    >>> Steps(samples=512).samples, Steps(micro_batches=4).micro_batches
    (512, 4)
    """

    samples: int | None = None
    tokens: int | None = None
    micro_batches: int | None = None

    def __post_init__(self) -> None:
        names = ("samples", "tokens", "micro_batches")
        sizes = [name for name in names if getattr(self, name) is not None]
        if len(sizes) > 1:
            raise ConfigError(
                f"steps takes one of samples, tokens and micro_batches, got {' and '.join(sizes)}."
            )
        for name in sizes:
            whole_field(self, f"steps.{name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Hard limits per micro-batch in addition to the bounds of the layout.

    cost     the most that a micro-batch may cost; segments count at their aligned lengths, in
             padded rows at the full width
    columns  the most that a micro-batch may hold of each per-sample column that the caller gives
             (image patches, loss tokens), by name
    gathered the most keys that a micro-batch gathers for segments that see a shared prefix in
             front: those tokens and their own; by default 8 times the slots of a micro-batch

    Several packed rows share the limits evenly, and a group stays in one row.

    >>> Limits(columns={"patches": 4096}).columns["patches"]
    4096
    """

    cost: float | None = None
    columns: Mapping[str, int] = field(default_factory=dict)
    gathered: int | None = None

    def __post_init__(self) -> None:
        whole_field(self, "limits.gathered", optional=True)
        if not isinstance(self.columns, Mapping):
            raise ConfigError(
                f"limits.columns must map the name of each column to the most that a micro-batch "
                f"may hold, got {short_repr(self.columns)}. Write {{'patches': 4096}}."
            )
        columns = {
            name: whole_number(f"limits.columns.{name}", most)
            for name, most in self.columns.items()
        }
        object.__setattr__(self, "columns", FixedMapping(columns))
        if self.cost is not None and not 0 < real_field(self, "limits.cost") < math.inf:
            raise ConfigError(f"limits.cost must be finite and above 0, got {self.cost:g}.")

    def __hash__(self) -> int:
        return hash((self.cost, frozenset(self.columns.items()), self.gathered))

    __setstate__ = set_fields

    def __deepcopy__(self, memo: object) -> Limits:
        """Limits never change, so they are their own copy."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Derived):
    """All settings of a plan. The same recipe and lengths give the same plan on every rank.

    balance      how work is divided between ranks; `none` keeps the step's order: each micro-batch
                 takes the next samples while the bounds hold, and micro-batch k runs on rank
                 k mod dp
    sync_every   how often ranks synchronise, which is what balance minimises: `micro_batch` (FSDP,
                 ZeRO-3) or `step` (DDP)
    groups       where samples that share a group id stay together
    equal_sizes  whether ranks of a step differ by at most one segment
    equal_tokens whether all micro-batches of a wave are as wide as the widest of them, as some
                 kernels and the dispatch of experts need
    second_work  work that a column of the samples measures and that is evened out as well
    min_saving   the share of a step's time that more micro-batches per rank than the fewest must
                 save; by default 0.01 if `cost.per_micro_batch` is 0, else 0
    overflow     what happens to a sample that is longer than a micro-batch can hold: an error, a
                 micro-batch of its own (`alone`), or it is truncated, split or dropped
    seed         for packers that use random numbers (`first_fit_shuffle`, or one of your own)
    sharing      whether ranks share long sequences; None: every sample runs on one rank
    """

    layout: Layout
    topology: Topology = field(default_factory=Topology)
    steps: Steps = field(default_factory=Steps)
    cost: Cost = field(default_factory=Cost)
    limits: Limits = field(default_factory=Limits)
    balance: Balance = "refined"
    sync_every: SyncEvery = "micro_batch"
    groups: Scope = "micro_batch"
    equal_sizes: bool = False
    equal_tokens: bool = False
    second_work: SecondWork | None = None
    min_saving: float | None = None
    overflow: Overflow = "error"
    seed: int = 0
    sharing: Sharing | None = None

    def __post_init__(self) -> None:
        # Parts of another type are refused first, with the constructor that was meant.
        for name, kind in {"layout": BaseLayout, **_PARTS, **_OPTIONAL_PARTS}.items():
            value, wanted = getattr(self, name), kind.__name__
            if isinstance(value, kind) or (value is None and name in _OPTIONAL_PARTS):
                continue
            wanted = "Padded or Packed" if name == "layout" else wanted
            wanted += " or None" if name in _OPTIONAL_PARTS else ""
            named = name == "cost" and isinstance(value, str)
            remedy = f" Write cost=Cost.named({value!r})." if named else ""
            raise ConfigError(f"{name} must be {wanted}, got {short_repr(value)}.{remedy}")
        for name, words in _CHOICES.items():
            one_of(name, getattr(self, name), words)
        for name in ("equal_sizes", "equal_tokens"):
            truth_field(self, name)
        if self.min_saving is not None and not 0 <= real_field(self, "min_saving") < 1:
            raise ConfigError(f"min_saving must be in [0, 1), got {self.min_saving:g}.")
        object.__setattr__(self, "seed", seed_number(self.seed))
        # Every part is valid by itself; what follows is how they go together.
        self._check_sizes()
        self.layout.check_options(self)
        self._check_options()
        if self.sharing is not None:
            self._check_sharing(self.sharing)

    __setstate__ = set_fields

    def _check_sharing(self, sharing: Sharing) -> None:
        """Raise if ranks cannot share sequences with these settings."""
        layout, topology, most = self.layout, self.topology, sharing.most_ranks
        for refused, reason in (
            (layout.segments_per_row is not None, "a padded layout. Use layout=Packed(...)"),
            (layout.pad_to is not None, "rows of a fixed width. Set max_tokens instead of pad_to"),
            (self.capacity is None, "micro-batches without a budget. Set layout.max_tokens"),
            (topology.cp > 1, f"topology.cp={topology.cp}. Set cp to 1 and raise dp instead"),
            (topology.pp > 1, f"topology.pp={topology.pp}. Set topology.pp to 1"),
            (layout.packer is not None, "a packer by name. Leave out layout.packer"),
            (self.balance != "refined", f"balance={self.balance!r}. Use balance='refined'"),
            (self.equal_sizes or self.equal_tokens, "equal_sizes or equal_tokens. Unset them"),
            (self.second_work is not None, "second_work. Unset it"),
            (self.limits.cost is not None, "limits.cost. Lower layout.max_tokens instead"),
            (self.steps.micro_batches is not None, "steps.micro_batches. Count samples or tokens"),
            (self.overflow in ("alone", "split"), f"overflow={self.overflow!r}. Use another one"),
        ):
            if refused:
                raise ConfigError(f"sharing cannot be combined with {reason}, or leave it out.")
        if most is not None and most > topology.dp:
            raise ConfigError(
                f"sharing.most_ranks must be at most topology.dp, {topology.dp}, got {most}."
            )
        if sharing.max_received is not None and sharing.max_received < topology.alignment:
            raise ConfigError(
                f"sharing.max_received must be at least one aligned block, {topology.alignment} "
                f"tokens, got {sharing.max_received}."
            )

    def _check_sizes(self) -> None:
        """Raise if widths, limits or counts contradict each other."""
        layout, unit, limits = self.layout, self.width_unit, self.limits
        if layout.pad_to is not None and layout.pad_to % unit:
            raise ConfigError(
                f"layout.pad_to must be a multiple of {unit} (rounding and alignment), got "
                f"{layout.pad_to}. Use {rounded_up(layout.pad_to, unit)}."
            )
        if self.capacity is not None and self.capacity < unit:
            raise ConfigError(
                f"layout.max_tokens is {layout.max_tokens}, but widths are multiples of {unit} "
                f"(rounding and alignment). Raise layout.max_tokens to {unit} or more."
            )
        # Rows share a limit evenly, so each needs at least 1 of it.
        shared = layout.packs_per_micro_batch
        for name, most in limits.columns.items():
            if most < shared:
                raise ConfigError(
                    f"limits.columns.{name} must be at least layout.rows, {shared}, got {most}."
                )
        if limits.cost is not None and limits.cost <= self.cost.per_micro_batch:
            raise ConfigError(
                f"limits.cost is {limits.cost:g}, but an empty micro-batch costs "
                f"{self.cost.per_micro_batch:g}. Raise limits.cost."
            )
        asked, multiple = self.steps.micro_batches, self.topology.multiple
        if asked is not None and asked % multiple:
            raise ConfigError(
                f"steps.micro_batches must be a multiple of {multiple} for this pipeline, got "
                f"{asked}. Use {rounded_up(asked, multiple)}."
            )
        wide = "this pipeline needs equal widths" if self.topology.equal_widths else None
        if layout.pad_to is not None:
            wide = f"layout.pad_to={layout.pad_to} fixes it"
        if self.overflow == "alone" and (wide is not None or self.equal_tokens):
            raise ConfigError(
                f"overflow='alone' needs rows of any width, but "
                f"{wide or 'equal_tokens would widen the whole wave'}. Use another overflow."
            )

    def _check_options(self) -> None:
        """Raise if an option has no effect, or cannot be combined with another."""
        layout, second = self.layout, self.second_work
        options = [*layout.options, *(["equal_sizes"] if self.equal_sizes else [])]
        refined = [n for n in ("second_work", "min_saving") if getattr(self, n) is not None]
        if self.balance == "none" and options + refined:
            raise ConfigError(
                f"balance='none' keeps the order of the samples, so {(options + refined)[0]} has "
                f"no effect. Leave one of them out."
            )
        if self.balance != "refined" and refined:
            raise ConfigError(
                f"{refined[0]} needs balance='refined', got {self.balance!r}. Leave one of them "
                f"out."
            )
        if self.seed and not uses_seed(layout.packer):
            raise ConfigError(
                f"seed={self.seed} has no effect on this plan: only the packer first_fit_shuffle "
                f"and packers of your own use it. Leave it out; the order of samples has the seed "
                f"of the stream."
            )
        for name in ("equal_tokens", "second_work"):
            if getattr(self, name) and layout.segments_per_row is not None:
                raise ConfigError(f"{name} needs a packed layout. Use Packed, or leave it out.")
        if self.equal_tokens and (layout.pad_to is not None or self.topology.equal_widths):
            raise ConfigError(
                "equal_tokens has no effect, because all micro-batches have one width. Leave it "
                "out, or remove layout.pad_to, or set topology.variable_seq_lengths."
            )
        if second is not None and options:
            raise ConfigError(
                f"second_work and {options[0]} cannot be combined. Leave one of them out."
            )
        if second is not None and second.same_waves and self.steps.micro_batches is not None:
            raise ConfigError(
                "second_work.same_waves and steps.micro_batches cannot be combined. Count steps in "
                "samples or tokens."
            )

    def __repr__(self) -> str:
        """The constructor call, with the fields that differ from their defaults."""
        return constructor(self)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The per-sample columns that the recipe needs, by name."""
        second = [] if self.second_work is None else [self.second_work.column]
        return tuple(dict.fromkeys([*self.limits.columns, *second]))

    @cached_property
    def gathered(self) -> int | None:
        """The most keys that a micro-batch gathers: `limits.gathered`, or its default."""
        if self.limits.gathered is not None or self.layout.budget is None:
            return self.limits.gathered
        return 8 * self.layout.budget

    @cached_property
    def saving(self) -> float:
        """`min_saving`, or its default."""
        if self.min_saving is not None:
            return self.min_saving
        return 0.01 if self.cost.per_micro_batch == 0 else 0.0

    @cached_property
    def width_unit(self) -> int:
        """Widths are multiples of this: the layout's rounding and the topology's alignment."""
        return math.lcm(self.layout.round_to, self.topology.alignment)

    @cached_property
    def capacity(self) -> int | None:
        """The slots of one row; None if unbounded.

        max_tokens 100 with widths in multiples of 16 gives 96.
        """
        most = self.layout.max_tokens if self.layout.pad_to is None else self.layout.pad_to
        return None if most is None else most // self.width_unit * self.width_unit

    @cached_property
    def longest_segment(self) -> int | None:
        """The longest segment that a micro-batch can hold; None if unbounded.

        max_tokens 100 at alignment 16 holds a segment of 96; a limit on cost may allow less. Ranks
        that share sequences hold one of them together.
        """
        unit, capacity = self.topology.alignment, self.capacity
        if self.sharing is not None and capacity is not None:
            part, ranks = capacity // unit * unit, self.sharing.most_ranks or self.topology.dp
            received = self.sharing.max_received  # all but the last part
            most = MOST if received is None or ranks == 1 else received // unit * unit + part
            return min(ranks * part, most)
        if self.limits.cost is None:
            return None if capacity is None else capacity // unit * unit
        most = (MOST if capacity is None else capacity) // unit
        share = self.layout.cost_share(self) * (1 + 1e-12)  # 3 tokens of 0.1 fit 0.3
        # Cost grows with length: bisect for the longest segment within the limit.
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.layout.segment_costs(self, np.array([middle * unit]))[0] <= share:
                low = middle
            else:
                high = middle - 1
        return None if capacity is None and low == most else low * unit

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `Recipe.from_dict` reads it back."""
        words = asdict(self)
        parts = {name: words.pop(name) for name in (*_PARTS, "second_work")}
        # As in files of earlier versions.
        parts["cost"] = self.cost.to_dict()
        if self.limits.gathered is None:
            del parts["limits"]["gathered"]
        if self.sharing is None:
            del words["sharing"]
        # The layout comes last, as in files of earlier versions.
        del words["layout"]
        return {**parts, **words, "layout": self.layout.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` wrote."""
        # Files of earlier versions may lack newer fields, which then have their defaults, and hold
        # settings without effect, which are left out.
        data = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        topology, second = dict(data["topology"]), data.get("second_work")
        for name, axis in (("sequence_parallel", "tp"), ("variable_seq_lengths", "pp")):
            topology[name] = topology[name] and topology[axis] > 1
        if second is not None and second["cost"] is not None:
            data["second_work"] = {**second, "cost": Cost(**second["cost"])}
        data |= {"topology": topology, "layout": LAYOUTS[data["layout"]["kind"]](**data["layout"])}
        if not uses_seed(data["layout"].packer):
            data["seed"] = 0
        given = [*_PARTS, *(name for name in _OPTIONAL_PARTS if data.get(name) is not None)]
        parts = {name: (_PARTS | _OPTIONAL_PARTS)[name](**data[name]) for name in given}
        return cls(**{**data, **parts})


def recipe_on_fewer_ranks(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe of a plan of one step whose micro-batches run on `ranks` ranks, which divide its
    own: a rank has more micro-batches, and sizes may differ."""
    if ranks == recipe.topology.dp:
        return recipe
    steps, times = recipe.steps, recipe.topology.dp // ranks
    if steps.micro_batches is not None:
        steps = Steps(micro_batches=times * steps.micro_batches)
    topology = replace(recipe.topology, dp=ranks)
    return replace(recipe, topology=topology, steps=steps, equal_sizes=False, sharing=None)


def check_recipe(recipe: object) -> None:
    """Raise if a recipe is something else, such as a layout."""
    if isinstance(recipe, Recipe):
        return
    kind = type(recipe).__name__
    remedy = f"{kind}(...)" if isinstance(recipe, BaseLayout) else "..."
    raise ConfigError(f"recipe must be a Recipe, got {kind}. Write Recipe(layout={remedy}).")


def uses_seed(packer: object) -> bool:
    """Whether a packer, given by name or as a function, may use random numbers."""
    return packer == "first_fit_shuffle" or packer not in (None, *PACKER_NAMES)


_CHOICES: dict[str, Any] = {
    "balance": Balance,
    "sync_every": SyncEvery,
    "groups": Scope,
    "overflow": Overflow,
}
_PARTS: dict[str, Any] = {"topology": Topology, "steps": Steps, "cost": Cost, "limits": Limits}
_OPTIONAL_PARTS: dict[str, Any] = {"second_work": SecondWork, "sharing": Sharing}
