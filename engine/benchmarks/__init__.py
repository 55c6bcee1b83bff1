"""Evaluations: the official benchmarks, the controlled scenes, their baselines, tables and charts."""
