"""Tokenizers of Hugging Face's library `tokenizers`: whatever a tokenizer.json of theirs describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfm_export.bundle import TOKENIZER, Bundle, SpecialIds
from tfm_export.errors import BundleError, RequestError
from tfm_export.extras import require

if TYPE_CHECKING:
    import tokenizers

FILE = f"{TOKENIZER}/huggingface.json"


class HuggingFaceTokenizer:
    """A `Tokenizer` of one of theirs, for both sides.

    Args:
        tokenizer: theirs; its post-processor puts the special tokens of sources where they belong.
        special: the ids that are left out of texts.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: SpecialIds) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self._special = tokenizer, special

    def encode_source(self, text: str) -> list[int]:
        """The ids of a source text with its special tokens; see `Tokenizer.encode_source`."""
        encoding = self._tokenizer.encode(text)
        if all(encoding.special_tokens_mask):
            raise RequestError("the text is empty")
        ids: list[int] = encoding.ids
        return ids

    def split_source(self, text: str) -> list[str]:
        """What each token is in the text; empty for special tokens; see `Tokenizer.split_source`."""
        encoding = self._tokenizer.encode(text)
        pieces = [text[start:end] for start, end in encoding.offsets]
        return pieces[:-1] if encoding.ids[-1:] == [self._special.for_sources.eos] else pieces

    def encode_target(self, text: str) -> list[int]:
        """The ids of a target text, without special tokens; see `Tokenizer.encode_target`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode_target(self, ids: Sequence[int], replacements: Mapping[int, str] | None = None) -> str:
        """The text of a target; see `Tokenizer.decode_target`."""
        names = self._names(ids)
        if not replacements:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
            return text
        special = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        kept = [replacements.get(i, name) for i, name in enumerate(names) if i in replacements or name not in special]
        decoder = self._tokenizer.decoder
        joined: str = " ".join(kept) if decoder is None else decoder.decode(kept)
        return joined

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each source id."""
        return self._names(ids)

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each target id."""
        return self._names(ids)

    def _names(self, ids: Sequence[int]) -> list[str]:
        """The token of each id; ids of rows that no token has, as models are padded with, get a made-up name."""
        if wrong := sorted({i for i in ids if i < 0}):
            raise RequestError(f"an id must be at least 0, found {', '.join(map(str, wrong))}")
        names = [self._tokenizer.id_to_token(i) for i in ids]
        return [f"<{i}>" if name is None else name for i, name in zip(ids, names, strict=True)]


def load(state: dict[str, Any], bundle: Bundle) -> HuggingFaceTokenizer:  # noqa: ARG001 (every kind's signature)
    """Read the tokenizer beside tokenizer.json.

    Raises:
        BackendUnavailable: the library is missing.
        BundleError: its file is missing or is none of its library, or has ids that the model does not have.
    """
    require("tokenizers", extra="tokenizers")
    import tokenizers

    path = bundle.path / FILE
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # their errors are bare exceptions
        raise BundleError(f"{path} is no tokenizer: {problem}", "export the bundle again") from problem
    dimensions = bundle.manifest.dimensions
    size = min(dimensions.source_vocabulary_size, dimensions.target_vocabulary_size)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= size:
        raise BundleError(f"{path} has token id {largest}, the model {size} rows", "export the bundle again")
    return HuggingFaceTokenizer(tokenizer, bundle.manifest.special_ids)
