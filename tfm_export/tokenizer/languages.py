"""Tokens that name languages: which a vocabulary has, and where a model wants them.

Multilingual models are told languages by tokens: NLLB's `fra_Latn`, mBART's `fr_XX`, M2M-100's and fairseq's `__fr__`,
fairseq's `[fr_XX]`, Marian's `>>fra<<`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tfm_export.errors import RequestError

MOST_NAMED = 12
# What is in the brackets is the name of the language.
MARIAN, UNDERSCORES, BRACKETS = r">>([^<>\s]+)<<", r"__([a-z]{2,3}(?:_[A-Za-z]+)?)__", r"\[([a-z]{2,3}_[A-Za-z]{2,4})\]"
PLAIN = r"([a-z]{2,3}_[A-Z][A-Za-z]{1,3})"  # among special tokens only: elsewhere it may be a word


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a source text is to be read.

    Attributes:
        source_language: the language that it is in; None leaves that to the tokenizer.
        target_language: the language to translate it to; None leaves that to the options.
        escape: what spells a special token is text.
    """

    source_language: str | None = None
    target_language: str | None = None
    escape: bool = False


AS_IT_IS = Reading()


@dataclass(frozen=True, kw_only=True)
class TargetStart:
    """What tells a decoder the language of its target; neither, where the source does.

    Attributes:
        forced: the token that the target begins with.
        start: the token that the decoder starts from.
    """

    forced: int | None = None
    start: int | None = None


class Languages:
    """The tokens of a vocabulary that name languages.

    Args:
        tokens: of the vocabulary, with their ids.
        special: they are special tokens, whose names need no marks around them.

    Attributes:
        tokens: those that name languages, with their ids.
        in_sources: it is the source that tells the target's language, as Marian's do.
        behind: a source's language comes behind its end token, and a decoder starts from its target's.
    """

    def __init__(self, tokens: Iterable[tuple[str, int]], *, special: bool = False) -> None:
        forms = re.compile("|".join([MARIAN, UNDERSCORES, BRACKETS, *([PLAIN] if special else [])]))
        found = [(token, i, match) for token, i in tokens if (match := forms.fullmatch(token))]
        self.tokens = {token: i for token, i, _ in found}
        self._names = {next(filter(None, match.groups())): i for _, i, match in found}
        self.in_sources = any(token.startswith(">>") for token in self.tokens)
        self.behind = any(token.startswith("[") for token in self.tokens)

    @property
    def ids(self) -> set[int]:
        """Of all of them."""
        return {*self.tokens.values()}

    @property
    def names(self) -> list[str]:
        """The languages, in the order of the alphabet."""
        return sorted(self._names)

    def id_of(self, language: str, option: str) -> int:
        """The token of a language.

        Args:
            language: its name, such as "fra_Latn", or the token itself, such as ">>fra<<".
            option: what asks for it, for messages.

        Raises:
            RequestError: it is none of them; the nearest are told.
        """
        if not isinstance(language, str):
            raise RequestError(f"{option} must be the name of a language, found {language!r}")
        if (found := self._names.get(language, self.tokens.get(language))) is not None:
            return found
        if not self._names:
            raise RequestError(f"{option} is {language!r}, but the model's vocabulary has no tokens for languages")
        problem = f"{option} {language!r} is none of the model's {len(self._names)} languages"
        raise RequestError(problem, self._near(language))

    def _near(self, language: str) -> str:
        folded = {name.casefold(): name for name in self.names}
        near = difflib.get_close_matches(language.casefold(), folded, MOST_NAMED // 4, 0.5)
        near += [name for name in folded if name.startswith(language.casefold()[:2]) and name not in near]
        told = [folded[name] for name in near] or self.names
        return ", ".join(told[:MOST_NAMED]) + (" ..." if len(told) > MOST_NAMED else "")
