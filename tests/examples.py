"""examples: how many examples a property test draws, scaled by the Hypothesis profile."""

from hypothesis import settings


def examples(number: int) -> settings:
    """Settings of a test that draws `number` examples in the `long` profile, fewer in others."""
    return settings(max_examples=max(5, number * settings().max_examples // 100))
