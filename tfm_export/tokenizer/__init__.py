"""Text to ids and back.

A bundle's tokenizer/tokenizer.json names its kind; each kind is a file of this package, imported when a bundle has it,
with a function `load(state, bundle)` that returns a `Tokenizer`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from tfm_export.bundle import TOKENIZER, Bundle
from tfm_export.errors import BundleError
from tfm_export.json_text import parse_json
from tfm_export.quotation import quote
from tfm_export.tokenizer.languages import AS_IT_IS, Reading, TargetStart

KINDS = {kind: f"tfm_export.tokenizer.{kind}" for kind in ("vocabulary", "pieces", "huggingface")}
FILE = f"{TOKENIZER}/tokenizer.json"


class Tokenizer(Protocol):
    """What a model needs of a tokenizer. Safe to use from several threads."""

    def encode_source(self, text: str, reading: Reading = AS_IT_IS) -> list[int]:
        """The ids of a source text, exactly what the encoder gets: the end token is appended where the model wants it.

        Raises:
            RequestError: the text is empty, or has tokens that the model does not know and cannot stand for; or a
                language is not one of the model's.
        """
        ...

    def split_source(self, text: str, reading: Reading = AS_IT_IS) -> list[str]:
        """The tokens of a source text as they stand in it, known or not: one for each id but the end token's."""
        ...

    def begin_target(self, language: str) -> TargetStart:
        """What tells the decoder to write in a language.

        Raises:
            RequestError: it is not one of the model's.
        """
        ...

    def target_id(self, token: str) -> int | None:
        """The id of a token of targets, special ones included; None if there is no such token."""
        ...

    def encode_target(self, text: str) -> list[int]:
        """The ids of a target text, without start and end token; none for a text without tokens.

        Raises:
            RequestError: the text has tokens that the model does not know and cannot stand for.
        """
        ...

    def decode_target(self, ids: Sequence[int], replacements: Mapping[int, str] | None = None) -> str:
        """The text of a target; padding, start and end tokens are left out.

        Args:
            ids: of the target.
            replacements: what to write instead of the tokens at these places.

        Raises:
            RequestError: an id that is not in the vocabulary.
        """
        ...

    def settled_target(self, ids: Sequence[int]) -> str:
        """The beginning of the text of a target that stands, whatever ids follow.

        Raises:
            RequestError: an id that is not in the vocabulary.
        """
        ...

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each source id, for people to read.

        Raises:
            RequestError: an id that is not in the vocabulary.
        """
        ...

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each target id, for people to read.

        Raises:
            RequestError: an id that is not in the vocabulary.
        """
        ...


def load_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """The tokenizer of a bundle; None if it has none and takes ids only.

    Raises:
        BundleError: the tokenizer is of a kind that this version does not know, or its file is not as it should be.
    """
    if FILE not in bundle.manifest.files:
        return None
    path = bundle.path / FILE
    try:
        state = parse_json((bundle.folder / FILE).read_bytes())
        kind = state["kind"]
    except (ValueError, TypeError, KeyError) as problem:
        raise BundleError(f"{path} does not describe a tokenizer: {problem}", "export the bundle again") from None
    if not isinstance(kind, str) or kind not in KINDS:
        raise BundleError(
            f"{path} is of kind {quote(kind)}; this tfm-export reads {', '.join(KINDS)}", "update tfm-export"
        )
    tokenizer: Tokenizer = importlib.import_module(KINDS[kind]).load(state, bundle)
    return tokenizer
