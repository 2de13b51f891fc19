"""Which other answers would make a user's own pairs come out right: a bounded search over what a file leaves open.

Each answer alone is changed first, then two at once. Teacher forcing of a few pairs tells how likely a candidate makes
what is expected; the best ones decode those pairs, and then all of them.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from reference_model import Transformer, TransformerConfig
from tfm_export.bundle import TOKENIZER, Bundle, Limits, Manifest, SpecialIds
from tfm_export.checkpoints import SourceModel
from tfm_export.checkpoints.answers import READ_AGAIN, alternatives, how_to_answer
from tfm_export.checkpoints.key_map import assemble
from tfm_export.checkpoints.settings import SETTINGS
from tfm_export.errors import TfmExportError
from tfm_export.progress import Progress
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.torch_model import TorchModel
from tfm_export.tokenizer import Tokenizer, load_tokenizer
from tfm_export.verify.expectation_file import Expectation, Expectations
from tfm_export.verify.expectations import ReadModel, compare_expectations, expected_log_probs

SAMPLE = 8  # pairs for teacher forcing: half of them such as came out wrong
DECODED = 8  # candidates that decode the sample
CONFIRMED = 3  # candidates that decode all pairs
SECONDS = 60.0  # for teacher forcing: a large model is not searched to the end
WORTH = 0.95  # a second change must make expected tokens so much less unlikely, in log-probability
CONFIG = tuple(f.name for f in fields(TransformerConfig))

Changes = dict[str, Any]
Reread = Callable[[Mapping[str, Any]], SourceModel]


@dataclass(frozen=True, kw_only=True)
class OtherAnswers:
    """Answers that were tried instead of those given.

    Attributes:
        changes: the settings that were changed, with their other values.
        right: how many of the pairs come out as expected with them.
        log_prob: of an expected token, on average over the sample.
    """

    changes: Changes
    right: int
    log_prob: float

    def to_type(self) -> str:
        """The options that give these answers."""
        return " ".join(how_to_answer(name, self.changes[name]) for name in SETTINGS if name in self.changes)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: the answers that were confirmed by decoding all pairs, the best first.
        tried: how many candidates there were, the given answers excepted.
        log_prob: of an expected token as the checkpoint is read, on average over the sample.
        finished: no time limit cut the search short.
    """

    best: list[OtherAnswers]
    tried: int
    log_prob: float
    finished: bool


class Readings:
    """Readings of one checkpoint with other answers than those given.

    Args:
        source: the checkpoint as it was read.
        limits: the longest sequences that are decoded; by default those of the model.
        model: what computes it where it is no reference model, but an adapter's graphs: only ids can be changed then.
        reread: reads the checkpoint again with other settings.
    """

    def __init__(
        self,
        source: SourceModel,
        *,
        limits: Limits | None = None,
        model: StepModel | None = None,
        reread: Reread | None = None,
    ) -> None:
        self.source, self._limits, self._model, self._reread = source, limits, model, reread
        self._models: dict[str, StepModel | None] = {}
        self._tokenizers: dict[tuple[int, SpecialIds], Tokenizer | None] = {}
        self.given = self._read(source, source.special_ids, model or self._torch(source.model))

    def read(self, changes: Changes) -> ReadModel | None:
        """The checkpoint read with some answers changed; None if that is no model."""
        if any(name in READ_AGAIN for name in changes):
            return None if self._reread is None else self.read_again(changes)
        special = {name: value for name, value in changes.items() if name not in CONFIG}
        config = {name: value for name, value in changes.items() if name in CONFIG}
        ids = replace(self.source.special_ids, **special)
        if not config:
            return self._read(self.source, ids, self.given.model)
        key = repr(config)
        model = self._models[key] if key in self._models else self._configured(config)
        if len(config) == 1:  # comes again beside every other change
            self._models[key] = model
        return None if model is None else self._read(self.source, ids, model)

    def read_again(self, changes: Changes) -> ReadModel | None:
        """The same as if the user had typed it; None where the file does not allow it."""
        if self._reread is None:
            return self.read(changes)
        try:
            source = self._reread({**self.source.settings, **changes})
        except TfmExportError:  # the reader says that these answers do not fit the file
            return None
        return self._read(source, source.special_ids, self._model or self._torch(source.model))

    def _configured(self, changes: Changes) -> StepModel | None:
        """The same weights under another configuration; None where there is none, or they are not its weights."""
        given = self.source.model
        if not isinstance(given, Transformer):
            return None
        try:
            return self._torch(assemble(replace(given.config, **changes), given.state_dict()))
        except (ValueError, RuntimeError):
            return None

    def _torch(self, model: Any) -> StepModel:
        assert isinstance(model, Transformer), "an adapter decodes by its graphs"
        whole, limits = TorchModel(model), self._limits
        if limits is None:
            return whole
        # Tables of positions with their roles exchanged may be shorter than what is promised.
        whole.limits = Limits(
            max_source_length=min(limits.max_source_length, whole.limits.max_source_length),
            max_target_length=min(limits.max_target_length, whole.limits.max_target_length),
        )
        return whole

    def _read(self, source: SourceModel, special: SpecialIds, model: StepModel) -> ReadModel:
        key = (id(source), special)
        if key not in self._tokenizers:
            self._tokenizers[key] = source_tokenizer(source, special, model)
        return ReadModel(
            model=model, tokenizer=self._tokenizers[key], special=special, defaults=source.generation.options
        )


