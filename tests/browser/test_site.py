"""The built site in a real browser: no errors, navigation, search, phones, dark colours."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
PHONE = {"width": 390, "height": 844}


class Quiet(SimpleHTTPRequestHandler):
    """A server that prints nothing."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return built


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def places(folder: Path) -> list[str]:
    """The addresses of all pages, below that of the site."""
    found = sorted(path.parent.relative_to(folder) for path in folder.rglob("index.html"))
    return [f"{path.as_posix()}/" if path.name else "" for path in found]


class Tab:
    """A page of a browser, and what it complained about or asked others for."""

    def __init__(self, chromium: Any, address: str, **options: Any) -> None:
        self.address = address
        self.page = chromium.new_context(**options).new_page()
        self.faults: list[str] = []
        self.page.on("console", lambda said: self._complain(said.type, said.text))
        self.page.on("pageerror", lambda error: self._complain("error", str(error)))
        self.page.on("request", self._asked)

    def open(self, place: str) -> None:
        response = self.page.goto(self.address + place)
        assert response.status == 200, place

    def _complain(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.faults.append(f"{self.page.url}: {text}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.faults.append(f"{self.page.url} asks for {request.url}")


def test_no_page_has_an_error_or_is_wider_than_a_phone(
    chromium: Any, address: str, places: list[str]
) -> None:
    tab = Tab(chromium, address, viewport=PHONE)
    wide = []
    for place in places:
        tab.open(place)
        width = tab.page.evaluate("document.documentElement.scrollWidth")
        if width > PHONE["width"]:
            wide.append((place, width))
    assert len(places) > 100
    assert tab.faults == []
    assert wide == []


def test_wide_tables_and_code_scroll_inside_of_the_page(chromium: Any, address: str) -> None:
    tab = Tab(chromium, address, viewport=PHONE)
    tab.open("compat/")
    inner = """selector => [...document.querySelectorAll(selector)].some(
        box => box.scrollWidth > box.clientWidth
            && ["auto", "scroll"].includes(getComputedStyle(box).overflowX))"""
    assert tab.page.evaluate(inner, ".md-typeset__scrollwrap")
    tab.open("plans/")
    assert tab.page.evaluate(inner, "pre > code")


def test_every_link_of_the_navigation_leads_to_a_page(
    chromium: Any, address: str, places: list[str]
) -> None:
    tab = Tab(chromium, address)
    tab.open("")
    found = tab.page.locator(".md-nav--primary a[href]").evaluate_all("all => all.map(a => a.href)")
    targets = {href.split("#")[0].removeprefix(address) for href in found}
    assert len(targets) > 80
    assert targets <= set(places)
    tab.page.locator(".md-nav--primary a.md-nav__link", has_text="Concepts").first.click()
    tab.page.wait_for_url(f"{address}concepts/")
    assert tab.page.locator("h1").inner_text().startswith("Concepts")
    tab.page.locator(".md-footer__link--next").click()
    tab.page.wait_for_url(f"{address}guides/sft/")
    assert tab.faults == []


def test_the_menu_of_a_phone_opens_and_leads_to_a_page(chromium: Any, address: str) -> None:
    tab = Tab(chromium, address, viewport=PHONE, has_touch=True)
    tab.open("plans/")
    tab.page.locator(".md-header label[for=__drawer]").tap()
    link = tab.page.locator(".md-nav--primary a.md-nav__link:visible", has_text="Lengths").first
    link.tap()
    tab.page.wait_for_url(f"{address}lengths/")


def test_search_finds_a_term_and_leads_to_it(chromium: Any, address: str) -> None:
    tab = Tab(chromium, address)
    tab.open("")
    tab.page.locator(".md-search__input").fill("merge_cursors")
    tab.page.locator(".md-search-result__item a[href$='#merge_cursors']").first.click()
    tab.page.wait_for_url(re.compile("#merge_cursors$"))
    assert tab.page.locator("#merge_cursors").inner_text().startswith("merge_cursors")
    assert tab.faults == []


def brightness(colour: str) -> float:
    """The mean of red, green and blue of `rgb(r, g, b)`."""
    numbers = colour.partition("(")[2].rstrip(")").split(",")[:3]
    return sum(map(float, numbers)) / 3


@pytest.mark.parametrize(("scheme", "light"), [("light", True), ("dark", False)])
def test_pages_and_pictures_follow_the_colours_of_the_system_and_of_the_button(
    scheme: str, light: bool, chromium: Any, address: str
) -> None:
    tab = Tab(chromium, address, color_scheme=scheme)
    tab.open("report/")
    for expected in (light, not light):
        style = "getComputedStyle(document.body)"
        paper = brightness(tab.page.evaluate(f"{style}.backgroundColor"))
        ink = brightness(tab.page.evaluate(f"{style}.color"))
        assert (paper > ink) is expected
        assert (corner_of_the_picture(tab) > 128) is expected
        tab.page.locator(".md-header label:visible[for^=__palette]").click()
    assert tab.faults == []


def corner_of_the_picture(tab: Tab) -> float:
    """How bright the paper of the first picture is, on the screen."""
    from io import BytesIO

    from PIL import Image

    picture = tab.page.locator("article img").first
    picture.scroll_into_view_if_needed()
    tab.page.wait_for_timeout(300)  # colours fade
    shot = Image.open(BytesIO(picture.screenshot())).convert("L")
    return float(shot.getpixel((3, 3)))
