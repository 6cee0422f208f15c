"""Held-out data: its loss in the log, by source; the best checkpoint; exact on any ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import Packed, Padded, Recipe, Steps
from evenstep.config import FaultsError
from evenstep.data import Corpus, TokenFile
from evenstep.errors import EvenstepError
from evenstep.trainer import train
from tests.internals import complete, read_place
from tests.trainer.runs import finish, logged, settings, start, texts


def write(path: Path, count: int, seed: int, letters: str = "abcdef ") -> str:
    random = np.random.default_rng(seed)
    rows = ["".join(random.choice(list(letters), size)) for size in random.integers(4, 200, count)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(path)


def validation(out: Path) -> dict[int, float]:
    """The loss on held-out data, by step."""
    records = [record for record in logged(out) if "validation/loss" in record]
    return {record["step"]: record["validation/loss"] for record in records}


def test_a_share_is_held_out_and_never_trained_on(tmp_path: Path) -> None:
    paths = write(tmp_path / "rows.jsonl", 40, 0)
    corpus = Corpus(paths=paths, validation=0.2)
    train(settings(tmp_path / "run", paths, data=corpus))

    files = [TokenFile(tmp_path / "run" / f"{name}.tokens") for name in ("data", "validation")]
    assert [len(file) for file in files] == [32, 8]
    rows = [bytes(file[i]["input_ids"].tolist()) for file in files for i in range(len(file))]
    stored = [json.loads(line)["text"].encode() for line in Path(paths).read_text().splitlines()]
    assert sorted(rows) == sorted(stored)
    assert [*validation(tmp_path / "run")] == [2, 5, 8, 11]  # before every checkpoint
    assert "changed" in (tmp_path / "run" / "starts.jsonl").read_text()


def test_files_are_evaluated_by_source_on_a_schedule_of_their_own(tmp_path: Path) -> None:
    paths = write(tmp_path / "rows.jsonl", 40, 0)
    easy = write(tmp_path / "easy.jsonl", 5, 1, letters="a")
    hard = write(tmp_path / "hard.jsonl", 7, 2)
    corpus = Corpus(paths=paths, validation=(easy, hard))
    ended = train(settings(tmp_path / "run", paths, data=corpus, trainer={"evaluate_every": 5}))

    assert [*validation(tmp_path / "run")] == [4, 9, 11]
    last = logged(tmp_path / "run")[-1]
    by_source = {name: last[f"validation/loss/{name}.jsonl"] for name in ("easy", "hard")}
    assert by_source["easy"] != pytest.approx(by_source["hard"], abs=1e-3)
    file = TokenFile(tmp_path / "run" / "validation.tokens")
    source = np.array([file[i]["source"][0] for i in range(len(file))])
    tokens = [(file.lengths_of(np.flatnonzero(source == number)) - 1).sum() for number in (0, 1)]
    mean = np.average([by_source["easy"], by_source["hard"]], weights=tokens)
    assert last["validation/loss"] == pytest.approx(mean, abs=1e-9)
    assert ended.validation == last["validation/loss"]


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    paths = write(tmp_path / "rows.jsonl", 12, 0, letters="ab")
    other = write(tmp_path / "other.jsonl", 12, 1, letters="xyz")
    corpus = Corpus(paths=paths, validation=other)
    options: dict[str, Any] = {
        "data": corpus,
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "trainer": {"save_every": 4, "keep": 1, "evaluate_every": 1},
    }
    ended = train(settings(tmp_path / "run", paths, **options))

    losses = validation(tmp_path / "run")
    best = min(losses, key=lambda step: losses[step]) + 1
    assert 1 <= best < 12  # what is not trained on gets worse in the end
    assert ended.best == (best, losses[best - 1])
    names = [path.name for path in complete(tmp_path / "run" / "checkpoints")]
    assert names == [f"step-{best:06d}", "step-000012"]
    # A run that goes on knows it.
    options["stream"] = {"max_num_steps": 16}
    assert train(settings(tmp_path / "run", paths, **options)).best == ended.best
    names = [path.name for path in complete(tmp_path / "run" / "checkpoints")]
    assert names == [f"step-{best:06d}", "step-000016"]
    assert read_place(tmp_path / "run" / "checkpoints" / names[0]).step == best


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_loss_on_held_out_data_does_not_depend_on_ranks_or_layout(
    tmp_path: Path, ranks: int
) -> None:
    data = texts(tmp_path)
    held_out = write(tmp_path / "held.jsonl", 13, 3)
    corpus = Corpus(paths=data, validation=held_out)
    layouts: dict[str, Packed | Padded] = {
        "packed": Packed(max_tokens=512),
        "padded": Padded(samples=1),
    }
    for name, layout in layouts.items():
        recipe = Recipe(layout=layout, steps=Steps(samples=6))
        train(settings(tmp_path / name, data, data=corpus, recipe=recipe))
    sets = {"parallel": "fsdp2" if ranks == 3 else "ddp"}
    finish(start(tmp_path / "ranks", data, ranks, validation=held_out, trainer=sets))

    one = validation(tmp_path / "padded")
    for name in ("packed", "ranks"):
        other = validation(tmp_path / name)
        assert other.keys() == one.keys()
        assert [*other.values()] == pytest.approx([*one.values()], abs=1e-6)


def test_held_out_data_that_cannot_be_is_refused(tmp_path: Path) -> None:
    data = texts(tmp_path)
    corpus = Corpus(paths=data, validation=str(tmp_path / "no.jsonl"))
    with pytest.raises(FaultsError, match=r"data.validation: .* has no files"):
        train(settings(tmp_path / "run", data, data=corpus))
    with pytest.raises(FaultsError, match="evaluate_every has no effect without held-out data"):
        train(settings(tmp_path / "run", data, trainer={"evaluate_every": 2}))
    for overlapping in (data, str(Path(data).parent)):  # would be trained on
        corpus = Corpus(paths=overlapping, format="text", validation=data)
        with pytest.raises(FaultsError, match=r"data.validation: .* is also a file of data.paths"):
            train(settings(tmp_path / "run", data, data=corpus))
    for share in (0.0, 1.0, 2):
        with pytest.raises(EvenstepError, match="a share between 0 and 1"):
            Corpus(paths=data, validation=share)
    one = tmp_path / "one.jsonl"
    one.write_text('{"text": "abc"}\n')
    with pytest.raises(EvenstepError, match="leaves none of 1 rows"):
        train(settings(tmp_path / "one", str(one), data=Corpus(paths=str(one), validation=0.5)))
