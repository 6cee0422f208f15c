"""Files that are whole by their digest and still not what a plan is."""

import hashlib
import json
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import Packed, Plan, Recipe
from evenstep.cli import main
from evenstep.errors import FileError
from tests.handmade import handmade
from tests.internals import plan_file


def sealed(body: bytes) -> bytes:
    return plan_file.MAGIC + hashlib.sha256(body).digest() + body


def payload(text: bytes, rest: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + rest


def good() -> tuple[dict[str, Any], dict[str, Any]]:
    plan = handmade([3, 4], [[[[[0, 1]]]]], Recipe(layout=Packed(max_tokens=8)))
    return plan_file.unpack(plan.to_bytes(), "good")


def header_of(**changes: Any) -> bytes:
    """The header of a good plan with another entry somewhere."""
    header, arrays = good()
    counts = {name: len(array) for name, array in arrays.items()}
    return json.dumps({"header": header, "arrays": counts} | changes).encode()


def body() -> bytes:
    """The arrays of a good plan, as its file holds them."""
    return b"".join(array.tobytes() for _, array in sorted(good()[1].items()))


DEEP = b'{"arrays": {}, "header": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
CRAFTED = {
    "a header nested too deep": payload(DEEP),
    "an array of more than 64 bits": payload(header_of(arrays={"lengths": 2**70})),
    "an array of more than the file": payload(header_of(arrays={"lengths": 2**40})),
    "an array of fewer than none": payload(header_of(arrays={"lengths": -1})),
    "an array that counts in words": payload(header_of(arrays={"lengths": "many"})),
    "arrays without names": payload(header_of(arrays=[3])),
    "no arrays": payload(b"{}"),
    "no header": payload(b""),
    "a list for a header": payload(b"[]"),
    "a header of more than the file": (2**62).to_bytes(8, "little"),
    "nothing at all": b"",
    "a cost of a hundred digits": payload(
        header_of(header=good()[0] | {"cost": {"per_token": 10**99}}), body()
    ),
    "more than it declares": payload(header_of(), bytes(8 * 999)),
}


@pytest.mark.parametrize("case", CRAFTED)
@pytest.mark.parametrize("command", ["report", "check", "plan"])
def test_a_crafted_plan_is_refused_in_one_line(
    case: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "crafted.plan"
    path.write_bytes(sealed(zlib.compress(CRAFTED[case])))
    with pytest.raises(FileError, match=r"crafted\.plan holds "):
        Plan.load(path)
    assert main([command, str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_file_is_not_expanded_beyond_what_it_declares(tmp_path: Path) -> None:
    size = 2**28
    press = zlib.compressobj(9)
    start = press.compress(payload(header_of()))
    body = start + b"".join(press.compress(bytes(2**20)) for _ in range(size >> 20)) + press.flush()
    path = tmp_path / "bomb.plan"
    path.write_bytes(sealed(body))
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="longer than its header declares"):
            Plan.load(path)
        assert tracemalloc.get_traced_memory()[1] < size / 50
    finally:
        tracemalloc.stop()


def test_a_plan_of_little_but_zeros_survives_its_file(tmp_path: Path) -> None:
    arrays = {"zeros": np.zeros(10**6, np.int64)}
    plan_file.replace_file(tmp_path / "a", plan_file.pack(plan_file.encode({}, arrays)))
    assert plan_file.unpack(plan_file.read(tmp_path / "a"), "a")[1]["zeros"].tolist() == [0] * 10**6


@pytest.mark.skipif(os.name == "nt", reason="named pipes are elsewhere there")
def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="not a regular file"):
        plan_file.replace_file(tmp_path / "pipe", b"x")
    assert (tmp_path / "pipe").is_fifo()


def test_files_are_put_in_place_together_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    with pytest.raises(FileError, match=r"b cannot be written .*; nothing was saved"):
        plan_file.replace_files({tmp_path / "old": b"new", tmp_path / "absent" / "b": b"new"})
    assert (tmp_path / "old").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
