import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from evenstep import Cost, Packed, Padded, Plan, Prefixes, Recipe, Topology, make_plan
from evenstep.report import (
    Entry,
    comparison_page,
    comparison_picture,
    plan_page,
    plan_picture,
)
from tests.handmade import first_fit, handmade
from tests.internals import SHADES, Layout, Shading, SyncEvery, bars_of, shortened, timelines


def recipe(layout: Layout, ranks: int = 2, sync_every: SyncEvery = "micro_batch") -> Recipe:
    return Recipe(
        layout=layout,
        topology=Topology(dp=ranks),
        cost=Cost(per_token=100, per_pair=1),
        sync_every=sync_every,
    )


def some_plan(ranks: int = 8, samples: int = 300, per_step: int = 100) -> Plan:
    lengths = np.random.default_rng(0).integers(1, 1000, samples).tolist()
    return first_fit(lengths, recipe(Packed(max_tokens=1000), ranks), per_step)


def words(svg: str) -> str:
    return " ".join(text.text or "" for text in ET.fromstring(svg).iter() if text.text)


def test_a_picture_is_well_formed_and_self_contained() -> None:
    svg = plan_picture(some_plan())
    ET.fromstring(svg)
    links = set(re.findall(r"(?:https?:)?//[^\"' ]+", svg)) - {"http://www.w3.org/2000/svg"}
    assert not links
    assert "<script" not in svg


def light_and_dark(svg: str) -> tuple[dict[str, str], dict[str, str]]:
    """The colours by selector, such as {".evenstep .pad fill": "#eceef1"}."""
    style = re.findall("<style>(.*?)</style>", svg)[0]
    light, _, dark = style.partition("@media(prefers-color-scheme:dark){")
    return _colours(light), _colours(dark.removesuffix("}"))


def _colours(rules: str) -> dict[str, str]:
    return {
        f"{selector} {name}": value
        for selectors, body in re.findall("([^{}]+){([^{}]*)}", rules)
        for selector in selectors.split(",")
        for name, value in re.findall("(fill|stroke):([^;]+)", body)
    }


WITH_EMPTY = handmade(
    [5, 600, 7], [[[[[0]], [[1]]], [[[2]], [[]]]]], recipe(Packed(max_tokens=999))
)


@pytest.mark.parametrize(
    "svg", [plan_picture(WITH_EMPTY), comparison_picture({"a": some_plan(), "b": some_plan()})]
)
def test_a_picture_has_colours_without_css_variables(svg: str) -> None:
    light, dark = light_and_dark(svg)
    assert "var(" not in svg
    assert set(dark) <= set(light)
    assert all(re.fullmatch(r"#[0-9a-f]{6}|none|url\(#.*\)", value) for value in light.values())
    painted = {selector.split()[-2] for selector in light}
    for shape in ET.fromstring(svg).iter():
        tag = shape.tag.rpartition("}")[2]
        if tag in ("text", "rect", "path"):
            names = {tag, *(f".{name}" for name in shape.get("class", "").split())}
            assert names & painted, names


def test_every_colour_of_a_picture_has_a_dark_variant() -> None:
    light, dark = light_and_dark(plan_picture(some_plan()))
    coloured = {selector for selector, value in light.items() if value.startswith("#")}
    assert coloured == set(dark)
    assert all(light[selector] != dark[selector] for selector in coloured)


@pytest.mark.parametrize(("letter", "ems"), [("x", 0.7), ("W", 1.1), ("長", 1), ("\udcff", 1)])
def test_a_long_name_is_shortened_in_the_middle(letter: str, ems: float) -> None:
    name = f"Plan of {letter * 300}.parquet"
    svg = plan_picture(some_plan(), name)
    root = ET.fromstring(svg)
    headline = next(text.text or "" for text in root.iter() if text.get("class") == "h1")
    assert headline.startswith("Plan of ")
    assert headline.endswith(".parquet")
    middle = headline.removeprefix("Plan of ").removesuffix(".parquet")
    assert "…" in middle
    assert 21 * (ems * len(middle) + 0.7 * (len(headline) - len(middle))) <= 1240 - 2 * 28
    assert root[0].text == name.replace("\udcff", "\ufffd")


def test_a_long_strategy_keeps_its_figure() -> None:
    svg = comparison_picture({"layout.round_to=64, " * 30: some_plan()})
    heading = next(e.text or "" for e in ET.fromstring(svg).iter() if e.get("class") == "h2")
    assert heading.endswith(": 1.0000×")
    assert 14 * 0.7 * len(heading) < 1240 - 28


def test_a_name_that_fits_is_left_alone() -> None:
    assert shortened("a" * 80, 56.4) == "a" * 80
    assert shortened("a" * 81, 56.4) == f"{'a' * 39}…{'a' * 39}"
    assert shortened("", 56.4) == ""


