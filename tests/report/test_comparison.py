"""The comparison: its first row, its bars, its sentence and its PNG."""

import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from evenstep import Cost, Packed, Padded, Plan, Recipe, Steps, Topology, make_plan
from evenstep.report import Entry, comparison_picture, plan_picture, png_of
from tests.examples import examples
from tests.internals import (
    HEADER,
    TimeParts,
    cells,
    closing,
    one_step_warning,
    print_grid,
    shared_end,
    step_times,
    time_bars,
    time_parts,
    timelines,
)

LENGTHS = np.random.default_rng(0).integers(1, 900, 96).tolist()
RANKS, COST = Topology(dp=2), Cost(per_token=100, per_pair=1, per_micro_batch=50)


def padded(samples: int = 8) -> Plan:
    layout, steps = Padded(samples=samples), Steps(samples=48)
    recipe = Recipe(layout=layout, topology=RANKS, cost=COST, steps=steps, balance="none")
    return make_plan(LENGTHS, recipe)


def packed() -> Plan:
    layout, steps = Packed(max_tokens=2000), Steps(samples=48)
    return make_plan(LENGTHS, Recipe(layout=layout, topology=RANKS, cost=COST, steps=steps))


@examples(30)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.sampled_from([Packed(max_tokens=60), Padded(max_tokens=120), Padded(samples=3)]),
    st.sampled_from(["step", "micro_batch"]),
    st.integers(1, 4),
)
def test_work_padding_and_waiting_add_up_to_the_time(
    lengths: list[int], layout: Packed | Padded, sync: str, ranks: int
) -> None:
    recipe = Recipe(
        layout=layout,
        topology=Topology(dp=ranks),
        cost=COST,
        sync_every=sync,  # type: ignore[arg-type]
        steps=Steps(samples=12),
    )
    plan = make_plan(lengths, recipe)
    parts = time_parts(plan)
    assert min(parts) >= 0
    assert parts.total == pytest.approx(sum(line.end for line in timelines(plan)))
    assert step_times(plan).tolist() == pytest.approx([line.end for line in timelines(plan)])
    real = sum(100 * n + n * n for n in lengths) + 50 * plan.num_micro_batches
    assert parts.work == pytest.approx(real / ranks)


def test_padding_removed_is_against_the_first_strategy() -> None:
    first, other = Entry("padded", padded()), Entry("packed", packed())
    shown = [row[HEADER.index("padding removed")].text for row in cells([first, other])]
    assert shown == ["0 %", "100 %"]
    again = [row[HEADER.index("padding removed")].text for row in cells([other, first])]
    assert again == ["–", "–"]  # nothing to remove


def test_the_sentence_names_the_first_of_those_that_are_nearly_fastest() -> None:
    slow, fast = TimeParts(10.0, 20.0, 2.0), TimeParts(10.0, 0.0, 0.0)
    nearly = TimeParts(10.0, 0.05, 0.0)
    assert closing({"today": slow, "own": nearly, "best": fast}).startswith("own: 3.2× less time")
    assert closing({"today": fast, "other": fast}) == "No strategy takes much less time than today."
    assert closing({"alone": fast}) == ""


def test_a_file_that_is_one_step_is_warned_about() -> None:
    whole = make_plan(LENGTHS, Recipe(layout=Packed(max_tokens=2000)))
    assert "one step of 96 samples" in one_step_warning(whole)
    assert "Set steps.samples" in one_step_warning(whole)
    assert "Set steps.samples" in comparison_picture({"a": whole})
    assert one_step_warning(packed()) == ""
    few = make_plan([5, 3], Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=9)))
    assert "Pass more lengths" in one_step_warning(few)


def widths(svg: str, kind: str) -> list[float]:
    root = ET.fromstring(f"<svg>{svg}</svg>")
    return [float(e.get("width", 0)) for e in root.iter("rect") if e.get("class") == kind]


