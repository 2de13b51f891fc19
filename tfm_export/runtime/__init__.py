"""Backends: each gives a `StepModel`, the seam that decoding sees."""
