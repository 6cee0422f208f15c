"""The reference trainer: settings -> **a trained model**, on one process or many.

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
    from evenstep.trainer.outcome import Outcome
    from evenstep.trainer.run import train

__all__ = ["Outcome", "train"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__, {"outcome": ["Outcome"], "run": ["train"]}, extra="torch"
    )
