"""Format numbers for people."""

from __future__ import annotations


def count(value: float) -> str:
    """12345 -> 12,345."""
    return f"{int(value):,}"


def percent(ratio: float) -> str:
    """0.01234 -> 1.23 %; only exact 0 and 1 read as 0 % and 100 %."""
    if ratio in (0, 1):
        return f"{100 * ratio:g} %"
    if 0 < ratio < 0.00005:
        return "< 0.01 %"
    if 0.9995 <= ratio < 1:
        return f"{min(99.99, 100 * ratio):.2f} %"
    return f"{100 * ratio:.2f} %" if abs(ratio) < 0.1 else f"{100 * ratio:.1f} %"


def factor(ratio: float) -> str:
    """1.00345 -> 1.0035×, 4.2 -> 4.20×."""
    return f"{ratio:.4f}×" if ratio < 2 else f"{ratio:.2f}×"


def seconds(value: float) -> str:
    """0.00123 -> 1.2 ms."""
    if value < 1:
        return f"{1000 * value:.1f} ms"
    return f"{value:.1f} s"


def times(number: float, noun: str) -> str:
    """(1, "step") -> 1 step, (3, "step") -> 3 steps."""
    return f"{count(number)} {agreeing(number, noun)}"


def agreeing(number: float, noun: str) -> str:
    """(1, "step") -> step, (3, "step") -> steps."""
    return noun if number == 1 else plural(noun)


def plural(noun: str) -> str:
    """Micro-batch -> micro-batches."""
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
