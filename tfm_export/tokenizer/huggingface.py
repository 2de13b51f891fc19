"""Tokenizers of Hugging Face's library `tokenizers`: whatever a tokenizer.json of theirs describes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tfm_export.bundle import TOKENIZER, Bundle, SpecialIds
from tfm_export.errors import BundleError, RequestError, TfmExportError
from tfm_export.extras import require
from tfm_export.quotation import quote, shorten
from tfm_export.tokenizer.languages import AS_IT_IS, Languages, Reading, TargetStart
from tfm_export.tokenizer.settled import settled_text

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
        with _told(BundleError, "the tokenizer cannot be used"):
            tokenizer.no_padding()
            tokenizer.no_truncation()
        self._tokenizer, self._special = tokenizer, special
        named = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._languages = Languages(named.items(), special=True)
        self._not_shown = named.keys()
        self._slots = self._languages.ids & {*tokenizer.encode("").ids}  # where a source has the language it is in
        self._escaping: tokenizers.Tokenizer | None = None
        self._settled = settled_text(json.loads(tokenizer.to_str())["decoder"])

    def encode_source(self, text: str, reading: Reading = AS_IT_IS) -> list[int]:
        """The ids of a source text with its special tokens; see `Tokenizer.encode_source`."""
        encoding = self._encode(text, reading)
        if all(encoding.special_tokens_mask):
            raise RequestError("the text is empty")
        ids: list[int] = encoding.ids
        languages, before = self._languages, list[int]()
        if reading.source_language is not None:
            own = languages.id_of(reading.source_language, "source_language")
            if self._slots:
                added = encoding.special_tokens_mask
                ids = [own if of and i in self._slots else i for i, of in zip(ids, added, strict=True)]
            else:
                before.append(own)
        if reading.target_language is not None and languages.in_sources:
            before.append(languages.id_of(reading.target_language, "target_language"))
        return before + ids

    def split_source(self, text: str, reading: Reading = AS_IT_IS) -> list[str]:
        """What each token is in the text; empty for special tokens; see `Tokenizer.split_source`."""
        encoding = self._encode(text, reading)
        added = len(self.encode_source(text, reading)) - len(encoding.ids)
        pieces = [""] * added + [text[start:end] for start, end in encoding.offsets]
        return pieces[:-1] if encoding.ids[-1:] == [self._special.for_sources.eos] else pieces

    def begin_target(self, language: str) -> TargetStart:
        """What tells the decoder to write in a language; see `Tokenizer.begin_target`."""
        wanted = self._languages.id_of(language, "target_language")
        if self._languages.in_sources:
            return TargetStart()
        starts = self._special.bos in self._languages.ids
        return TargetStart(start=wanted) if starts else TargetStart(forced=wanted)

    def target_id(self, token: str) -> int | None:
        """The id of a token; see `Tokenizer.target_id`."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def _reading(self, reading: Reading) -> tokenizers.Tokenizer:
        """Theirs, or the one to which special tokens are text."""
        if not reading.escape:
            return self._tokenizer
        if self._escaping is None:
            self._escaping = without_special_tokens(self._tokenizer)
        return self._escaping

    def encode_target(self, text: str) -> list[int]:
        """The ids of a target text, without special tokens; see `Tokenizer.encode_target`."""
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return ids

    def decode_target(self, ids: Sequence[int], replacements: Mapping[int, str] | None = None) -> str:
        """The text of a target; see `Tokenizer.decode_target`."""
        return self._join(self._shown(ids, replacements or {}))

    def settled_target(self, ids: Sequence[int]) -> str:
        """The text of a target that stands, whatever ids follow; see `Tokenizer.settled_target`."""
        return self._settled.of(self._shown(ids, {}), self._join)

    def _shown(self, ids: Sequence[int], replacements: Mapping[int, str]) -> list[str]:
        """The tokens of a target that are part of its text, or what stands in their places."""
        _refuse_negative(ids)
        names: list[str | None] = [
            replacements.get(place, self._tokenizer.id_to_token(i)) for place, i in enumerate(ids)
        ]
        return [
            name
            for place, name in enumerate(names)
            if name is not None and (place in replacements or name not in self._not_shown)
        ]

    def _join(self, tokens: list[str]) -> str:
        """The text of tokens; some of their decoders fail without any."""
        decoder = self._tokenizer.decoder
        if not tokens or decoder is None:
            return " ".join(tokens)
        with _told(RequestError, "the tokenizer has no text for these tokens"):
            joined: str = decoder.decode(tokens)
        return joined

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each source id."""
        return self._names(ids)

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each target id."""
        return self._names(ids)

    def _encode(self, text: str, reading: Reading = AS_IT_IS, **options: bool) -> Any:
        with _told(RequestError, f"the tokenizer cannot split {quote(text)}"):
            return self._reading(reading).encode(text, **options)

    def _names(self, ids: Sequence[int]) -> list[str]:
        """The token of each id; ids of rows that no token has, as models are padded with, get a made-up name."""
        _refuse_negative(ids)
        names = [self._tokenizer.id_to_token(i) for i in ids]
        return [f"<{i}>" if name is None else name for i, name in zip(ids, names, strict=True)]


def without_special_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same, but for texts that spell special tokens: they have no names there, and only the template adds any."""
    import tokenizers

    state = json.loads(tokenizer.to_str())
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
    unwritten = "\ufffe" + secrets.token_hex(8)  # no text has it, and no list of pieces
    model = state["model"]
    vocabulary = model["vocab"]

    def renamed(token: str) -> str:
        return unwritten + token if token in special else token

    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed(token): i for token, i in vocabulary.items()}
    else:
        model["vocab"] = [[renamed(token), score] for token, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = renamed(model["unk_token"])
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _refuse_negative(ids: Sequence[int]) -> None:
    if wrong := sorted({i for i in ids if i < 0}):
        raise RequestError(f"an id must be at least 0, found {', '.join(map(str, wrong))}")


@contextmanager
def _told(kind: type[TfmExportError], what: str) -> Iterator[None]:
    """Turn what the library raises into an error of ours; its errors are bare exceptions, and some are panics."""
    try:
        yield
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        raise kind(
            f"{what}: {shorten(str(problem), 400)}", "the tokenizer that the model was trained with"
        ) from problem


def load(state: dict[str, Any], bundle: Bundle) -> HuggingFaceTokenizer:  # noqa: ARG001 (every kind's signature)
    """Read the tokenizer beside tokenizer.json.

    Raises:
        BackendUnavailable: the library is missing.
        BundleError: its file is missing or is none of its library, or has ids that the model does not have.
    """
    require("tokenizers", extra="tokenizers")
    import tokenizers

    path = bundle.path / FILE
    with _told(BundleError, f"{path} is no tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_buffer((bundle.folder / FILE).read_bytes())
    dimensions = bundle.manifest.dimensions
    size = min(dimensions.source_vocabulary_size, dimensions.target_vocabulary_size)
    with _told(BundleError, f"{path} has no vocabulary"):
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= size:
        raise BundleError(f"{path} has token id {largest}, the model {size} rows", "export the bundle again")
    return HuggingFaceTokenizer(tokenizer, bundle.manifest.special_ids)
