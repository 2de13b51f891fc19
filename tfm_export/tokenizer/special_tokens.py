"""The tokens of special ids: which ids a vocabulary's own tokens tell, and where an id looks wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tfm_export.bundle import SpecialIds
from tfm_export.errors import RequestError
from tfm_export.tokenizer import Tokenizer

# What vocabularies call them, in lower case.
NAMES = {
    "pad": ("<pad>", "<blank>", "[pad]"),
    "bos": ("<s>", "<bos>", "<sos>", "<go>", "<start>", "[bos]", "[start]"),
    "eos": ("</s>", "<eos>", "<stop>", "<end>", "[eos]", "[end]"),
    "unk": ("<unk>", "[unk]"),
}
# Decoders of fairseq and BART start from the end token, those of T5 and Marian from padding; GPT-2 pads with its end.
ALSO = {"bos": ("eos", "pad"), "pad": ("eos",)}
# Words that stand for special tokens without brackets.
PLAIN = ("pad", "blank", "bos", "sos", "go", "start", "eos", "stop", "end", "unk", "unknown", "oov", "none", "null")


def told_id(tokens: Sequence[str], role: str) -> int | None:
    """The id of the only token that is called so; None if there is none, or several.

    Args:
        tokens: of a vocabulary, in the order of their ids.
        role: "pad", "bos", "eos" or "unk".
    """
    found = [i for i, token in enumerate(tokens) if token.lower() in NAMES[role]]
    return found[0] if len(found) == 1 else None


def is_marked(token: str) -> bool:
    """Whether a token is spelled as special ones are, such as <2fr>, [MASK] and __en__."""
    return len(token) > 2 and (token[0], token[-1]) in {("<", ">"), ("[", "]"), ("_", "_")}


def is_doubtful(token: str, role: str) -> bool:
    """Whether a token is a letter, a number or a word, or is called as another special token is."""
    called = {other for other, names in NAMES.items() if token.lower() in names}
    if called:
        return not called & {role, *ALSO.get(role, ())}
    bare = token.strip("_▁ ")
    return bare == token and bare.isalnum() and bare.lower() not in PLAIN


@dataclass(frozen=True, kw_only=True)
class NamedSpecialIds:
    """Special ids with their tokens.

    Attributes:
        ids: of both sides.
        tokens: of "source" and "target", by id; nothing for what has no tokens.
    """

    ids: SpecialIds
    tokens: Mapping[str, Mapping[int, str]] = field(default_factory=lambda: {"source": {}, "target": {}})

    def of(self, side: str) -> dict[str, tuple[int | None, str | None]]:
        """Each special id of "source" or "target", by its role, with its token."""
        ids = self.ids.for_sources if side == "source" else self.ids
        found: dict[str, int | None] = {role: getattr(ids, role) for role in NAMES}
        return {role: (i, None if i is None else self.tokens[side].get(i)) for role, i in found.items()}

    def doubts(self) -> Iterator[str]:
        """What looks wrong, each with the option that says otherwise."""
        for side, prefix in (("source", "--source-"), ("target", "--")):
            rows = self.of(side)
            for role, (i, token) in rows.items():
                same = [other for other, (j, _) in rows.items() if i is not None and j == i and other != role]
                say = f"{prefix}{role} gives another"
                if side == "target" and role == "unk":
                    say += ", --source-unk alone one for sources only"
                if token is not None and is_doubtful(token, role):
                    yield f"is {token!r} the {side}'s {role}, id {i}? {say}"
                elif role == "unk" and same:
                    yield f"is id {i} the {side}'s {' and '.join([*same, role])}? {say}"

    def rows(self) -> list[list[str]]:
        """A table of them, which tells what is added to sources."""
        added = {"bos": self.ids.source_starts_with_bos, "eos": self.ids.source_ends_with_eos}
        said = {role: ", added" if yes else ", not added" for role, yes in added.items()}
        cells = {
            side: {
                role: "none" if i is None else str(i) if token is None else f"{i} {token!r}"
                for role, (i, token) in self.of(side).items()
            }
            for side in ("source", "target")
        }
        rows = ([role, cells["source"][role] + said.get(role, ""), cells["target"][role]] for role in NAMES)
        return [["special ids", "of sources", "of targets"], *rows]


def tokens_of(ids: SpecialIds, tokenizer: Tokenizer) -> NamedSpecialIds:
    """Special ids with the tokens that a tokenizer has for them."""
    sides = {"source": (ids.for_sources, tokenizer.source_tokens), "target": (ids, tokenizer.target_tokens)}
    tokens: dict[str, dict[int, str]] = {side: {} for side in sides}
    for side, (of_side, name) in sides.items():
        for i in {getattr(of_side, role) for role in NAMES} - {None}:
            # A start or end token that sources do not have may lie outside of their vocabulary.
            with suppress(RequestError):
                tokens[side][i] = name([i])[0]
    return NamedSpecialIds(ids=ids, tokens=tokens)
