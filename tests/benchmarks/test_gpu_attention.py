"""The attention benchmark also runs on a CPU, in a small version, and writes its results."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_attention


@pytest.mark.slow
def test_a_quick_run_on_the_cpu_meets_its_targets_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--quick", "--only", "decoder", "--only", "speed"]

    assert gpu_attention.main([*arguments, "--out", str(tmp_path)]) == 0

    assert "layouts agree" in capsys.readouterr().out
    written = json.loads((tmp_path / "gpu_attention.json").read_text())
    assert all(target["met"] for target in written["sections"]["decoder"]["targets"])
    assert "float32" in (tmp_path / "gpu_attention.md").read_text()
