"""Decoding: greedy, beam search, sampling and constraints, on numpy alone, over any backend's `StepModel`."""

from tfm_export.decoding.constraints import Constraint, Trie
from tfm_export.decoding.generate import generate
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Hypothesis, Reason, Request, Result, SettledToken, Statistics
from tfm_export.decoding.scoring import score
from tfm_export.decoding.stream import stream

__all__ = [
    "Constraint",
    "DecodeOptions",
    "Hypothesis",
    "Reason",
    "Request",
    "Result",
    "SettledToken",
    "Statistics",
    "Trie",
    "generate",
    "score",
    "stream",
]
