"""TokenFileWriter: samples one after the other into a file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from evenstep.data.sources.source import Sample, SampleSource, read_samples
from evenstep.data.sources.token_file import (
    HEADER_SIZE,
    OFFSETS,
    TOKENS,
    Header,
    TokenFile,
    column_type,
    hasher,
)
from evenstep.errors import ConfigError, FileError, InputError

_BUFFER = 1 << 20


class TokenFileWriter:
    """Writes a `TokenFile` sample by sample, in constant memory.

    `dtype` is that of `input_ids`; `columns` names further columns with one entry per token and
    gives each its type. Other keys of a sample are left out. The file appears whole when the
    `with` block ends; if it ends by an exception, whatever was there before stays.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/a.tokens"
    ...     with TokenFileWriter(path, dtype=np.uint16, columns={"loss_mask": np.uint8}) as writer:
    ...         writer.append({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    ...     TokenFile(path)[0]["loss_mask"]
    array([0, 1, 1], dtype=uint8)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: DTypeLike = np.int32,
        columns: Mapping[str, DTypeLike] | None = None,
    ) -> None:
        self.path = Path(path)
        given = {TOKENS: dtype, **(columns or {})}
        if len(given) == len(columns or {}) or OFFSETS in given:
            raise ConfigError(
                f"a further column is called {TOKENS!r} or {OFFSETS!r}, which the file needs for "
                f"itself, so there would be two of it. Rename the column."
            )
        self._columns = {name: _stored(name, dtype) for name, dtype in given.items()}
        most = Header(self._columns, 2**63, 2**63, dict.fromkeys([*given, OFFSETS], "f" * 32))
        if len(most.encode()) > HEADER_SIZE:
            raise ConfigError(
                f"{len(self._columns)} columns have names too long for a header of {HEADER_SIZE} "
                f"bytes, so the file could not be opened. Use fewer columns or shorter names."
            )
        self._sections: dict[str, _Section] = {}
        self._temporary = self.path
        self._samples = self._tokens = 0

    def __enter__(self) -> Self:
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        self._samples = self._tokens = 0
        try:
            main = self._temporary.open("xb", _BUFFER)
            self._sections[TOKENS] = _Section(main)
            main.write(bytes(HEADER_SIZE))
            for name in [*list(self._columns)[1:], OFFSETS]:
                spool = tempfile.TemporaryFile(dir=self.path.parent, buffering=_BUFFER)
                self._sections[name] = _Section(spool)
        except OSError as error:
            raise self._unwritable(error) from None
        self._sections[OFFSETS].write(np.zeros(1, "<i8"))
        return self

    def append(self, sample: Sample) -> None:
        """Write one sample: a mapping with `input_ids` and every further column, or just tokens.

        A sample that is refused leaves no trace.
        """
        if not self._sections:
            raise FileError(
                f"{self.path} is not being written, so sample {self._samples} would be lost. "
                f"Append inside the `with` block of the writer."
            )
        row = sample if isinstance(sample, Mapping) else {TOKENS: sample}
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype in self._columns.items():
            if name not in row:
                raise self._refused(f"has no {name!r}", "Give every sample one.")
            arrays[name] = self._fitted(name, row[name], dtype)
        length = len(arrays[TOKENS])
        if not length:
            raise self._refused("has no tokens", "Leave it out.")
        for name, array in arrays.items():
            if len(array) != length:
                fault = f"has {length} tokens but {len(array)} entries in {name!r}"
                raise self._refused(fault, "Give it one entry per token.")
        try:
            for name, array in arrays.items():
                self._sections[name].write(array)
            self._sections[OFFSETS].write(np.array([self._tokens + length], "<i8"))
        except OSError as error:
            raise self._unwritable(error) from None
        self._samples += 1
        self._tokens += length

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as fault:
            raise self._unwritable(fault) from None
        finally:
            self._discard()

    def _finish(self) -> None:
        if not self._sections:
            raise FileError(
                f"{self.path} was given up when a sample could not be written, so there is no "
                f"file. Write it again."
            )
        digests = {name: section.digest.hexdigest() for name, section in self._sections.items()}
        header = Header(self._columns, self._samples, self._tokens, digests)
        main = self._sections[TOKENS].file
        for name, (start, _, _) in header.places()[0].items():
            if name != TOKENS:
                main.write(bytes(start - main.tell()))
                self._sections[name].file.seek(0)
                shutil.copyfileobj(self._sections[name].file, main, _BUFFER)
        main.seek(0)
        main.write(header.encode())
        main.close()
        self._temporary.replace(self.path)

    def _discard(self) -> None:
        """Let go of whatever has not become the file."""
        sections, self._sections = self._sections, {}
        for section in sections.values():
            with contextlib.suppress(OSError):  # a full disk refuses what is still buffered
                section.file.close()
        if sections:
            self._temporary.unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> FileError:
        self._discard()
        return FileError(
            f"{self.path} cannot be written ({error.strerror or error}), so nothing was saved. "
            f"Choose a folder that exists, is writable and has room."
        )

    def _refused(self, fault: str, remedy: str) -> InputError:
        return InputError(
            f"sample {self._samples} {fault}, so it cannot be written to {self.path}. {remedy}"
        )

    def _fitted(self, name: str, values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        """`values` in the type of their column, which must be able to hold them."""
        array = np.asarray(values)
        if array.ndim == 1 and not len(array):
            return array.astype(dtype)
        if array.ndim != 1 or array.dtype.kind not in ("biuf" if dtype.kind == "f" else "biu"):
            fault = f"has {array.dtype} of shape {array.shape} as {name!r}, declared as {dtype}"
            raise self._refused(fault, "Give it one such number per token.")
        if dtype.kind != "f":
            low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            for value in (int(array.min()), int(array.max())):
                if not low <= value <= high:
                    fault = f"has {value} in {name!r}, which {dtype} cannot hold"
                    raise self._refused(fault, "Choose a wider dtype, or correct the sample.")
        try:
            with np.errstate(over="raise"):
                return np.ascontiguousarray(array, dtype)
        except FloatingPointError:
            fault = f"has a number in {name!r} that {dtype} cannot hold"
            raise self._refused(fault, "Choose a wider dtype, or correct the sample.") from None


def write_token_file(
    path: str | os.PathLike[str],
    samples: Iterable[Sample] | SampleSource,
    *,
    dtype: DTypeLike = np.int32,
    columns: Mapping[str, DTypeLike] | None = None,
) -> TokenFile:
    """Write samples, or all samples of a source, and give the file.

    write_token_file("train.tokens", Jsonl("train.jsonl", tokenizer=tok), dtype=np.uint32)
    """
    with TokenFileWriter(path, dtype=dtype, columns=columns) as writer:
        if isinstance(samples, SampleSource):
            for item in range(len(samples)):
                for _, sample in read_samples(samples, item):
                    writer.append(sample)
        else:
            for sample in samples:
                writer.append(sample)
    return TokenFile(path)


class _Section:
    """A part of the file on its way, and its digest so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hasher()

    def write(self, array: NDArray[Any]) -> None:
        """Append a contiguous array."""
        data = array.tobytes()
        self.file.write(data)
        self.digest.update(data)


def _stored(name: str, dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found = column_type(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or (name == TOKENS and found.kind not in "iu"):
        numbers = "integers" if name == TOKENS else "integers, floats or bools"
        raise ConfigError(
            f"{name!r} is declared as {dtype}, which is not a type of {numbers} of up to 64 bits, "
            f"so it cannot be stored. Choose one such as np.int32."
        )
    return found
