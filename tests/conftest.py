"""Hypothesis profiles: `ci` by default, `pytest --hypothesis-profile=fuzz` to search longer."""

from hypothesis import HealthCheck, Phase, settings

# No deadline: the first example of a test may compile kernels.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=5000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "quick",  # no shrinking, so a failure is reported at once
    settings.get_profile("ci"),
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("ci")
