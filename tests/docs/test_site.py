"""The site builds without warnings, and its pages are where links expect them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate.site import text_of, uri_of
from tests.docs.blocks import ROOT


def test_files_outside_the_documentation_have_a_place_in_the_site() -> None:
    assert uri_of("docs/decisions") == "decisions/README.md"
    assert uri_of("benchmarks/results") == "benchmarks/results/README.md"
    assert "- [compat.md](compat.md)" in str(text_of("benchmarks/results"))
    program = str(text_of("examples/grpo/grpo.py"))
    assert program.startswith("# examples/grpo/grpo.py\n\n~~~~~python\n")


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_without_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    pages = list(tmp_path.rglob("index.html"))
    assert len(pages) > 100
    loads = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(\w+://[^\" >]+)")
    for page in pages:
        assert loads.findall(page.read_text("utf-8")) == [], page
    assert (tmp_path / "examples" / "grpo" / "grpo.py" / "index.html").exists()
