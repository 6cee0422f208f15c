"""Checks of the numbers that losses take as options."""

from __future__ import annotations

import math

from evenstep.errors import ConfigError


def positive(name: str, value: float) -> None:
    """Raise unless `value` is positive and finite."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be positive and finite, got {value}.")


def at_least(name: str, value: float, least: float) -> None:
    """Raise unless `value` is finite and at least `least`."""
    if not least <= value < math.inf:
        raise ConfigError(f"{name} must be finite and at least {least:g}, got {value}.")


def share(name: str, value: float, most: float = 1.0) -> None:
    """Raise unless `value` is in [0, most)."""
    if not 0 <= value < most:
        raise ConfigError(f"{name} must be in [0, {most:g}), got {value}.")
