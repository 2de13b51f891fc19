"""Decoding: greedy, beam search, sampling and constraints, on numpy alone, over any backend's `StepModel`."""

from tfm_export.decoding.engine import generate
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Hypothesis, Reason, Request, Result, SettledToken, Statistics

__all__ = [
    "DecodeOptions",
    "Hypothesis",
    "Reason",
    "Request",
    "Result",
    "SettledToken",
    "Statistics",
    "generate",
]
