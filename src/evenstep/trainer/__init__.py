"""The reference trainer: a configuration -> **a trained model**, on one process or many.

>>> from evenstep import Packed, Recipe, Steps
>>> from evenstep.data import Corpus
>>> from evenstep.trainer import Trainer
>>> recipe = Recipe(layout=Packed(max_tokens=4096), steps=Steps(samples=32))
>>> trainer = Trainer(out="run", data=Corpus(paths="texts/"), recipe=recipe, max_num_steps=100)
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.trainer.options import Lora, ModelOptions, OptimizerOptions
    from evenstep.trainer.outcome import Outcome
    from evenstep.trainer.trainer import Trainer

__all__ = ["Lora", "ModelOptions", "OptimizerOptions", "Outcome", "Trainer"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "options": ["Lora", "ModelOptions", "OptimizerOptions"],
            "outcome": ["Outcome"],
            "trainer": ["Trainer"],
        },
    )
