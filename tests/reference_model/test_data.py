"""Reading pairs and making batches of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_model import SpecialIds, Vocabulary
from reference_model.data import Batch, Pair, batches, encode_pairs, encode_source, make_batch, pad, read_pairs

SPECIAL = SpecialIds()
SYMBOLS = st.lists(st.integers(3, 9), max_size=12)
PAIRS = st.lists(
    st.tuples(SYMBOLS, SYMBOLS).map(lambda p: ([*p[0], SPECIAL.eos], [SPECIAL.bos, *p[1], SPECIAL.eos])), max_size=40
)


def unpadded(batch: Batch) -> list[Pair]:
    """The pairs of a batch."""
    pairs = []
    rows = zip(batch.source_ids, batch.source_mask, batch.target_ids.tolist(), batch.labels.tolist(), strict=True)
    for source, mask, target, labels in rows:
        length = labels.index(SPECIAL.eos) + 1
        assert not any(labels[length:])
        assert not any(target[length:])
        assert labels[: length - 1] == target[1:length]
        assert not source[~mask].any()
        pairs.append((source[mask].tolist(), [*target[:length], SPECIAL.eos]))
    return pairs


def counted(pairs: list[Pair]) -> Counter[tuple[tuple[int, ...], ...]]:
    return Counter((tuple(source), tuple(target)) for source, target in pairs)


@settings(deadline=None)
@given(PAIRS, st.integers(1, 100), st.none() | st.integers(0, 5))
def test_every_pair_is_in_one_batch_and_no_batch_is_too_large(
    pairs: list[Pair], batch_tokens: int, seed: int | None
) -> None:
    made = [unpadded(batch) for batch in batches(pairs, SPECIAL, batch_tokens, seed)]
    assert counted([pair for batch in made for pair in batch]) == counted(pairs)
    for batch in made:
        longest = max(len(source) + len(target) - 1 for source, target in batch)
        assert len(batch) == 1 or len(batch) * longest <= batch_tokens


@settings(deadline=None)
@given(PAIRS, st.integers(1, 100))
def test_batches_are_those_of_their_seed(pairs: list[Pair], batch_tokens: int) -> None:
    first, again = ([unpadded(b) for b in batches(pairs, SPECIAL, batch_tokens, seed=3)] for _ in range(2))
    assert first == again


def test_seeds_change_who_shares_a_batch_and_the_order() -> None:
    pairs = [([s, SPECIAL.eos], [SPECIAL.bos, t, SPECIAL.eos]) for s in range(3, 9) for t in range(3, 9)]
    first, second = ([unpadded(b) for b in batches(pairs, SPECIAL, 16, seed)] for seed in (0, 1))
    assert {str(sorted(batch)) for batch in first} != {str(sorted(batch)) for batch in second}
    mixed = [([3] * n, [1, 4, 2]) for n in range(1, 30)]
    lengths = [batch.source_ids.size(1) for batch in batches(mixed, SPECIAL, 40, seed=0)]
    assert lengths != sorted(lengths)
    lengths = [batch.source_ids.size(1) for batch in batches(mixed, SPECIAL, 40, seed=None)]
    assert lengths == sorted(lengths)


def test_little_is_padding() -> None:
    pairs: list[Pair] = [([3] * (i % 20 + 1), [1] + [4] * (i % 20 + i % 3) + [2]) for i in range(4000)]
    total = sum(len(s) + len(t) - 1 for s, t in pairs)
    padded = sum(b.source_ids.numel() + b.target_ids.numel() for b in batches(pairs, SPECIAL, 1024, seed=0))
    assert padded < 1.1 * total


def test_a_batch_by_hand() -> None:
    batch = make_batch([([5, 2], [1, 7, 8, 2]), ([6, 4, 2], [1, 2])], SPECIAL)
    assert batch.source_ids.tolist() == [[5, 2, 0], [6, 4, 2]]
    assert batch.source_mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.target_ids.tolist() == [[1, 7, 8], [1, 0, 0]]
    assert batch.labels.tolist() == [[7, 8, 2], [2, 0, 0]]
    assert pad([[], []], 0).dtype == torch.long


def test_ids_of_texts() -> None:
    source, target = Vocabulary(("<pad>", "<s>", "</s>", "a"), "characters"), Vocabulary(tuple("psex"), "characters")
    assert encode_pairs([("aa", "x")], source, target, SPECIAL) == [([3, 3, 2], [1, 3, 2])]
    assert encode_source("a", source, SpecialIds(source_ends_with_eos=False)) == [3]


def test_pairs_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.tsv", tmp_path / "bad.tsv"
    good.write_text("a\tAH\nça\tS AH\n", encoding="utf-8")
    assert read_pairs(good) == [("a", "AH"), ("ça", "S AH")]
    bad.write_text("a\tAH\nb\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad.tsv, line 2: expected source<TAB>target, found 1 column"):
        read_pairs(bad)
