"""Take a trained encoder-decoder Transformer from PyTorch into production.

>>> import tfm_export
>>> model = tfm_export.load("tfm_bundle")
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from tfm_export.errors import (
    BackendUnavailable,
    BuildError,
    BundleError,
    CheckpointError,
    ExportError,
    ModelClosed,
    NumericError,
    Overloaded,
    ParityError,
    RequestError,
    TfmExportError,
)

if TYPE_CHECKING:
    from tfm_export.decoding import DecodeOptions
    from tfm_export.model import Generation, Model, Observer, TextRequest, load

    __version__: str

__all__ = [
    "BackendUnavailable",
    "BuildError",
    "BundleError",
    "CheckpointError",
    "DecodeOptions",
    "ExportError",
    "Generation",
    "Model",
    "ModelClosed",
    "NumericError",
    "Observer",
    "Overloaded",
    "ParityError",
    "RequestError",
    "TextRequest",
    "TfmExportError",
    "__version__",
    "load",
]

# Imported when they are first asked for: the command line's help needs none of them.
_LAZY = {
    "DecodeOptions": "tfm_export.decoding",
    "Generation": "tfm_export.model",
    "Model": "tfm_export.model",
    "Observer": "tfm_export.model",
    "TextRequest": "tfm_export.model",
    "load": "tfm_export.model",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("tfm-export")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
