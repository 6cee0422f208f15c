"""The reference trainer: settings -> **a trained model**, on one process or many.

run          train: a run from its settings to its end
job          the settings, complete, and those of the run in a folder
samples      tokens in files, the steps of a rank, held-out samples, pairs
model        built, adapted, wrapped for its ranks; its optimizer
checkpoints  written while training goes on, complete and intact or refused
export       a checkpoint -> a folder that `from_pretrained` reads
ranks        the processes of a run, and the lock of its folder
logs         log.jsonl, the line on a terminal, trackers

>>> from evenstep import Packed, Recipe, Steps
>>> from evenstep.config import Settings, StreamSettings, TrainerSettings
>>> from evenstep.data import Corpus
>>> from evenstep.trainer import train
>>> settings = Settings(
...     recipe=Recipe(layout=Packed(max_tokens=4096), steps=Steps(samples=32)),
...     data=Corpus(paths="texts/"),
...     stream=StreamSettings(max_num_steps=100),
...     trainer=TrainerSettings(out="run"),
... )
>>> outcome = train(settings)  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.trainer.export import export_model
    from evenstep.trainer.run import Outcome, train

__all__ = ["Outcome", "export_model", "train"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__, {"export": ["export_model"], "run": ["Outcome", "train"]}, extra="torch"
    )