def source_tokenizer(source: SourceModel, special: SpecialIds, model: StepModel) -> Tokenizer | None:
    """A checkpoint's tokenizer, before it has a bundle; None if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / TOKENIZER).mkdir()
        for name, content in source.tokenizer.items():
            (path / TOKENIZER / name).write_bytes(content)
        manifest = Manifest(
            dimensions=model.dimensions, limits=model.limits, special_ids=special, generation=source.generation
        )
        bundle = Bundle(path, manifest)
        bundle.add_files({f"{TOKENIZER}/{name}": "" for name in source.tokenizer})
        return load_tokenizer(bundle)


def search_answers(
    readings: Readings, expectations: Expectations, wrong: Sequence[int], *, limit: float, progress: Progress
) -> SearchResult:
    """Look for answers with which pairs come out right.

    Args:
        readings: of the checkpoint.
        expectations: the pairs.
        wrong: the lines of the pairs that come out wrong.
        limit: how far rounding may take the log-probability of a token.
        progress: told what begins.
    """
    sample = replace(expectations, pairs=_sample(expectations.pairs, {*wrong}))
    search = _Search(readings, sample, limit)
    progress("trying other answers, one at a time")
    given = search.evaluate({})
    singles = [c for changes in _singles(readings.source) if (c := search.evaluate(changes))]
    right = search.right(singles)
    progress("trying other answers, two at a time")
    # Where one change will do, another beside it may be better still: two readings can give the same tokens.
    both = [c for changes in _pairs(singles, right) if (c := search.evaluate(changes))]
    found = right + [c for c in search.right(both) if not any(_suffices(one, c) for one in right)]
    nearest = sorted([*singles, *both], key=lambda c: -c.rank)
    best = []
    for candidate in sorted(found, key=lambda c: -c.rank)[:CONFIRMED] or nearest[:1]:
        if (read := readings.read_again(candidate.changes)) is not None:
            answers = OtherAnswers(changes=candidate.changes, right=0, log_prob=candidate.log_prob)
            progress(f"decoding your pairs with {answers.to_type()}")
            compared = compare_expectations(read, expectations, limit=limit)
            best.append(replace(answers, right=compared.count - len(compared.mismatches)))
    return SearchResult(
        best=sorted(best, key=lambda answers: -answers.right),  # of equals, the likelier one stays first
        tried=search.tried - 1,
        log_prob=-math.inf if given is None else given.log_prob,
        finished=search.finished,
    )


@dataclass(frozen=True)
class _Candidate:
    """Other answers, by teacher forcing.

    Attributes:
        changes: the settings with their other values.
        log_prob: of an expected token of the sample, on average.
        rank: the higher, the more likely it is the model: how near it comes to log-probabilities that are given, else
            how likely it makes what is expected.
    """

    changes: Changes
    log_prob: float
    rank: float


class _Search:
    """Evaluates candidates, each once, as long as there is time."""

    def __init__(self, readings: Readings, sample: Expectations, limit: float) -> None:
        self.tried, self.finished = 0, True
        self._readings, self._sample, self._limit = readings, sample, limit
        self._seen: set[object] = set()
        self._end = time.perf_counter() + SECONDS

    def evaluate(self, changes: Changes) -> _Candidate | None:
        """How good it is; None if it is no model, cannot read the pairs, or computes what another one does."""
        if time.perf_counter() > self._end:
            self.finished = False
            return None
        read, pairs = self._readings.read(changes), self._sample.pairs
        if read is None or (key := _key(read, pairs, changes)) is None or key in self._seen:
            return None
        self._seen.add(key)
        self.tried += 1
        try:
            found = expected_log_probs(read, pairs)
        except TfmExportError:  # such as numbers that are not finite
            return None
        rows = [row for row in found if row is not None]
        if len(rows) < len(pairs):
            return None
        log_prob = sum(map(sum, rows)) / max(sum(map(len, rows)), 1)
        errors = [error for pair, row in zip(pairs, rows, strict=True) if (error := _error(pair, row)) is not None]
        return _Candidate(changes, log_prob, -max(errors) if errors else log_prob)

    def right(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Of the best candidates, those that decode the whole sample as expected."""
        best = sorted(candidates, key=lambda c: -c.rank)[:DECODED]
        return [c for c in best if self._is_right(c)]

    def _is_right(self, candidate: _Candidate) -> bool:
        read = self._readings.read(candidate.changes)
        assert read is not None
        try:
            return not compare_expectations(read, self._sample, limit=self._limit).mismatches
        except TfmExportError:
            return False


