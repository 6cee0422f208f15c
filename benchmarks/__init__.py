"""Benchmarks: what Evenstep promises, measured in one run beside what others offer."""
