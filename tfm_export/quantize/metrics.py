"""The user's own measure of quality: targets of a development file against its references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfm_export.errors import RequestError
from tfm_export.extras import require
from tfm_export.text_files import read_text, split_lines

References = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A score of targets.

    Attributes:
        name: as it is typed.
        description: for people.
        higher_is_better: or the other way round.
        score: targets and the references of each -> percent.
    """

    name: str
    description: str
    higher_is_better: bool
    score: Callable[[Sequence[str], References], float]

    def loss(self, before: float, after: float) -> float:
        """How many points worse; negative if better."""
        return before - after if self.higher_is_better else after - before


@dataclass(frozen=True)
class Development:
    """Sources and what should come of them.

    Attributes:
        sources: each once.
        references: of each source, one or several.
    """

    sources: list[str]
    references: list[list[str]]


def read_development(path: str | Path, *, limit: int | None = None) -> Development:
    """The lines "source<TAB>reference" of a file; a source on several lines has several references.

    Args:
        path: of the file.
        limit: how many sources to take, from the first on; None for all.

    Raises:
        RequestError: a line has no tab, or more than one, or the file has no lines or is not text in UTF-8.
    """
    references: dict[str, list[str]] = {}
    problems = []
    try:
        for number, line in enumerate(split_lines(read_text(path)), 1):
            source, *targets = line.split("\t")
            if len(targets) != 1:
                problems.append(f"{path}, line {number}: expected source<TAB>reference, found {len(targets)} tabs")
            elif limit is None or source in references or len(references) < limit:
                references.setdefault(source, []).append(targets[0])
    except UnicodeDecodeError as problem:
        raise RequestError(f"{path} is not text in UTF-8: {problem}", "save it in UTF-8") from None
    except OSError as problem:
        raise RequestError(f"{path} cannot be read: {problem.strerror}") from problem
    if problems:
        raise RequestError(problems[:10], "a reference a line, behind its source and a tab")
    if not references:
        raise RequestError(f"{path} has no lines", "lines of source<TAB>reference")
    return Development([*references], [*references.values()])


def exact_match(targets: Sequence[str], references: References) -> float:
    """Percent of targets that equal one of their references."""
    hits = [target in expected for target, expected in zip(targets, references, strict=True)]
    return 100 * sum(hits) / len(hits)


def word_error_rate(targets: Sequence[str], references: References) -> float:
    """Insertions, deletions and substitutions of words per 100 words of the nearest reference."""
    edits = words = 0
    for target, expected in zip(targets, references, strict=True):
        found = target.split()
        distances = [(edit_distance(found, reference.split()), len(reference.split())) for reference in expected]
        distance, length = min(distances, key=lambda pair: pair[0] / max(pair[1], 1))
        edits, words = edits + distance, words + length
    return 100 * edits / max(words, 1)


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """The Levenshtein distance of two sequences of words."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def bleu(targets: Sequence[str], references: References) -> float:
    """BLEU of the whole file, by sacrebleu."""
    score: float = require("sacrebleu", extra="quantize").corpus_bleu(targets, _streams(references)).score
    return score


def chrf(targets: Sequence[str], references: References) -> float:
    """chrF of the whole file, by sacrebleu."""
    score: float = require("sacrebleu", extra="quantize").corpus_chrf(targets, _streams(references)).score
    return score


def _streams(references: References) -> list[list[str | None]]:
    """The first reference of every target, the second one of every target, ...: None where there is none."""
    most = max(map(len, references))
    return [[expected[i] if i < len(expected) else None for expected in references] for i in range(most)]


METRICS = {
    metric.name: metric
    for metric in (
        Metric(name="exact", description="targets equal to a reference, %", higher_is_better=True, score=exact_match),
        Metric(name="wer", description="word errors, %", higher_is_better=False, score=word_error_rate),
        Metric(name="per", description="phone errors, %", higher_is_better=False, score=word_error_rate),
        Metric(name="bleu", description="BLEU", higher_is_better=True, score=bleu),
        Metric(name="chrf", description="chrF", higher_is_better=True, score=chrf),
    )
}
"""By name. wer and per are one formula: a phone is what stands between spaces, as a word is."""
