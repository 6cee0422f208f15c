"""What `make demo` runs: a small decoder, trained three ways on the Python standard library.

decoder   a small language model that takes a `Batch`
sampling  how it continues prompts
run       `python -m evenstep.demo`
"""

from typing import TYPE_CHECKING

from evenstep.lazy import exports

if TYPE_CHECKING:
    from evenstep.demo.decoder import Decoder, DecoderShape
    from evenstep.demo.sampling import sample_tokens

__all__ = [
    "Decoder",
    "DecoderShape",
    "sample_tokens",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "decoder": ["Decoder", "DecoderShape"],
            "sampling": ["sample_tokens"],
        },
        extra="torch",
    )
