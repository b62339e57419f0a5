"""Benchmarks beside published packages of others, each side in an environment of its own."""
