"""What a terminal shows while a command works."""

import io
import logging
import sys

import pytest

from tests.internals import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_logged_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    logger = logging.getLogger("evenstep.planning")
    with progress("Planning") as advance:
        logger.info("compiling [kernels] (once)")
        logger.debug("a detail")
        advance(1, 2)
    shown = stderr.getvalue()
    assert shown.count("compiling [kernels] (once)\n") == 1
    assert "a detail" not in shown
    logger.info("later")
    assert "later" not in stderr.getvalue()


def test_without_a_terminal_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("Planning") as advance:
        logging.getLogger("evenstep.planning").info("compiling kernels (once)")
        advance(1, 2)
    assert capsys.readouterr() == ("", "")
