"""A report in a real browser: it opens offline without errors, and its numbers are the plan's."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import Cost, Packed, Padded, Plan, Recipe, Steps, Topology, make_plan
from evenstep.cli import main
from evenstep.report import Entry, Report, RunLog, advice, report_page

pytestmark = pytest.mark.browser

COST, RANKS, STEPS = Cost.named("llama-3-8b"), Topology(dp=4), Steps(samples=64)


def plan_of(layout: Any, **options: Any) -> Plan:
    lengths = np.clip(np.random.default_rng(3).lognormal(6.6, 1.1, 640), 8, 16000).astype(int)
    lengths[394] = 60_000
    recipe = Recipe(layout=layout, topology=RANKS, steps=STEPS, cost=COST, **options)
    return make_plan(lengths, recipe)


def record(plan: Plan, step: int) -> dict[str, Any]:
    costs = plan.costs[plan.cell_offsets[4 * step] : plan.cell_offsets[4 * step + 4]].reshape(4, -1)
    return {
        "step": step,
        "loss": 5 / (step + 2),
        "tokens_per_second": 1e5 + step,
        "padding": 0.01,
        "imbalance/planned": 1.01,
        "imbalance/measured": 1.05,
        "seconds/total": 0.5,
        "seconds/wait": 0.001,
        "micro_batches/cost": costs.tolist(),
        "micro_batches/busy": (costs * 1e-14).tolist(),
    }


@pytest.fixture(scope="module")
def report() -> Report:
    plan = plan_of(Packed(max_tokens=65536))
    first = Entry("padded batches of 8", plan_of(Padded(samples=8), balance="none"), 0.1)
    return Report(
        title="A <run> & its plan",
        plan=plan,
        entries=[first, Entry("your settings", plan, 0.1), Entry("odd", fault="<b>no</b>")],
        runs={"your settings": RunLog.of([record(plan, step) for step in range(10)])},
        advice=advice(plan, make_plan),
    )


class Opened:
    """A page, what it asked the network for, and what it complained about."""

    def __init__(self, chromium: Any, path: Path, **options: Any) -> None:
        self.page = chromium.new_context(offline=True, **options).new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        began = time.perf_counter()
        self.page.goto(path.as_uri())
        self.seconds = time.perf_counter() - began

    def data(self) -> Any:
        return json.loads(self.page.locator("#evenstep-data").text_content())


@pytest.fixture
def path(report: Report, tmp_path: Path) -> Path:
    target = tmp_path / "report.html"
    target.write_text(report_page(report), "utf-8")
    return target


def test_the_page_opens_offline_and_its_numbers_are_the_plans(
    chromium: Any, report: Report, path: Path
) -> None:
    opened = Opened(chromium, path)
    assert opened.complaints == []
    assert opened.asked == [path.as_uri()]
    data, plan = opened.data(), report.plan
    assert data == json.loads(json.dumps(report.numbers()))
    assert data["title"] == opened.page.title() == "A <run> & its plan"
    assert data["plan"]["tokens"] == int(plan.tokens.sum())
    assert sum(data["lengths"]["samples"]) == len(plan.lengths)
    assert sum(data["lengths"]["tokens"]) == int(plan.lengths.sum())
    assert data["runs"]["your settings"]["steps"] == 10
    shown = opened.page.locator("main").inner_text()
    assert f"{data['saving']['times_less_time']:.2f}×" in shown
    assert f"{data['saving']['slots']:,}" in shown
    assert data["advice"][0]["text"] in shown
    assert "Sample 394 with 60,000 tokens sets the pace" in shown
    assert "<b>no</b>" in shown


def test_pointing_at_a_micro_batch_shows_its_samples(
    chromium: Any, report: Report, path: Path
) -> None:
    page = Opened(chromium, path).page
    plan, tip = report.plan, page.locator("#tip")
    assert not tip.is_visible()
    block = page.locator("svg .hover").last
    block.scroll_into_view_if_needed()
    block.hover()
    assert tip.is_visible()
    said = tip.inner_text()
    assert "Samples (tokens): " in said
    sample, length = said.partition("(tokens): ")[2].split()[:2]
    assert f"({plan.lengths[int(sample)]:,})" == length.rstrip(",")
    page.mouse.move(1, 1)
    assert not tip.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_without_scrolling_sideways(
    scheme: str, chromium: Any, path: Path
) -> None:
    phone = {"width": 375, "height": 800}
    opened = Opened(chromium, path, viewport=phone, color_scheme=scheme, has_touch=True)
    page = opened.page
    assert opened.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.body).color")
    bright = [sum(map(int, colour[4:-1].split(","))) for colour in (paper, ink)]
    assert (bright[0] > bright[1]) == (scheme == "light")
    page.locator(".chart .bin").nth(20).tap()
    assert "samples" in page.locator("#tip").inner_text()


def test_every_chart_is_drawn_inside_its_frame(chromium: Any, path: Path) -> None:
    page = Opened(chromium, path).page
    inside = """charts => charts.map(chart => {
        const frame = chart.getBoundingClientRect();
        return [...chart.querySelectorAll("path,rect,circle")].every(shape => {
            const box = shape.getBoundingClientRect();
            return box.left >= frame.left - 2 && box.right <= frame.right + 2
                && box.top >= frame.top - 2 && box.bottom <= frame.bottom + 2;
        });
    })"""
    drawn = page.locator(".chart").evaluate_all(inside)
    assert len(drawn) == 7
    assert all(drawn)


def test_a_report_of_a_million_samples_is_small_and_opens_in_seconds(
    chromium: Any, tmp_path: Path
) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 1_000_000), 8, 8192).astype(int)
    recipe = Recipe(
        layout=Packed(max_tokens=8192), topology=Topology(dp=64), steps=Steps(samples=4096)
    )
    make_plan(lengths, recipe).save(tmp_path / "big.evenstep")
    page = tmp_path / "big.html"
    assert main(["report", str(tmp_path / "big.evenstep"), "--out", str(page)]) == 0
    assert page.stat().st_size < 5_000_000
    opened = Opened(chromium, page)
    assert opened.complaints == []
    assert opened.data()["plan"]["num_samples"] == 1_000_000
    print(f"\n{page.stat().st_size:,} bytes, opened in {opened.seconds:.2f} s")
