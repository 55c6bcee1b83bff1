"""Tests; `tests.tolerances` is what they share."""