@pytest.mark.parametrize("lengths", [[500], [500, 400], [500, 500, 500, 499], [500] * 4])
def test_the_last_tick_does_not_overlap_the_name_of_its_axis(lengths: list[int]) -> None:
    plan = first_fit(lengths, recipe(Packed(max_tokens=500), 4), 9)
    texts = [e for e in ET.fromstring(plan_picture(plan)).iter() if e.text]
    (name,) = (float(e.get("x", 0)) for e in texts if e.text == "mean loads")
    ends = [
        float(e.get("x", 0)) + 7 * len(e.text or "") / 2 for e in texts if e.get("class") == "tick"
    ]
    assert len(ends) > 1
    assert max(ends) <= name - 10


@pytest.mark.parametrize(
    ("lengths", "slowest"),
    [([5, 5, 5, 5], []), ([5, 3, 4, 2], [0]), ([3, 5, 5, 2], [1, 2])],
)
def test_the_slowest_ranks_are_marked_unless_all_are_equal(
    lengths: list[int], slowest: list[int]
) -> None:
    rows = [[[[sample]]] for sample in range(4)]
    plan = handmade(lengths, [rows], recipe(Packed(max_tokens=5), 4))
    kinds = re.findall('class="(busy[^"]*)"', plan_picture(plan))
    assert [rank for rank, kind in enumerate(kinds) if kind == "busy slowest"] == slowest


def test_a_count_of_one_is_singular() -> None:
    svg = plan_picture(handmade([1], [[[[[0]]]]], recipe(Packed(max_tokens=9), 1)))
    said = [element.text or "" for element in ET.fromstring(svg).iter()]
    assert {"sample", "real token", "micro-batch; bound 1"} <= set(said)
    assert any("1 row × 1 = 1 slot, 1 token, " in text for text in said)
    assert not re.search(r"\b1 \S+s\b", " | ".join(said).replace("1 mean loads", ""))


def test_the_same_plan_gives_the_same_picture() -> None:
    assert plan_picture(some_plan()) == plan_picture(some_plan())
    assert plan_page(some_plan()) == plan_page(some_plan())


def test_titles_are_escaped() -> None:
    plan = some_plan()
    for text in (plan_picture(plan, "<b>&"), plan_page(plan, "<b>&")):
        assert "<b>" not in text
        assert "&lt;b&gt;&amp;" in text
    assert "<i>" not in comparison_page([Entry("<i>", plan), Entry("x", fault="<i>")], "t")


def test_characters_that_xml_forbids_are_replaced() -> None:
    plan, name = some_plan(), "a\x00\x1b\ufffe\udcff×\t🙂"
    for svg in (plan_picture(plan, name), comparison_picture({name: plan}, name)):
        assert words(svg.encode().decode()).count("a\ufffd\ufffd\ufffd\ufffd×\t🙂") >= 2
    comparison_page([Entry(name, plan), Entry("x", fault=name)], name).encode()


def test_every_rank_has_a_line_and_every_step_a_heading() -> None:
    said = words(plan_picture(some_plan(ranks=5)))
    assert all(f"rank {rank}" in said for rank in range(5))
    assert all(f"Step {step}" in said for step in range(3))


def test_notes_name_what_is_left_out() -> None:
    many_steps = words(plan_picture(some_plan(samples=300, per_step=10)))
    assert "Shows 4 of 30 steps" in many_steps
    many_ranks = words(plan_picture(some_plan(ranks=200, samples=400, per_step=400)))
    assert "Shows 64 of 200 ranks" in many_ranks
    rows = [[[[sample]] for sample in range(100)]]
    many = handmade([5] * 100, [rows], recipe(Packed(max_tokens=9), 1))
    assert "shows the first 40 of 100 micro-batches per rank" in words(plan_picture(many))
    tiny = handmade([1] * 5000, [[[[list(range(5000))]]]], recipe(Packed(max_tokens=5000), 1))
    assert "5,000 segments too small to draw" in words(plan_picture(tiny))


def test_the_busiest_rank_is_always_shown() -> None:
    lengths = [10] * 150
    lengths[77] = 500
    rows = [[[[sample]]] for sample in range(150)]
    plan = handmade(lengths, [rows], recipe(Packed(max_tokens=500), 150))
    assert "rank 77 " in words(plan_picture(plan)) + " "


def test_a_picture_of_many_segments_stays_small() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 60_000).tolist()
    rows = [
        [[list(range(rank * 3000 + m * 300, rank * 3000 + m * 300 + 300))] for m in range(10)]
        for rank in range(20)
    ]
    plan = handmade(lengths, [rows], recipe(Packed(max_tokens=18_000), 20))
    assert len(plan_picture(plan)) < 1_000_000


def test_empty_micro_batches_are_marked() -> None:
    plan = handmade([5, 6, 7], [[[[[0]], [[1]]], [[[2]], [[]]]]], recipe(Packed(max_tokens=9)))
    svg = plan_picture(plan)
    assert 'class="empty"' in svg
    assert "empty micro-batch" in words(svg)
    assert 'class="empty"' not in plan_picture(some_plan(ranks=1))


