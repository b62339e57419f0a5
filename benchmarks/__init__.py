"""Benchmarks: each beside its floor, the least that the same bytes can cost, timed in the same run."""
