"""Triton kernels and their launchers, one file per op; installed as `engine.kernels`."""
