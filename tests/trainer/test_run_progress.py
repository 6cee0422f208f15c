"""The line of a run on standard error."""

import io
import os
from typing import Any

import pytest

from tests.internals import RunProgress

VALUES: dict[str, Any] = {"loss": 2.5, "tokens_per_second": 9e4, "padding": 0.01}


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_line_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    line = RunProgress(2, 0, stream)
    for step in range(2):
        line.write({**VALUES, "step": step})
    line.close()
    lines = stream.getvalue().rstrip("\n").split("\r")[1:]
    assert [len(each) for each in lines] == [29, 29]
    assert lines[1].startswith("step 2/2  loss 2.5000")


def test_a_run_goes_on_when_nobody_reads_its_progress() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    line = RunProgress(3, 0, stream)
    line.write({**VALUES, "step": 0})
    line.write({**VALUES, "step": 2})
    line.close()
    with pytest.raises(BrokenPipeError):
        stream.close()
