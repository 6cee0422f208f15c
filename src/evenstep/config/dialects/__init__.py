"""Dialects: another system's configuration -> **values of the native schema**, with their origins.

One module per system: a table of its keys with their defaults, and its rules. `reader.py` reads the
values, checks them and collects faults, notes and keys that it does not need.
"""

from evenstep.config.dialects.cosmos_rl import COSMOS_RL
from evenstep.config.dialects.dialect import Dialect
from evenstep.config.dialects.fast_llm import FAST_LLM
from evenstep.config.dialects.nemo_rl import NEMO_RL
from evenstep.config.dialects.roll import ROLL
from evenstep.config.dialects.veomni import VEOMNI
from evenstep.config.dialects.verl import VERL

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect for dialect in (NEMO_RL, ROLL, COSMOS_RL, VEOMNI, FAST_LLM, VERL)
}

__all__ = ["DIALECTS", "Dialect"]
