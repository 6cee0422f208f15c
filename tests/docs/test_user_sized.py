"""The first commands that a user runs, on a chat file of a user's size."""

import shlex
from pathlib import Path

import pytest

from tests.data import corpora
from tests.docs.blocks import DOCS, ROOT, page_blocks
from tests.docs.running import run_command

SIZE = 10_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "quick-start.md"], ids=lambda p: p.stem
)
def test_every_command_runs_on_ten_megabytes_of_chats_with_two_workers(
    page: Path, tmp_path: Path
) -> None:
    corpora.many_chats(tmp_path / "chats.jsonl", SIZE)
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").symlink_to(tmp_path / "chats.jsonl")
    corpora.tokenizer(tmp_path / "models" / "llama")
    commands = 0
    for block in page_blocks(page):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
        for line in block.text.splitlines() if block.kind == "bash" else ():
            if shlex.split(line, comments=True)[:1] not in (["evenstep"], ["python"]):
                continue
            workers = line.replace("evenstep lengths", "evenstep lengths --workers 2")
            run_command(f"{page.name}:{block.line}", workers, tmp_path)
            commands += 1
    assert commands >= 3
