"""Hypothesis profiles: `ci` by default, `pytest --hypothesis-profile=long` to draw more."""

from hypothesis import HealthCheck, Phase, settings

# No deadline: the first example of a test may compile kernels.
settings.register_profile(
    "long",
    deadline=None,
    derandomize=True,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("long"), max_examples=25)
settings.register_profile(
    "fuzz", settings.get_profile("long"), derandomize=False, max_examples=5000
)
settings.register_profile(
    "quick",  # no shrinking, so a failure is reported at once
    settings.get_profile("ci"),
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("ci")
