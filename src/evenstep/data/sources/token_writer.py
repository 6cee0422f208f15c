"""TokenFileWriter: writes a TokenFile sample by sample, and replaces the target atomically."""

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

from evenstep.data.sources.source import LOSS_MASKS, Sample, SampleSource, read_samples
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

    `dtype` is that of `input_ids`. `columns` maps further columns, with one entry per token, to
    their dtypes. Other keys of a sample are ignored, except that labels and loss masks which are
    not among the columns are an error. The file appears when the `with` block ends. If the block
    raises, an existing file is left unchanged.

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
                f"columns must not contain the reserved names {TOKENS!r} and {OFFSETS!r}. Rename "
                f"the column."
            )
        self._columns = {name: _stored(name, dtype) for name, dtype in given.items()}
        most = Header(self._columns, 2**63, 2**63, dict.fromkeys([*given, OFFSETS], "f" * 32))
        if len(most.encode()) > HEADER_SIZE:
            raise ConfigError(
                f"the names of {len(self._columns)} columns do not fit into a header of "
                f"{HEADER_SIZE} bytes. Use fewer columns or shorter names."
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
        """Write one sample: a mapping with `input_ids` and every further column, or only tokens.

        Nothing is written of a sample that is refused.
        """
        if not self._sections:
            raise FileError(
                f"{self.path} is not open for writing. Append samples inside the `with` block of "
                f"the writer."
            )
        row = sample if isinstance(sample, Mapping) else {TOKENS: sample}
        for name in ("labels", *LOSS_MASKS):
            if name in row and name not in self._columns:
                remedy = f"Pass columns={{{name!r}: np.{'int32' if name == 'labels' else 'uint8'}}}"
                raise self._refused(
                    f"has {name!r}, which would be lost", f"{remedy}, or remove it."
                )
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype in self._columns.items():
            if name not in row:
                raise self._refused(f"has no {name!r}", "Add it to every sample.")
            arrays[name] = self._fitted(name, row[name], dtype)
        length = len(arrays[TOKENS])
        if not length:
            raise self._refused("has no tokens", "Leave it out.")
        for name, array in arrays.items():
            if len(array) != length:
                fault = f"has {length} tokens but {len(array)} entries in {name!r}"
                raise self._refused(fault, "Expected one entry per token.")
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
                f"{self.path} was not written, because writing a sample failed. Write it again."
            )
        digests = {name: section.digest.hexdigest() for name, section in self._sections.items()}
        header = Header(self._columns, self._samples, self._tokens, digests)
        main = self._sections[TOKENS].file
        for name, (start, _, _) in header.sections()[0].items():
            if name != TOKENS:
                main.write(bytes(start - main.tell()))
                self._sections[name].file.seek(0)
                shutil.copyfileobj(self._sections[name].file, main, _BUFFER)
        main.seek(0)
        main.write(header.encode())
        main.close()
        self._temporary.replace(self.path)

    def _discard(self) -> None:
        """Close and remove temporary files."""
        sections, self._sections = self._sections, {}
        for section in sections.values():
            with contextlib.suppress(OSError):  # flushing fails on a full disk
                section.file.close()
        if sections:
            self._temporary.unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> FileError:
        self._discard()
        return FileError(
            f"{self.path} cannot be written ({error.strerror or error}). Choose an existing, "
            f"writable folder with enough free space."
        )

    def _refused(self, fault: str, remedy: str) -> InputError:
        return InputError(f"{self.path}: sample {self._samples} {fault}. {remedy}")

    def _fitted(self, name: str, values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        """`values` in the dtype of their column. Raises if a value is out of its range."""
        array = np.asarray(values)
        if array.ndim == 1 and not len(array):
            return array.astype(dtype)
        if array.ndim != 1 or array.dtype.kind not in ("biuf" if dtype.kind == "f" else "biu"):
            fault = f"has {name!r} of dtype {array.dtype} and shape {array.shape}"
            raise self._refused(fault, f"Expected one number per token, stored as {dtype}.")
        if dtype.kind != "f":
            low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            for value in (int(array.min()), int(array.max())):
                if not low <= value <= high:
                    fault = f"has {value} in {name!r}, out of range for {dtype}"
                    raise self._refused(fault, "Use a wider dtype, or correct the sample.")
        try:
            with np.errstate(over="raise"):
                return np.ascontiguousarray(array, dtype)
        except FloatingPointError:
            fault = f"has a number in {name!r} that is out of range for {dtype}"
            raise self._refused(fault, "Use a wider dtype, or correct the sample.") from None


def write_token_file(
    path: str | os.PathLike[str],
    samples: Iterable[Sample] | SampleSource,
    *,
    dtype: DTypeLike = np.int32,
    columns: Mapping[str, DTypeLike] | None = None,
) -> TokenFile:
    """Write samples, or all samples of a source, and return the file.

    write_token_file("train.tokens", Jsonl("train.jsonl", tokenizer=tok), dtype=np.uint32)

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     len(write_token_file(f"{folder}/tokens", [{"input_ids": [1, 2]}, {"input_ids": [3]}]))
    2
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
    """A section that is being written, and its digest so far."""

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
            f"the dtype of {name!r} must be one of {numbers} of up to 64 bits, got {dtype}. Use "
            f"one such as np.int32."
        )
    return found
