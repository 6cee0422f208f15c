"""`evenstep export`: write the model of a training run for `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from evenstep.cli import terminal

Run: TypeAlias = Annotated[
    Path,
    typer.Argument(help="The folder of a run: trainer.out.", metavar="RUN", show_default=False),
]
Out: TypeAlias = Annotated[
    Path, typer.Option(help="The folder to write.", metavar="FOLDER", show_default=False)
]
Checkpoint: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Its name, such as step-000120, or best. Default: the newest.",
        metavar="NAME",
        show_default=False,
    ),
]
Adapters: TypeAlias = Annotated[
    bool, typer.Option("--adapters", help="With LoRA: the adapters alone, not merged.")
]
Ask: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Ask the exported model and print its answer.", metavar="TEXT", show_default=False
    ),
]


def export(
    run: Run,
    out: Out,
    checkpoint: Checkpoint = None,
    adapters: Adapters = False,
    ask: Ask = None,
) -> int:
    """Write a trained model as a folder that transformers loads.

    The model, its tokenizer and its generation config, from any checkpoint and whatever number of
    ranks wrote it.
    """
    from evenstep.lazy import need

    need("torch", extra="cli,torch,hf", package="evenstep export")
    from evenstep.trainer import export_model

    path = export_model(run, out, checkpoint=checkpoint, adapters=adapters)
    with terminal.printing():
        typer.echo(f"{path.name} of {run}: {out}")
        if ask is not None:
            typer.echo(_answer(out, ask))
    return 0


def _answer(folder: Path, question: str) -> str:
    """What the model in a folder says to a user who asks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    inputs.pop("token_type_ids", None)
    tokens = model.generate(**inputs, max_new_tokens=200, do_sample=False)
    answer: str = tokenizer.decode(
        tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return answer.strip()