def test_bars_are_to_scale_and_a_much_longer_one_is_torn() -> None:
    fast, even = TimeParts(10.0, 0.0, 2.0), TimeParts(10.0, 4.0, 0.0)
    svg, _ = time_bars({"a": fast, "b": even}, 0, 1000, 0)
    assert widths(svg, "work")[0] == widths(svg, "work")[1]
    assert widths(svg, "pad")[0] == pytest.approx(2 * widths(svg, "idle")[0], abs=0.02)
    assert "tear" not in svg
    slow = TimeParts(10.0, 200.0, 50.0)
    svg, _ = time_bars({"a": slow, "b": fast, "c": even}, 0, 1000, 0)
    assert svg.count('class="tear"') == 1
    assert len(set(widths(svg, "work"))) == 1
    assert widths(svg, "work")[0] > 300
    assert max(widths(svg, "pad")) < 1000
    assert "21.67×" in svg


@examples(50)
@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=6))
def test_the_scale_ends_at_a_time_near_the_shortest(times: list[float]) -> None:
    end = shared_end(times, 4.0)
    assert end in times
    assert end <= 4 * min(times)
    assert not [time for time in times if end < time <= 4 * min(times)]


def test_a_picture_of_many_strategies_draws_the_steps_of_three() -> None:
    plans = {name: packed() for name in "abcde"} | {"f": padded()}
    said = " ".join(e.text or "" for e in ET.fromstring(comparison_picture(plans)).iter())
    assert len(re.findall(r"\d segments · ", said)) <= 3
    assert all(f" {name} " in said for name in plans)


def test_a_step_that_is_ten_times_longer_has_its_own_scale() -> None:
    lengths = [1000] + [10] * 47
    recipe = Recipe(layout=Padded(samples=24), topology=RANKS, balance="none")
    even = Recipe(layout=Packed(max_tokens=2000), topology=RANKS)
    plans = {"padded": make_plan(lengths, recipe), "packed": make_plan(lengths, even)}
    svg = comparison_picture(plans)
    assert re.search(r"drawn 0\.\d+× as wide as the others", svg)
    ends = [float(at) for at in re.findall(r'class="axis" d="M80 [0-9.]+h([0-9.]+)"', svg)]
    assert len(ends) == 2
    assert min(ends) > 1000


@pytest.mark.parametrize("svg", [comparison_picture({"a": padded(), "b": packed()}),
                                 plan_picture(packed())])  # fmt: skip
def test_a_picture_becomes_a_png_of_twice_its_size(svg: str) -> None:
    image = Image.open(io.BytesIO(png_of(svg)))
    root = ET.fromstring(svg)
    size = float(root.get("width", 0)), float(root.get("height", 0))
    assert image.size == (round(2 * size[0]), round(2 * size[1]))
    colours = dict(re.findall(r"\.evenstep \.(\w+){fill:(#\w+)}", svg.partition("@media")[0]))
    found = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in image.getcolors(1 << 24) or []}
    drawn = set(re.findall(r'<(?:rect|path) class="(\w+)', svg)) & set(colours)
    assert drawn
    assert {colours[name] for name in drawn} <= found


def test_a_png_has_shapes_where_the_svg_has_them() -> None:
    svg = (
        '<svg width="20" height="10"><style>.e .a{fill:#ff0000}.e .b{fill:none;stroke:#0000ff}'
        '</style><rect class="a" x="2" y="1" width="4" height="3"/><g transform="translate(10 0)">'
        '<path class="a" d="M0 0h2v2h-2zM4 4H8V8H4Z"/></g><path class="b" d="M0 9L20 9"/></svg>'
    )
    image = Image.open(io.BytesIO(png_of(svg)))
    red, blue, white = (255, 0, 0), (0, 0, 255), (255, 255, 255)
    points = {(8, 4): red, (22, 2): red, (32, 12): red, (26, 6): white, (20, 18): blue}
    assert {place: image.getpixel(place) for place in points} == points


@examples(40)
@given(
    st.integers(60, 200),
    st.lists(st.text("abc ", min_size=1, max_size=70), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(1, 20),
)
def test_no_width_from_60_columns_cuts_a_number(
    width: int, names: list[str], columns: int, digits: int
) -> None:
    screen = Console(file=io.StringIO(), width=width, highlight=False)
    cells = [
        [f"{row}{column}".rjust(digits, "9") for column in range(columns)]
        for row in range(len(names))
    ]
    rows = [[Text(name), *map(Text, row)] for name, row in zip(names, cells, strict=True)]
    print_grid(screen, ["name", *(f"column {c} of many" for c in range(columns))], rows)
    printed = screen.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(cell_len, printed.splitlines())) <= width
    shown = printed.split()
    for row in cells:
        for cell in row:
            assert cell in shown
