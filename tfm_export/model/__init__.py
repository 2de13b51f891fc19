"""A bundle, loaded: text in and text out, or ids in and ids out.

>>> import tfm_export
>>> with tfm_export.load("tfm_bundle") as model:  # doctest: +SKIP
...     print(model.generate("hello").text)
"""

from tfm_export.model.answers import Generation, IdsResult, Pending, Piece, Stream
from tfm_export.model.model import Model, load
from tfm_export.model.requests import LONG_SOURCE, LongSource, Source, TextRequest

__all__ = [
    "LONG_SOURCE",
    "Generation",
    "IdsResult",
    "LongSource",
    "Model",
    "Pending",
    "Piece",
    "Source",
    "Stream",
    "TextRequest",
    "load",
]
