"""Whether a bundle gives what transformers gives for the folder that it was made of: texts, or ids, token for token.

Parity says that the graphs compute what our reading of a checkpoint computes. Where the library that trained the model
is installed, its own `generate`, with the folder's own defaults, says whether that reading is right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.decoding import DecodeOptions, generate, score
from tfm_export.errors import RequestError
from tfm_export.model import Model
from tfm_export.progress import Progress
from tfm_export.runtime.step_model import StepModel
from tfm_export.tokenizer import Tokenizer, load_tokenizer
from tfm_export.verify.cpu import cpu_model
from tfm_export.verify.golden import Golden, read_golden, tie_margin
from tfm_export.verify.near_ties import tie_distance
from tfm_export.verify.report import Divergence, GenerationComparison, ParityReport
from tfm_export.verify.transformers_folder import CannotRun, TransformersFolder, is_transformers_folder

MOST_INPUTS, MOST_TOKENS, MOST_SECONDS = 16, 128, 60.0
OF_TOKENIZERS = ("_tokens", "_dictionary", "_subwords", "_split")  # ends of names of settings
MOST_EXAMINED = 3  # generations that are no ties, after which others are no longer examined for being some
HINT = (
    "report this with config.json, generation_config.json and the version of transformers: tfm-export does not read "
    "this folder as transformers does; --ignore-generation leaves out a setting of generation_config.json"
)


@dataclass(frozen=True, kw_only=True)
class TransformersProof:
    """What transformers says of a bundle.

    Attributes:
        version: of transformers; empty where it did not generate.
        comparison: of generations; None where there is none.
        notes: what was not compared, or not as the folder says, and why.
    """

    version: str = ""
    comparison: GenerationComparison | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def proven(self) -> int:
        """On how many inputs both give the same; 0 where some differ."""
        return self.comparison.count if self.comparison is not None and self.comparison.passed else 0

    def joined(self, report: ParityReport) -> ParityReport:
        """A report with this verdict in it."""
        found = [] if self.comparison is None else [self.comparison]
        return replace(report, generations=[*report.generations, *found], notes=[*report.notes, *self.notes])


@dataclass(frozen=True, kw_only=True)
class _Case:
    """An input of both: its text, where texts are compared, and the ids that our side makes of it."""

    index: int
    text: str | None
    ids: list[int]


def prove_with_transformers(
    bundle: Bundle, folder: Path, *, progress: Progress = lambda _: None
) -> TransformersProof | None:
    """Generate with transformers and with a bundle, and compare.

    Args:
        bundle: an open bundle, with golden inputs.
        folder: that it was made of.
        progress: told what begins.

    Returns:
        The verdict; None for a checkpoint that is no folder of transformers.
    """
    if not is_transformers_folder(folder):
        return None
    progress("loading the folder with transformers")
    try:
        theirs = TransformersFolder(folder, bundle.manifest, most_tokens=MOST_TOKENS)
    except CannotRun as problem:
        return TransformersProof(notes=[f"not compared with transformers' own generate: {problem}"])
    notes, tokenizer = theirs.notes, load_tokenizer(bundle)
    if given := [name for name in bundle.manifest.model.get("settings", {}) if name.endswith(OF_TOKENIZERS)]:
        notes.append(f"texts were not compared with transformers, ids were: the tokenizer is as given ({given[0]})")
        tokenizer = None
    if tokenizer is not None:
        try:
            theirs.load_tokenizer()
        except CannotRun as problem:
            notes.append(f"texts were not compared with transformers, ids were: {problem}")
            tokenizer = None
    with cpu_model(bundle, "fp32") as model:
        comparison = _Comparison(bundle, model, tokenizer, theirs)
        return comparison.run(read_golden(bundle, GOLDEN), progress)


class _Comparison:
    """Holds a bundle's generations to those of transformers.

    Args:
        bundle: the bundle.
        model: that decodes it.
        tokenizer: the bundle's; None to compare ids.
        theirs: the same folder in transformers.
    """

    def __init__(
        self, bundle: Bundle, model: StepModel, tokenizer: Tokenizer | None, theirs: TransformersFolder
    ) -> None:
        self._model, self._tokenizer, self._theirs = model, tokenizer, theirs
        self._special, self._limits = bundle.manifest.special_ids, bundle.manifest.limits
        self._margin = tie_margin(bundle.manifest.golden)
        options: dict[str, Any] = {"return_end_token": True}
        if theirs.limit is not None:
            options["max_decoding_length"] = theirs.limit
        if theirs.draws:
            options["sampling_topk"] = 1
        self._options = Model(bundle, model, tokenizer).decode_options(**options)
        self._examined = 0

    def run(self, golden: Sequence[Golden], progress: Progress) -> TransformersProof:
        """Compare as many as there is time for."""
        cases, version, notes = [*self._cases(golden)], self._theirs.version, self._theirs.notes
        results = generate(self._model, [case.ids for case in cases], self._options, self._special)
        differences: list[Divergence | None] = []
        end = time.monotonic() + MOST_SECONDS
        for case, result in zip(cases, results, strict=True):
            if differences and time.monotonic() > end:
                notes.append(
                    f"compared with transformers on {len(differences)} of {len(cases)} inputs, in {MOST_SECONDS:g} s"
                )
                break
            progress(f"generating with transformers {version}, {len(differences) + 1} of {len(cases)}")
            try:
                differences.append(self._difference(case, result.tokens))
            except CannotRun as problem:
                return TransformersProof(notes=[*notes, f"not compared with transformers' own generate: {problem}"])
        found = [difference for difference in differences if difference is not None]
        kind = "ids to ids" if self._tokenizer is None else "text to text"
        comparison = GenerationComparison(
            name=f"transformers {version}, {kind}",
            count=len(differences),
            identical=len(differences) - len(found),
            tie_margin=self._margin,
            ties=[difference for difference in found if difference.margin < self._margin],
            divergences=[difference for difference in found if not difference.margin < self._margin],
            hint=HINT,
        )
        return TransformersProof(version=version, comparison=comparison, notes=notes)

    def _cases(self, golden: Sequence[Golden]) -> Iterator[_Case]:
        """The first golden inputs that both sides take; random ids of a model with a tokenizer as the text they are."""
        for index, one in enumerate(golden[:MOST_INPUTS]):
            # Some models count positions without padding, wherever it stands; a source does not have any.
            ids = [token for token in one.source_ids if token != self._special.for_sources.pad]
            text = one.text
            if self._tokenizer is not None:
                try:
                    text = self._theirs.decode(ids) if text is None else text
                    ids = self._tokenizer.encode_source(text)
                except RequestError:
                    continue  # random ids that are no text
            if 0 < len(ids) <= self._limits.max_source_length:
                yield _Case(index=index, text=None if self._tokenizer is None else text, ids=ids)

    def _difference(self, case: _Case, found: list[int]) -> Divergence | None:
        """The first thing that is different about an input: its ids, the tokens, the text."""
        source = case.ids if case.text is None else self._theirs.encode(case.text)
        if (place := _first_difference(source, case.ids)) is not None:
            pair = _at(source, place), _at(case.ids, place)
            detail = f"as a source it has {pair[0]} at token {place} in transformers, {pair[1]} in the bundle"
            return _divergence(case, place, *pair, detail=detail)
        expected = self._theirs.generate(source)
        if (step := _first_difference(expected, found)) is not None:
            margin = self._distance(case, expected, found, step)
            self._examined += not margin < self._margin
            return _divergence(case, step, _at(expected, step), _at(found, step), margin=margin)
        if case.text is None or self._tokenizer is None:
            return None
        texts = self._theirs.decode(found), self._tokenizer.decode_target(found)
        if texts[0] == texts[1] or self._differs_as_said(found, texts[1]):
            return None
        detail = f"the same tokens are {texts[0]!r} in transformers, {texts[1]!r} in the bundle"
        return _divergence(case, len(found), None, None, detail=detail)

    def _differs_as_said(self, tokens: list[int], text: str) -> bool:
        """Whether a text is theirs but for what bundles do on purpose."""
        assert self._tokenizer is not None, "texts are compared"
        if self._theirs.decode(tokens, clean=False) == text:
            self._note_once(
                "transformers' tokenizer takes spaces before punctuation away (clean_up_tokenization_spaces), the "
                "bundle does not: texts were compared without that"
            )
            return True
        known = [token for token in tokens if self._is_ordinary(token)]
        if len(known) < len(tokens) and self._tokenizer.decode_target(known) == self._theirs.decode(known, clean=False):
            self._note_once(
                "unknown tokens, languages and rows without a token are not shown in texts as transformers shows them: "
                "texts were compared without these"
            )
            return True
        return False

    def _is_ordinary(self, token: int) -> bool:
        """Whether a token is part of texts, by the same name in both."""
        assert self._tokenizer is not None, "texts are compared"
        if token == self._special.unk or self._tokenizer.target_tokens([token]) != self._theirs.names([token]):
            return False
        return self._tokenizer.decode_target([token]) != ""

    def _note_once(self, note: str) -> None:
        if note not in self._theirs.notes:
            self._theirs.notes.append(note)

    def _distance(self, case: _Case, expected: list[int], found: list[int], step: int) -> float:
        """How near the two targets are in the bundle's own log-probabilities, a token."""
        if self._examined >= MOST_EXAMINED or len(expected) > self._limits.max_target_length:
            return math.inf
        options = self._options
        theirs, ours = score(
            self._model, [case.ids] * 2, [expected, found], self._special, options=options, add_end_token=False
        )
        if options.beam_size == 1:
            pair = theirs[step : step + 1], ours[step : step + 1]
            margin = abs(pair[0][0] - pair[1][0]) if all(pair) else math.inf
        else:
            margin = _beam_margin(theirs, ours, options)
        if margin < self._margin:
            return margin
        return tie_distance(self._model, case.ids, options, self._special, expected, most=self._margin)


def _beam_margin(theirs: Sequence[float], ours: Sequence[float], options: DecodeOptions) -> float:
    """Between two hypotheses, a token."""
    length = max(len(theirs), len(ours), 1)
    scores = [math.fsum(one) / max(len(one), 1) ** options.length_penalty for one in (theirs, ours)]
    margin = abs(scores[0] - scores[1]) * length ** (options.length_penalty - 1)
    return math.inf if math.isnan(margin) else margin


def _divergence(
    case: _Case, step: int, expected: int | None, found: int | None, *, margin: float = math.inf, detail: str = ""
) -> Divergence:
    return Divergence(
        index=case.index, text=case.text, step=step, expected=expected, found=found, margin=margin, detail=detail
    )


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip_longest(expected, found)) if a != b), None)


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