def _sample(pairs: Sequence[Expectation], wrong: set[int]) -> list[Expectation]:
    """A few pairs that come out wrong, and a few that do not, from all over the file."""
    groups = [[p for p in pairs if (p.number in wrong) == kind] for kind in (True, False)]
    taken = [_spread(group, SAMPLE // 2) for group in groups]
    return [*taken[0], *taken[1]] if all(taken) else _spread(groups[0] or groups[1], SAMPLE)


def _spread(pairs: Sequence[Expectation], count: int) -> list[Expectation]:
    return [pairs[i * len(pairs) // count] for i in range(count)] if len(pairs) > count else [*pairs]


def _singles(source: SourceModel) -> Iterator[Changes]:
    """Each answer with each other value."""
    for name, answer in source.answers.items():
        for value in alternatives(name, answer, source.model.config, source.special_ids):
            yield {name: value}


def _pairs(singles: Sequence[_Candidate], right: Sequence[_Candidate]) -> Iterator[Changes]:
    """Two changes at once, the more promising ones first; where some alone will do, only with one of those."""
    ranked = sorted(singles, key=lambda c: -c.rank)
    for one, other in sorted(combinations(range(len(ranked)), 2), key=sum):
        changes = {**ranked[one].changes, **ranked[other].changes}
        promising = not right or ranked[one] in right or ranked[other] in right
        if promising and len(changes) == 2 and not any(name in READ_AGAIN for name in changes):
            yield changes


def _suffices(one: _Candidate, more: _Candidate) -> bool:
    """Whether a change that another candidate adds to one that is right makes hardly anything better."""
    return one.changes.items() <= more.changes.items() and more.log_prob < one.log_prob * WORTH


def _key(read: ReadModel, pairs: Sequence[Expectation], changes: Changes) -> object:
    """What a candidate computes on the sample; None if it cannot read it."""
    try:
        ids = [(tuple(read.source(pair)), tuple(read.target(pair))) for pair in pairs]
    except TfmExportError:
        return None
    arithmetic = {name: value for name, value in changes.items() if name in (*CONFIG, "weights", "keys")}
    return repr((sorted(arithmetic.items()), ids, read.special.bos, read.special.eos))


def _error(pair: Expectation, found: Sequence[float]) -> float | None:
    """How far log-probabilities are from those of a pair, if it has some: a token's."""
    if pair.total is not None:
        return abs(sum(found) - pair.total) / max(len(found), 1)
    return max((abs(a - b) for a, b in zip(pair.log_probs, found, strict=False)), default=None)
