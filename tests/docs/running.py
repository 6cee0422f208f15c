"""Run the blocks of a page as a reader would: from top to bottom, in one empty folder."""

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import ROOT, Block, page_blocks

_SECONDS = 600


def run_page(name: str, blocks: list[Block], folder: Path) -> None:
    """Write files, run Python in one namespace and commands with bash; the first error ends it."""
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        if block.needs is not None:
            continue
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, "utf-8")
        elif block.kind == "python":
            code = "\n" * (block.line - 1) + block.text  # so that errors name the line of the page
            exec(compile(code, name, "exec"), names)
        elif block.kind == "bash":
            run_command(f"{name}:{block.line}", block.text, folder)


def run_command(where: str, text: str, folder: Path) -> None:
    """Run a command with bash in a folder; an error of it is one of the test."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{where} exits with {done.returncode}:\n{done.stderr[-3000:]}"


def run_in_a_process(name: str, folder: Path) -> None:
    """Run a page in a process of its own, so that it changes nothing that other tests see."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.running", name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


if __name__ == "__main__":
    run_page(sys.argv[1], page_blocks(ROOT / sys.argv[1]), Path.cwd())
