"""Metrics against numbers worked out by hand and against sacrebleu; development files."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference_model.evaluate import edit_distance as reference_edit_distance
from tfm_export.errors import RequestError
from tfm_export.quantize.metrics import METRICS, edit_distance, read_development

TARGETS = ["the cat sat on the mat", "a dog", "nothing like it"]
REFERENCES = [["the cat sat on the mat"], ["the dog", "a big dog"], ["something else here now"]]


def test_exact_match_takes_any_reference() -> None:
    assert METRICS["exact"].score(["a", "b", "c"], [["x", "a"], ["c"], ["c"]]) == pytest.approx(200 / 3)


def test_word_errors_are_counted_against_the_nearest_reference() -> None:
    # 0 of 6; "the dog": 1 of 2, "a big dog": 1 of 3, which is nearer; 4 of 4.
    assert METRICS["wer"].score(TARGETS, REFERENCES) == pytest.approx(100 * (0 + 1 + 4) / (6 + 3 + 4))
    assert METRICS["per"].score(TARGETS, REFERENCES) == METRICS["wer"].score(TARGETS, REFERENCES)


@pytest.mark.parametrize(
    ("a", "b"), [("", ""), ("", "abc"), ("abc", ""), ("kitten", "sitting"), ("flaw", "lawn"), ("abab", "baba")]
)
def test_the_edit_distance_is_that_of_the_reference(a: str, b: str) -> None:
    assert edit_distance([*a], [*b]) == reference_edit_distance([ord(c) for c in a], [ord(c) for c in b])


def test_bleu_and_chrf_are_those_of_sacrebleu() -> None:
    from sacrebleu.metrics import BLEU, CHRF

    single = [[r[0]] for r in REFERENCES]
    streams = [[r[0] for r in REFERENCES]]
    assert METRICS["bleu"].score(TARGETS, single) == BLEU().corpus_score(TARGETS, streams).score
    assert METRICS["chrf"].score(TARGETS, single) == CHRF().corpus_score(TARGETS, streams).score
    assert METRICS["bleu"].score(TARGETS, REFERENCES) != METRICS["bleu"].score(TARGETS, single)


@pytest.mark.parametrize("name", METRICS)
def test_worse_targets_lose_points_in_every_metric(name: str) -> None:
    metric = METRICS[name]
    perfect = [r[0] for r in REFERENCES]
    assert metric.loss(metric.score(perfect, REFERENCES), metric.score(TARGETS, REFERENCES)) > 0


def test_a_source_on_several_lines_has_several_references(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("a\tAH\na\tEY\nb\tB IY\nc\tS IY\n", encoding="utf-8")
    found = read_development(tmp_path / "dev.tsv")
    assert (found.sources, found.references) == (["a", "b", "c"], [["AH", "EY"], ["B IY"], ["S IY"]])
    assert read_development(tmp_path / "dev.tsv", limit=2).sources == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no lines"),
        (
            b"a\tb\nno tab\na\tb\tc\n",
            r"line 2: expected source<TAB>reference, found 0 tabs(.|\n)*line 3: .* found 2 tabs",
        ),
        (b"\xff\xfe\tx\n", "is not text in UTF-8"),
    ],
)
def test_a_file_that_is_not_one_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "dev.tsv").write_bytes(content)
    with pytest.raises(RequestError, match=message):
        read_development(tmp_path / "dev.tsv")
