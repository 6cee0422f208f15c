"""Ray Data counts the same tokens as processes do."""

import json
from pathlib import Path

import numpy as np
import pytest

from evenstep.cli import main
from evenstep.data import Corpus
from evenstep.errors import InputError
from tests.data import corpora

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("cluster"),
]


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_ray_counts_the_same_in_the_same_order(workers: int | None, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    sizes = [n * 37 % 101 for n in range(300)]
    path.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in sizes))
    corpus, seen = Corpus(paths=str(path)), [0]
    counts = corpus.token_counts(
        engine="ray", workers=workers, progress=lambda done, total: seen.append(done)
    )
    assert counts.tolist() == sizes == corpus.token_counts(workers=1).tolist()
    assert seen == sorted(seen)
    assert seen[-1] == 300


@pytest.mark.parametrize("make", [corpora.jsonl, corpora.parquet, corpora.dataset])
def test_text_and_chats_of_every_format_are_counted_on_ray(make: object, tmp_path: Path) -> None:
    assert callable(make)
    texts = Corpus(paths=str(make(tmp_path, "text", str)))
    chats = Corpus(paths=str(make(tmp_path, "messages", corpora.chat_of)), format="chat")
    for corpus in (texts, chats):
        assert corpus.token_counts(engine="ray").tolist() == corpus.token_counts().tolist()


def test_the_command_writes_the_same_file(tmp_path: Path) -> None:
    path = corpora.texts(tmp_path)
    for engine in ("processes", "ray"):
        out = str(tmp_path / f"{engine}.npy")
        assert main(["lengths", str(path), "--engine", engine, "--out", out]) == 0
    assert (np.load(tmp_path / "processes.npy") == np.load(tmp_path / "ray.npy")).all()


def test_a_fault_on_ray_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' * 50 + '{"text": 3}\n')
    with pytest.raises(InputError, match=r"^\S*a.jsonl, line 51: field 'text' must be a str"):
        Corpus(paths=str(path)).token_counts(engine="ray", workers=1)
