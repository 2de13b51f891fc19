"""A bundle, loaded: text in and text out, or ids in and ids out."""

from tfm_export.model.answers import Generation, Pending, Piece, Stream
from tfm_export.model.load import load
from tfm_export.model.model import Model
from tfm_export.model.requests import LONG_SOURCE, LongSource, Source, TextRequest

__all__ = [
    "LONG_SOURCE",
    "Generation",
    "LongSource",
    "Model",
    "Pending",
    "Piece",
    "Source",
    "Stream",
    "TextRequest",
    "load",
]
