"""A bundle, loaded: text in and text out, or ids in and ids out."""

from tfm_export.model.answers import AsyncStream, Generation, Pending, Piece, Stream
from tfm_export.model.load import load
from tfm_export.model.model import Model
from tfm_export.model.observer import Observer, Report
from tfm_export.model.requests import LONG_SOURCE, LongSource, Source, TextRequest

__all__ = [
    "LONG_SOURCE",
    "AsyncStream",
    "Generation",
    "LongSource",
    "Model",
    "Observer",
    "Pending",
    "Piece",
    "Report",
    "Source",
    "Stream",
    "TextRequest",
    "load",
]
