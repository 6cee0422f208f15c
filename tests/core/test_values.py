"""Topology, cost, layouts, recipes: what they derive and what they refuse."""

import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from evenstep import (
    Cost,
    Limits,
    Packed,
    Padded,
    PlannedStream,
    PooledStream,
    Ragged,
    Recipe,
    Steps,
    Topology,
    World,
    make_plan,
    pack,
    partition,
)
from evenstep.data import InMemory, Pool
from evenstep.errors import ConfigError, InputError
from tests.internals import Balance, frozen, one_of, truth_value, whole_number

RECIPE = Recipe(layout=Packed(max_tokens=8))
SOURCE = InMemory([{"input_ids": [1, 2, 3]}])
WORD: Any = "3"
LOCAL: Any = lambda *_: None  # noqa: E731
HALF: Any = 8.5


def whole(path: str, value: object, least: int = 1, most: int = 2**40) -> str:
    return f"{path} must be an integer in [{least}, {most}], got {value}."


@pytest.mark.parametrize(
    ("topology", "alignment", "multiple", "equal_widths"),
    [
        (Topology(), 1, 1, False),
        (Topology(cp=2, tp=4), 16, 1, False),
        (Topology(tp=4), 1, 1, False),
        (Topology(tp=4, sequence_parallel=True), 4, 1, False),
        (Topology(pp=4), 1, 1, True),
        (Topology(pp=4, vpp=2), 1, 4, True),
        (Topology(pp=4, vpp=2, variable_seq_lengths=True), 1, 4, False),
    ],
)
def test_a_topology_derives_what_a_plan_must_keep(
    topology: Topology, alignment: int, multiple: int, equal_widths: bool
) -> None:
    assert topology.alignment == alignment
    assert topology.multiple == multiple
    assert topology.equal_widths == equal_widths


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: Topology(dp=0), whole("topology.dp", 0, most=2**20)),
        (lambda: Topology(vpp=2), "topology.vpp is 2 but topology.pp is 1"),
        (lambda: Packed(max_tokens=0), whole("layout.max_tokens", 0)),
        (
            lambda: Packed(max_tokens=8, pad_to=9),
            "max_tokens is 8, but every packed micro-batch has at least 9 slots",
        ),
        (
            lambda: Packed(max_tokens=9, pad_to=9, round_to=2),
            "pad_to must be a multiple of layout.round_to 2, got 9",
        ),
        (lambda: Packed(rows=0, pad_to=8), whole("layout.rows", 0)),
        (lambda: Packed(samples=0), whole("layout.samples", 0)),
        (lambda: Padded(max_tokens=8, round_to=0), whole("layout.round_to", 0)),
        (lambda: Packed(), "layout.max_tokens is missing: a packed"),
        (lambda: Padded(), "layout.max_tokens is missing: a padded"),
        (lambda: Packed(rows=2, max_tokens=8), "layout.rows=2 needs a fixed width"),
        (lambda: Packed(rows=2, pad_to=8, max_tokens=15), "micro-batch has at least 16 slots"),
        (lambda: Padded(samples=2, pad_to=8, max_tokens=15), "micro-batch has at least 16 slots"),
        (
            lambda: Packed(rows=2, pad_to=8, samples=1),
            "must be a multiple of layout.rows, 2, because rows share it evenly, got 1. Use 2",
        ),
        (
            lambda: Packed(rows=2, pad_to=8, samples=5),
            "must be a multiple of layout.rows, 2, because rows share it evenly, got 5. Use 6",
        ),
        (lambda: Packed(max_tokens=8, packer="best"), "unknown layout.packer 'best'"),
        (lambda: Packed(max_tokens=8, packer=WORD), "unknown layout.packer '3'"),
        (lambda: Packed(max_tokens=8, packer=HALF), "must be a name or a function"),
        (lambda: Packed(max_tokens=8, packer=LOCAL), "that a module defines"),
        (
            lambda: Packed(samples=8, packer="optimal"),
            "and layout.samples cannot be combined",
        ),
        (lambda: Steps(samples=2, tokens=3), "got samples and tokens"),
        (lambda: Steps(tokens=0), whole("steps.tokens", 0)),
        (lambda: Limits(columns={"patches": -1}), whole("limits.columns.patches", -1)),
        (lambda: Cost(per_token=-1), "cost.per_token must be in [0, 1e+100], got -1"),
        (lambda: Cost(per_token=0), "cost is 0 for every segment"),
        (lambda: Cost(per_pair=float("nan")), "cost.per_pair must be in [0, 1e+100], got nan"),
        (lambda: Cost(per_pair=10**400), "cost.per_pair must be in [0, 1e+100], got inf"),
        (lambda: Cost(per_pair=WORD), "cost.per_pair must be a number, got '3'."),
        (lambda: Cost(per_pair=True), "cost.per_pair must be a number, got True."),
        (lambda: Limits(cost=WORD), "limits.cost must be a number, got '3'."),
        (lambda: Limits(cost=0), "limits.cost must be finite and above 0, got 0"),
        (lambda: Cost.of_model(layers=0, hidden=1, ffn=1, heads=1), whole("layers", 0)),
        (
            lambda: Cost.of_model(layers=1, hidden=4, ffn=1, heads=8),
            "must be at least heads, 8, got 4",
        ),
        (
            lambda: Cost.of_model(layers=1, hidden=8, ffn=1, heads=2, kv_heads=-2),
            whole("kv_heads", -2),
        ),
        (
            lambda: Cost.of_model(layers=1, hidden=8, ffn=1, heads=2, kv_heads=0),
            whole("kv_heads", 0),
        ),
        (
            lambda: Cost.of_model(layers=1, hidden=8, ffn=1, heads=2, head_dim=-1),
            whole("head_dim", -1),
        ),
        (
            lambda: Cost.of_model(layers=1, hidden=8, ffn=1, heads=2, vocab=-5),
            whole("vocab", -5, least=0),
        ),
        (lambda: Cost.of_model(layers=1, hidden=HALF, ffn=1, heads=2), whole("hidden", 8.5)),
        (
            lambda: Recipe(layout=Packed(rows=1, pad_to=6), topology=Topology(cp=2)),
            "layout.pad_to must be a multiple of 4 (rounding and alignment), got 6",
        ),
        (
            lambda: Recipe(layout=Packed(max_tokens=8), topology=Topology(cp=8)),
            "layout.max_tokens is 8, but widths are multiples of 16",
        ),
        (
            lambda: Recipe(layout=Packed(rows=1, pad_to=8), overflow="alone"),
            "pad_to=8 fixes it",
        ),
        (
            lambda: Recipe(layout=Packed(max_tokens=8), topology=Topology(pp=2), overflow="alone"),
            "needs equal widths",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_name(make: object, fault: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fault)):
        make()  # type: ignore[operator]


