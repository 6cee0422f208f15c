"""The command line as one page: every command with its arguments, options and an example."""

from __future__ import annotations

from typing import Any

from docs.generate.commands import arguments_of, commands, options_of
from docs.generate.docstrings import cell, fenced

_HEAD = """\
# Command line

Every command prints tables, or JSON with `--json`. Remarks and errors go to standard error. Exit \
codes: 0 success, 1 a plan or a file is invalid, 2 an error. `-h` or `--help` after a command \
shows its options. Numbers may have a unit: `16k` is 16 × 1024.

The examples run from top to bottom in an empty folder, with these files:"""

_FILES = {
    "texts.jsonl": (
        "json",
        "\n".join(
            f'{{"text": "{text}"}}'
            for text in (
                "to be",
                "or not to be",
                "that is the question:",
                "whether it is nobler to suffer",
            )
        ),
    ),
    "run.yaml": (
        "yaml",
        "layout: {max_tokens: 256}\n"
        "steps: {samples: 4}\n"
        "stream: {max_num_steps: 4, infinite_loop: true}\n"
        "data: {paths: texts.jsonl}\n"
        "trainer: {out: runs/first}",
    ),
    "grpo.yaml": (
        "yaml",
        "policy:\n"
        "  train_global_batch_size: 64\n"
        "  sequence_packing: {enabled: true, train_mb_tokens: 8192}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}",
    ),
}

_EXAMPLES = {
    "evenstep": "evenstep --version",
    "evenstep lengths": "evenstep lengths texts.jsonl --out lengths.npy",
    "evenstep plan": (
        "python -c 'print(*[(37 * n) % 1900 + 20 for n in range(512)])' > lengths.txt\n"
        "evenstep plan lengths.txt --max-tokens 4k --ranks 4 --samples-per-step 64 "
        "--out steps.evenstep"
    ),
    "evenstep report": "evenstep report steps.evenstep --out report.html",
    "evenstep check": "evenstep check steps.evenstep",
    "evenstep compare": (
        "evenstep compare lengths.txt --max-tokens 4k --ranks 4 --samples-per-step 64 "
        "--model llama-3-8b"
    ),
    "evenstep train": "evenstep train run.yaml",
    "evenstep export": (
        "python -m evenstep.demo.chats tiny\n"
        "evenstep train tiny/run.yaml\n"
        "evenstep export tiny/run --out tiny/model"
    ),
    "evenstep simulate": (
        "evenstep simulate lengths.txt --model llama-3-8b --gpu h200 --max-tokens 4k --ranks 8 "
        "--samples-per-step 64"
    ),
    "evenstep tune": (
        "evenstep tune lengths.txt --model llama-3.2-1b --gpu h200 --ranks 8 --steps 4"
    ),
    "evenstep config": "evenstep config --help",
    "evenstep config check": "evenstep config check run.yaml",
    "evenstep config show": "evenstep config show run.yaml --set topology.dp=8",
    "evenstep config convert": "evenstep config convert grpo.yaml --from nemo-rl --out native.yaml",
}


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, (kind, text) in _FILES.items():
        parts.append(f"`{name}`:")
        parts.append(f"<!-- file: {name} -->\n{fenced(kind, text)}")
    for name, command in commands().items():
        parts += _section(name, command)
    return "\n\n".join(parts) + "\n"


def _section(name: str, command: Any) -> list[str]:
    """One command."""
    arguments, options = arguments_of(command), options_of(command)
    words = [name, *(str(each.metavar) for each in arguments)]
    usage = " ".join([*words, *(["[OPTIONS]"] if options else [])])
    inner = getattr(command, "commands", {})
    parts = [f"## {name}", str(command.help)]
    parts.append(fenced("text", f"{name} COMMAND" if inner else usage))
    if inner:
        parts.append(_links(name, inner))
    if arguments:
        parts.append(_table("argument", [(f"`{a.metavar}`", a) for a in arguments]))
    if options:
        parts.append(_table("option", [(_spelling(option), option) for option in options]))
    return [*parts, "For example:", fenced("bash", _EXAMPLES[name])]


def _links(name: str, inner: dict[str, Any]) -> str:
    """The commands of a group."""
    rows = [
        f"| [`{name} {each}`](#{f'{name} {each}'.replace(' ', '-')}) | "
        f"{cell(str(command.help).partition('.')[0])} |"
        for each, command in inner.items()
    ]
    return "\n".join(["| command | |", "| --- | --- |", *rows])


def _table(kind: str, rows: list[tuple[str, Any]]) -> str:
    lines = [
        f"| {shown} | {_default(parameter)} | {cell(str(parameter.help))} |"
        for shown, parameter in rows
    ]
    return "\n".join([f"| {kind} | default | meaning |", "| --- | --- | --- |", *lines])


def _spelling(option: Any) -> str:
    """How an option is written, with the value that follows."""
    value = f" {option.metavar}" if option.metavar and not option.is_flag else ""
    return ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))


def _default(parameter: Any) -> str:
    """The default; options without one say in their help what they mean."""
    if parameter.required:
        return "required"
    if parameter.default is None:
        return "–"
    if isinstance(parameter.default, bool):
        return "on" if parameter.default else "off"
    return f"`{parameter.default}`"
