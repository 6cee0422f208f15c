"""Modules that the server imports once before ranks are forked from it."""

import torch._dynamo  # noqa: F401

from evenstep import Packed
from tests.train import on_ranks  # noqa: F401
from tests.train.running import Plan, samples_of, steps_of

steps_of(Plan("planned", Packed(max_tokens=8), dp=2), samples_of([3, 4]), known=True)
