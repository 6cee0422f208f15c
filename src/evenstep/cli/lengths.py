"""`evenstep lengths`: count the tokens of every sample of files."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import typer

from evenstep.cli import files, options, terminal

if TYPE_CHECKING:
    from evenstep.core.ragged import IntArray

Data: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        help="Files, folders or globs: text, JSONL, Parquet, saved Hugging Face datasets, token "
        "files or Megatron .bin/.idx; - for standard input, with --format.",
        metavar="DATA...",
        show_default=False,
    ),
]
Out: TypeAlias = Annotated[
    Path, typer.Option(help="Write the lengths to this .npy file.", metavar="FILE")
]
Tokenizer: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Folder of a Hugging Face tokenizer. Default: UTF-8 bytes.",
        metavar="FOLDER",
        show_default=False,
    ),
]
Format: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="text, jsonl, chat, parquet, dataset, tokens or megatron. Default: by the names.",
        metavar="FORMAT",
        show_default=False,
    ),
]
Field: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Field of a row with text, a list of token ids or the messages of a chat. "
        "Default: text or input_ids, or messages.",
        metavar="NAME",
        show_default=False,
    ),
]
Template: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="File with a chat template. Default: that of the tokenizer.",
        metavar="FILE",
        show_default=False,
    ),
]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Processes, or actors of Ray. Default: one per core, fewer for small files.",
        metavar="N",
        min=1,
        show_default=False,
    ),
]
EngineOption: TypeAlias = Annotated[
    str, typer.Option("--engine", help="processes, or ray for Ray Data.", metavar="ENGINE")
]

_PIPED = ("text", "jsonl", "chat")  # formats that need no file of a certain kind


def lengths(
    data: Data,
    out: Out,
    tokenizer: Tokenizer = None,
    format_: Format = None,
    field: Field = None,
    template: Template = None,
    workers: Workers = None,
    engine: EngineOption = "processes",
    json: options.Json = False,
) -> None:
    """Count the tokens of every sample and write them as lengths for the other commands.

    A text file is one sample, and so is a row. Samples without tokens are left out.
    """
    import numpy as np

    from evenstep.cli import output
    from evenstep.core.plan_file import replace_file
    from evenstep.data.corpus import Corpus
    from evenstep.errors import EvenstepError, FileError, InputError
    from evenstep.screen import progress

    if out.suffix.lower() != ".npy":
        raise FileError(f"{out} has the suffix {out.suffix!r}, expected .npy. Rename the output.")
    files.refuse_unwritable([Path(path) for path in data if path != "-"], out)
    try:
        with (
            _named(data, format_) as paths,
            progress("Counting tokens", "sample") as advance,
        ):
            corpus = Corpus(
                paths=paths,
                format=cast("Any", format_),
                field=field,
                tokenizer=tokenizer,
                template=template,
            )
            counts = corpus.token_counts(
                workers=workers, engine=cast("Any", engine), progress=advance
            )
    except EvenstepError as error:
        raise type(error)(_with_options(str(error))) from None
    found = counts[counts > 0]
    if not len(found):
        raise InputError(f"{' '.join(data)}: no sample has a token. Check the files.")
    content = io.BytesIO()
    np.save(content, found)
    replace_file(out, content.getvalue())
    figures = _figures(found, len(counts) - len(found))
    with terminal.printing([out]):
        if json:
            output.print_json(figures)
        else:
            output.print_figures(figures, f"Lengths of {' '.join(data)}")
    output.remark(f"wrote {out}")


@contextmanager
def _named(data: list[str], format_: str | None) -> Iterator[tuple[str, ...]]:
    """The paths of the data; standard input is kept in a temporary file meanwhile."""
    from evenstep.cli.input import standard_input
    from evenstep.errors import InputError

    if "-" not in data:
        yield tuple(data)
        return
    if len(data) > 1 or format_ not in _PIPED:
        raise InputError(
            f"- is standard input, which has no name and stands alone. Set --format to one of: "
            f"{', '.join(_PIPED)}, and pass no other file."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"standard input{'.txt' if format_ == 'text' else '.jsonl'}")
        path.write_bytes(standard_input())
        yield (str(path),)


def _figures(lengths: IntArray, left_out: int) -> dict[str, int | float]:
    """What a user asks first about lengths."""
    import numpy as np

    middle, most = np.percentile(lengths, [50, 99], method="lower").tolist()
    return {
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "shortest": int(lengths.min()),
        "median": middle,
        "mean": float(lengths.mean()),
        "p99": most,
        "longest": int(lengths.max()),
        "left_out_empty": left_out,
    }


def _with_options(message: str) -> str:
    """A message about the section `data` of a file, in the words of the command line.

    >>> _with_options("data.field has no effect on text files. Remove it.")
    '--field has no effect on text files. Remove it.'
    """
    message = message.replace("set data.format to chat", "add --format chat")
    names = "field|format|template|tokenizer"
    message = re.sub(rf"(?<![\w/.])data\.({names})\b", r"--\1", message)
    message = re.sub(r"(?<![\w/.])data\.paths\b", "DATA", message)
    return message.replace("the engine ", "--engine ")
