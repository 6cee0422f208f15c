"""A real browser, which must be there: `make test-browser` installs what is missing."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Chromium without a window: the system's if there is one, else playwright's own."""
    from playwright.sync_api import sync_playwright

    own = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=own, args=["--no-sandbox"])
        yield browser
        browser.close()
