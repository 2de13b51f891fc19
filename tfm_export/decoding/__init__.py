"""Decoding: greedy, beam search, sampling and constraints, on numpy alone, over any backend's `StepModel`."""

from tfm_export.decoding.checks import check_requests
from tfm_export.decoding.constraints import Constraint, Trie
from tfm_export.decoding.generate import generate, stream
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.request import Request, SettledToken
from tfm_export.decoding.result import Hypothesis, Reason, Result, Statistics
from tfm_export.decoding.scoring import score
from tfm_export.decoding.session import DecodingSession

__all__ = [
    "Constraint",
    "DecodeOptions",
    "DecodingSession",
    "Hypothesis",
    "Reason",
    "Request",
    "Result",
    "SettledToken",
    "Statistics",
    "Trie",
    "check_requests",
    "generate",
    "score",
    "stream",
]
