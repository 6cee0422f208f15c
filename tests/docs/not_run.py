"""The blocks that are not run here, one line each: `python -m tests.docs.not_run` writes the list.

A new line in `not_run.txt` is a decision: the block cannot run in the tests, and says why.
"""

from pathlib import Path

from tests.docs.blocks import PAGES, name_of, page_blocks

LIST = Path(__file__).parent / "not_run.txt"
REASONS = {
    "a GPU": "",
    "a hub": "a model, tokenizer or data that must be downloaded",
    "a checkout": "files of the repository, make or pip",
    "your code": "the reader's own trainer",
    "your data": "the reader's own samples, models or tokenizers",
    "a Ray cluster": "as many cores as actors",
    "a cluster": "several nodes; tests start two on one machine",
}
SYSTEMS = {"axolotl", "Megatron-LM", "Slurm", "torchtitan", "verl"}


def listed() -> str:
    """Page, reason and first line of every such block."""
    lines = [
        f"{name_of(page)} | {block.needs} | {block.text.strip().splitlines()[0].strip()}"
        for page in PAGES
        for block in page_blocks(page)
        if block.needs is not None
    ]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    LIST.write_text(listed(), "utf-8")
    print(f"Wrote {LIST}")
