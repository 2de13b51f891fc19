"""Error rates: the edit distance, what counts as right, and the command."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference_model import Checkpoint, SpecialIds, load_checkpoint, save_checkpoint
from reference_model.data import encode_source
from reference_model.evaluate import Example, edit_distance, evaluate, main, nearest, read_examples, table
from reference_model.search import Hypothesis, beam, greedy

SHORT = st.lists(st.integers(0, 3), max_size=6)


@settings(deadline=None)
@given(SHORT, SHORT)
def test_edit_distance_is_the_recursive_definition(a: list[int], b: list[int]) -> None:
    @cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    assert edit_distance(a, b) == distance(len(a), len(b))


def test_the_nearest_target_counts() -> None:
    assert nearest([1, 2, 3], [[9, 9, 9, 9], [1, 2], [1, 2, 3, 4]]) == (1, 2)
    assert nearest([1, 2, 3], [[9], [1, 2, 3]]) == (0, 3)
    assert nearest([], [[4, 5]]) == (2, 2)


def test_error_rates_by_hand() -> None:
    """Outputs 5 / 5 6 / nothing: one right, one with 1 edit in 3 tokens, one with 2 edits in 2."""
    outputs = {(7, 2): [5], (8, 8, 2): [5, 6], (9, 2): []}
    examples = [
        Example(source=[8, 8, 2], targets=[[5, 6, 6]]),
        Example(source=[7, 2], targets=[[4], [5]]),
        Example(source=[9, 2], targets=[[4, 4]]),
    ]
    batch_sizes = []

    def search(source_ids: Tensor, source_mask: Tensor) -> list[Hypothesis]:
        batch_sizes.append(len(source_ids))
        rows = zip(source_ids, source_mask, strict=True)
        return [Hypothesis(outputs[tuple(ids[mask].tolist())], 0.0, [], True) for ids, mask in rows]

    score = evaluate("greedy", search, examples, SpecialIds(), batch_size=2)
    assert batch_sizes == [2, 1]
    assert score.sources == 3
    assert score.exact_match_error == pytest.approx(2 / 3)
    assert score.token_error_rate == pytest.approx((0 + 1 + 2) / (1 + 3 + 2))
    assert "66.67%" in table([score])
    assert "50.00%" in table([score])


WORDS = ["hello", "Parity", "a", "don't", "transformer", "zebra"]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return load_checkpoint(tiny_checkpoint)


def outputs_of(checkpoint: Checkpoint, word: str) -> tuple[str, str]:
    """The model's greedy and beam-3 output for a word, decoded alone."""
    assert checkpoint.source_vocabulary is not None
    assert checkpoint.target_vocabulary is not None
    ids = torch.tensor([encode_source(word, checkpoint.source_vocabulary, checkpoint.special_ids)])
    length = checkpoint.generation.max_length
    mask = torch.ones_like(ids, dtype=torch.bool)
    best = greedy(checkpoint.model, ids, mask, checkpoint.special_ids, length)[0]
    likeliest = beam(checkpoint.model, ids[0], checkpoint.special_ids, length, 3)[0]
    return checkpoint.target_vocabulary.decode(best.tokens), checkpoint.target_vocabulary.decode(likeliest.tokens)


def test_the_command_counts_words_once_and_any_target_as_right(
    checkpoint: Checkpoint, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = []
    for i, word in enumerate(WORDS):
        lines.append(f"{word}\tp1 p1")
        if i:  # the first word has no right target
            lines += [f"{word}\t{output}" for output in dict.fromkeys(outputs_of(checkpoint, word))]
    (tmp_path / "test.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    main([str(tiny_checkpoint), "--test", str(tmp_path / "test.tsv"), "--beam-size", "3", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert [(s["method"], s["sources"]) for s in scores] == [("greedy", 6), ("beam 3", 6)]
    for score in scores:
        assert score["exact_match_error"] == pytest.approx(1 / 6)
        assert score["token_error_rate"] > 0
    main([str(tiny_checkpoint), "--test", str(tmp_path / "test.tsv"), "--beam-size", "1", "--limit", "1"])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["method", "sources"]
    assert row.split()[:3] == ["greedy", "1", "100.00%"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("hello p1\n", "line 1: expected source<TAB>target"), ("h3llo\tp1\n", "'3'"), ("a\tq\n", "'q'")],
)
def test_a_test_file_that_does_not_fit_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "test.tsv").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        main([str(tiny_checkpoint), "--test", str(tmp_path / "test.tsv")])


def test_files_that_are_not_there_or_no_checkpoints_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none\.tsv"):
        main([str(tiny_checkpoint), "--test", str(tmp_path / "none.tsv")])
    with pytest.raises(SystemExit, match=r"none\.pt"):
        main([str(tmp_path / "none.pt"), "--test", str(tmp_path / "none.tsv")])
    (tmp_path / "text.pt").write_text("not a checkpoint", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"text\.pt"):
        main([str(tmp_path / "text.pt"), "--test", str(tmp_path / "none.tsv")])


def test_a_model_without_vocabularies_cannot_be_evaluated(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bare = Checkpoint(
        model=checkpoint.model,
        source_vocabulary=None,
        target_vocabulary=None,
        special_ids=checkpoint.special_ids,
        generation=checkpoint.generation,
    )
    save_checkpoint(bare, tmp_path / "bare.pt")
    with pytest.raises(ValueError, match="no vocabularies"):
        read_examples(tmp_path / "any.tsv", load_checkpoint(tmp_path / "bare.pt"))


def test_sizes_below_one_are_refused(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tiny_checkpoint), "--test", "x", "--beam-size", "0"])
    assert "--beam-size must be at least 1, found 0" in capsys.readouterr().err