def test_whole_numbers_of_numpy_become_plain_ones() -> None:
    for kind in (np.int64, np.int32, np.uint8):
        number = whole_number("samples", kind(3))
        assert type(number) is int
        assert number == 3
    for other in (True, np.bool_(True), 3.0, np.float64(3), "3", None):
        with pytest.raises(ConfigError, match=r"samples must be an integer in \[1, "):
            whole_number("samples", other)
    with pytest.raises(ConfigError, match=r"samples must be an integer in \[0, 9\], got -1"):
        whole_number("samples", np.int64(-1), least=0, most=9)


SEEDED: dict[str, Callable[[Any], object]] = {
    "a recipe": lambda seed: Recipe(
        layout=Packed(max_tokens=8, packer="first_fit_shuffle"), seed=seed
    ),
    "pack": lambda seed: pack([3], 8, seed=seed),
    "a planned stream": lambda seed: PlannedStream(SOURCE, RECIPE, seed=seed),
    "a pooled stream": lambda seed: PooledStream(SOURCE, RECIPE, seed=seed),
}


@pytest.mark.parametrize("make", SEEDED.values(), ids=SEEDED)
def test_a_seed_is_refused_where_it_is_given(make: Callable[[Any], object]) -> None:
    for seed in (0, 2**63 - 1, np.int64(3), np.uint64(2**63 - 1)):
        make(seed)
    for seed in (-1, 2**63, 2**64, 10**5000, np.int64(-1), np.uint64(2**63)):
        with pytest.raises(ConfigError, match=r"^seed must be in \[0, 2\*\*63\), got .+\.$"):
            make(seed)
    for other in (True, np.True_, "3", 3.0, None):
        with pytest.raises(ConfigError, match=r"^seed must be an integer in \[0, 2\*\*63\), got"):
            make(other)