@pytest.mark.parametrize("ranks", [1, 2, 16, 64])
@pytest.mark.parametrize("layout", [Packed(max_tokens=1000), Padded(max_tokens=2000)])
@pytest.mark.parametrize("sync_every", ["micro_batch", "step"])
def test_any_plan_can_be_drawn(ranks: int, layout: Layout, sync_every: SyncEvery) -> None:
    lengths = np.random.default_rng(1).integers(1, 1000, 150).tolist()
    plan = first_fit(lengths, recipe(layout, ranks, sync_every), 64)
    ET.fromstring(plan_picture(plan))
    assert "<table" in plan_page(plan)


def test_strategies_share_one_scale() -> None:
    lengths = np.random.default_rng(1).integers(1, 1000, 64).tolist()
    packed = first_fit(lengths, recipe(Packed(max_tokens=2000)), 64)
    padded = first_fit(lengths, recipe(Padded(max_tokens=2000, pad_to=1000)), 64)
    said = words(comparison_picture({"packed": packed, "padded": padded}))
    assert "packed: 1.0000×" in said
    assert re.search(r"padded: \d\.\d+×", said)


def test_ranks_that_synchronise_at_every_micro_batch_start_it_together() -> None:
    rows = [[[[0]], [[1]]], [[[2]], [[3]]]]
    together = handmade([3, 1, 2, 2], [rows], recipe(Packed(max_tokens=3)))
    line = timelines(together)[0]
    assert line.starts[0].tolist() == line.starts[1].tolist() == [0.0, 309.0]
    assert line.end == 309 + 204
    apart = handmade([3, 1, 2, 2], [rows], recipe(Packed(max_tokens=3), sync_every="step"))
    line = timelines(apart)[0]
    assert line.starts.tolist() == [[0.0, 309.0], [0.0, 204.0]]
    assert line.end == 410
    assert line.busy.max() == 1


def test_bars_cover_the_tokens_and_leave_the_padding() -> None:
    aligned = Recipe(layout=Packed(max_tokens=32), topology=Topology(cp=2))  # multiples of 4
    bars = bars_of(handmade([5, 4, 3], [[[[[0, 1, 2]]]]], aligned), 0, 0, 0)
    assert (bars.left * 16).tolist() == [0, 8, 12]
    assert (bars.right * 16).tolist() == [5, 12, 15]
    assert (bars.segments, bars.tokens, bars.merged) == (3, 12, 0)
    rows = handmade([4, 2], [[[[[0], [1]]]]], recipe(Padded(max_tokens=8), 1))
    bars = bars_of(rows, 0, 0, 0)
    assert bars.top.tolist() == [0, 0.5]
    assert bars.right.tolist() == [1, 0.5]


def test_merged_bars_keep_their_position_and_are_counted() -> None:
    plan = handmade([90, *[1] * 10], [[[[list(range(11))]]]], recipe(Packed(max_tokens=100), 1))
    bars = bars_of(plan, 0, 0.05, 0)
    assert bars.left[0] == 0
    assert bars.right[-1] == 1
    assert bars.left[1:].tolist() == bars.right[:-1].tolist()
    assert len(bars) == 3
    assert bars.merged == 10
    many = handmade([4, 3, 2, 1], [[[[[0], [1], [2], [3]]]]], recipe(Padded(max_tokens=16), 1))
    bars = bars_of(many, 0, 0, 0.5)
    assert bars.right.tolist() == [3.5 / 4, 1.5 / 4]
    assert bars.merged == 4


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 2), (7, 9), (1, 10**6), (500, 512)])
def test_shades_grow_with_length(low: int, high: int) -> None:
    shading = Shading.of(low, high)
    assert list(shading.edges) == sorted(set(shading.edges))
    assert shading.edges[-1] == high
    shades = [shading.shade(length) for length in np.linspace(low, high, 50)]
    assert shades == sorted(shades)
    assert 0 <= min(shades) <= max(shades) < SHADES


def test_segments_that_others_share_are_marked() -> None:
    prefixes = Prefixes.of_groups([0, 0, 0, 1], [100, 100, 100, 10])
    lengths, budget = [150, 160, 170, 80], recipe(Packed(max_tokens=500), 1)
    shared = make_plan(lengths, budget, prefixes=prefixes)
    bars = bars_of(shared, 0, 0.0, 0.0)
    assert bars.shared.tolist() == [not own for own in shared.own[: len(bars)].tolist()]
    assert bars.shared.sum() == 1
    svg, apart = plan_picture(shared), plan_picture(make_plan(lengths, budget))
    ET.fromstring(svg)
    assert "shared prefix" in words(svg)
    assert 'class="shared"' in svg
    assert "shared" not in apart
