"""Benchmarks (pytest-benchmark) and the check of the built distributions."""