TRUTHS: dict[str, Callable[[Any], object]] = {
    "equal_sizes": lambda truth: Recipe(layout=Packed(max_tokens=8), equal_sizes=truth),
    "topology.sequence_parallel": lambda truth: Topology(tp=2, sequence_parallel=truth),
    "topology.variable_seq_lengths": lambda truth: Topology(pp=2, variable_seq_lengths=truth),
    "shuffle": lambda truth: PlannedStream(SOURCE, RECIPE, shuffle=truth),
    "infinite_loop": lambda truth: PlannedStream(SOURCE, RECIPE, infinite_loop=truth),
    "infinite_loop of a pool": lambda truth: PooledStream(SOURCE, RECIPE, infinite_loop=truth),
    "gated": lambda truth: Cost.of_model(layers=1, hidden=8, ffn=1, heads=2, gated=truth),
    "causal": lambda truth: Cost.of_model(layers=1, hidden=8, ffn=1, heads=2, causal=truth),
    "equal_sizes of parts": lambda truth: partition([1.0], 1, equal_sizes=truth),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_what_is_neither_true_nor_false_is_refused_where_it_is_given(name: str) -> None:
    make, path = TRUTHS[name], name.partition(" ")[0]
    for truth in (True, False, np.True_, np.False_):
        make(truth)
    for other in ("no", "false", "", 0, 1, 1.0, None, np.int64(1), [True]):
        with pytest.raises(ConfigError) as caught:
            make(other)
        assert str(caught.value) == f"{path} must be true or false, got {other!r}."


def test_truths_of_numpy_become_plain_ones() -> None:
    assert truth_value("shuffle", np.True_) is True
    recipe = Recipe(layout=Packed(max_tokens=8), equal_sizes=np.True_)  # type: ignore[arg-type]
    assert json.loads(json.dumps(recipe.to_dict()))["equal_sizes"] is True


def test_an_unknown_word_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError) as caught:
        one_of("balance", "foo", Balance)
    expected = "unknown balance 'foo'; expected one of: refined, lpt, karmarkar_karp, stride, none."
    assert str(caught.value) == expected


def test_whatever_is_made_with_numbers_of_numpy_is_plain_data() -> None:
    one: Any = np.int64(1)
    two: Any = np.int64(2)
    recipe = Recipe(
        layout=Packed(max_tokens=two, round_to=two, pad_to=two),
        topology=Topology(dp=two),
        steps=Steps(samples=two),
        limits=Limits(columns={"patches": two}),
    )
    shuffled = Recipe(layout=Packed(max_tokens=two, packer="first_fit_shuffle"), seed=two)
    for each in (recipe, shuffled):
        assert Recipe.from_dict(json.loads(json.dumps(each.to_dict()))) == each
    source = InMemory([{"input_ids": [0]}] * 6)
    world = World(one, two)
    for stream in (
        PlannedStream(
            source,
            recipe,
            columns={"patches": np.ones(6, int)},
            world=world,
            seed=two,
            max_num_steps=two,
        ),
        PooledStream(
            source,
            replace(recipe, steps=Steps(micro_batches=two), limits=Limits()),
            pool=Pool(samples=two, tokens=two),
            world=world,
            seed=two,
            max_num_steps=two,
        ),
    ):
        stream.set_epoch(two)
        assert json.dumps([step.cursor.to_dict() for step in stream])


def test_a_models_cost_counts_its_matrices() -> None:
    cost = Cost.of_model(layers=2, hidden=8, ffn=16, heads=2, kv_heads=1, vocab=10)
    weights = 8 * (8 + 4 + 4 + 8) + 3 * 8 * 16
    assert cost.per_token == 3 * 2 * (2 * weights + 8 * 10)
    assert cost.per_pair == 3 * 2 * (4 * 8 / 2)


def test_a_cost_is_recovered_from_measurements() -> None:
    rng = np.random.default_rng(0)
    true = Cost(per_token=2.0, per_pair=0.01, per_segment=30, per_micro_batch=500)
    seen = []
    for _ in range(60):
        lengths = rng.integers(1, 2000, rng.integers(1, 20))
        seen.append((lengths.tolist(), true.of_lengths(lengths).sum() + 500))
    fitted = Cost.fit(seen)
    for name in ("per_token", "per_pair", "per_segment", "per_micro_batch"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=1e-6)


def test_a_fitted_cost_is_never_negative_though_times_are_noisy() -> None:
    rng = np.random.default_rng(1)
    seen = [([n], float(n) * rng.uniform(0.9, 1.1)) for n in range(1, 200)]
    fitted = Cost.fit(seen)
    assert min(fitted.per_token, fitted.per_pair, fitted.per_segment) >= 0
    assert fitted.of_lengths(np.array([100]))[0] == pytest.approx(100, rel=0.1)


def test_fitting_nothing_is_refused() -> None:
    with pytest.raises(InputError):
        Cost.fit([])
    with pytest.raises(InputError):
        Cost.fit([([1], 0.0)])


