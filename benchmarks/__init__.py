"""Benchmarks: Evenstep and its peers, measured in one run."""