@pytest.mark.parametrize(
    ("lengths", "fault"),
    [
        ([5, 0], "measurement 1 has a segment of 0 tokens"),
        ([5, -3], "measurement 1 has a segment of -3 tokens"),
        ([5, float("nan")], "measurement 1 has a segment of nan tokens"),
        ([1e300], "measurement 1 has a segment of 1e"),
        ([], "measurement 1 has no lengths"),
    ],
)
def test_a_measurement_that_no_micro_batch_gave_is_refused_by_number(
    lengths: list[Any], fault: str
) -> None:
    with pytest.raises(InputError, match=fault):
        Cost.fit([([5], 1.0), (lengths, 2.0), ([7], 3.0)])


def test_times_that_do_not_grow_give_no_cost() -> None:
    for shrink in (0.0, 0.001):
        seen = [([n] * m, 3.0 - shrink * n * m) for n in range(1, 50) for m in (1, 2, 5)]
        with pytest.raises(InputError, match="do not grow with the lengths"):
            Cost.fit(seen)


def test_equal_recipes_have_equal_hashes() -> None:
    def made(**columns: int) -> Recipe:
        return Recipe(layout=Packed(max_tokens=8), limits=Limits(columns=columns))

    assert len({made(a=1, b=2), made(b=2, a=1), made(a=1)}) == 2


def test_limits_cannot_be_written_to_and_their_copies_neither() -> None:
    given = {"a": 1, "b": 2}
    recipe = Recipe(layout=Packed(max_tokens=8), limits=Limits(columns=given))
    given["a"] = 9
    copies = [recipe, replace(recipe), copy.copy(recipe), copy.deepcopy(recipe)]
    copies += [pickle.loads(pickle.dumps(recipe, protocol)) for protocol in range(6)]
    for each in copies:
        assert each == recipe
        assert hash(each) == hash(recipe)
        assert repr(each) == repr(recipe)
        assert each.limits.columns == {"a": 1, "b": 2}
        columns: Any = each.limits.columns
        with pytest.raises(TypeError, match="item assignment"):
            columns["a"] = 3
    for plain in (recipe.to_dict(), asdict(recipe)):
        assert type(plain["limits"]["columns"]) is dict
        plain["limits"]["columns"]["a"] = 5
    assert recipe.limits.columns["a"] == 1


def test_which_samples_are_dropped_is_the_one_say_that_a_budget_has_in_steps() -> None:
    recipe = Recipe(layout=Packed(max_tokens=512), steps=Steps(samples=2), overflow="drop")
    assert make_plan([5, 600, 5, 5], recipe).step_of.tolist() == [0, -1, 0, 1]
    larger = replace(recipe, layout=Packed(max_tokens=1024))
    assert make_plan([5, 600, 5, 5], larger).step_of.tolist() == [0, 0, 1, 1]


def test_a_recipe_survives_plain_data() -> None:
    recipe = Recipe(
        layout=Packed(samples=3, max_tokens=99),
        topology=Topology(dp=2, pp=2, vpp=2),
        steps=Steps(tokens=7),
        cost=Cost(per_pair=2),
        limits=Limits(columns={"patches": 3}),
        balance="lpt",
        overflow="split",
    )
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_ragged_rows_are_slices_of_flat_values() -> None:
    ragged = Ragged.of([[4, 1], [], [7]])
    assert ragged.tolist() == [[4, 1], [], [7]]
    assert ragged[-1].tolist() == [7]
    assert ragged.owner.tolist() == [0, 0, 2]
    assert ragged.lengths.tolist() == [2, 0, 1]
    with pytest.raises(IndexError):
        ragged[3]


def test_only_arrays_that_never_change_are_frozen_without_a_copy() -> None:
    data = bytes(range(64))
    never = np.frombuffer(data, np.int64)
    for array in (never, np.frombuffer(b"", np.int64)):
        assert frozen(array) is array
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    whole = np.arange(6)
    over_memory = np.frombuffer(bytearray(data), np.int64)
    over_memory.flags.writeable = False
    odd = np.frombuffer(data, np.int64, 3, 1)
    others: list[Any] = [whole, whole[:4], over_memory, over_memory[1:], odd, never[::2]]
    others += [np.frombuffer(data, np.int32), never.view(np.uint64)[:2]]
    others += [never[:2]]  # would keep all of the bytes
    for array in others:
        found = frozen(array)
        assert found.tolist() == array.tolist()
        assert found.dtype == np.int64
        assert found.flags.owndata
        assert found.flags.c_contiguous
        assert not found.flags.writeable
