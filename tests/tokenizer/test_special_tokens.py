"""Special ids with their tokens: what a vocabulary's own tokens tell, and what looks wrong."""

from __future__ import annotations

import pytest

from tfm_export.bundle import SourceIds, SpecialIds
from tfm_export.tokenizer.special_tokens import NamedSpecialIds, is_doubtful, told_id


def test_a_token_tells_its_id_if_it_is_the_only_one() -> None:
    tokens = ["<blank>", "<S>", "</s>", "a", "<unk>"]
    assert [told_id(tokens, role) for role in ("pad", "bos", "eos", "unk")] == [0, 1, 2, 4]
    assert told_id([*tokens, "<pad>"], "pad") is None
    assert told_id(["a"], "bos") is None


@pytest.mark.parametrize(
    ("token", "role", "doubtful"),
    [
        ("<unk>", "bos", True),
        ("<s>", "unk", True),
        ("<s>", "eos", True),
        ("</s>", "bos", False),  # of fairseq
        ("<pad>", "bos", False),  # of T5
        ("</s>", "pad", False),  # of Marian
        ("</s>", "unk", True),
        ("a", "eos", True),
        ("7", "unk", True),
        ("word", "pad", True),
        ("\u00e9", "eos", True),
        ("\t", "bos", False),
        ("$", "eos", False),
        ("<32>", "bos", False),
        ("__start__", "bos", False),
        ("STOP", "eos", False),
        ("<extra_id_0>", "bos", False),
    ],
)
def test_tokens_that_look_wrong(token: str, role: str, doubtful: bool) -> None:
    assert is_doubtful(token, role) == doubtful


def test_the_table_and_what_is_asked() -> None:
    ids = SpecialIds(
        pad=0,
        bos=1,
        eos=2,
        unk=1,
        source_starts_with_bos=True,
        source_ends_with_eos=False,
        source=SourceIds(pad=0, bos=3, eos=None, unk=3),
    )
    tokens = {"source": {0: "<pad>", 3: "a"}, "target": {0: "<blank>", 1: "<go>"}}
    found = NamedSpecialIds(ids=ids, tokens=tokens)
    assert found.rows()[1:] == [
        ["pad", "0 '<pad>'", "0 '<blank>'"],
        ["bos", "3 'a', added", "1 '<go>'"],
        ["eos", "none, not added", "2"],
        ["unk", "3 'a'", "1 '<go>'"],
    ]
    assert [*found.doubts()] == [
        "is 'a' the source's bos, id 3? --source-bos gives another",
        "is 'a' the source's unk, id 3? --source-unk gives another",
        "is '<go>' the target's unk, id 1? --unk gives another, --source-unk alone one for sources only",
    ]
    untold = NamedSpecialIds(ids=SpecialIds(pad=0, bos=1, eos=2, unk=1, source_ends_with_eos=False))
    assert [doubt.split("?")[0] for doubt in untold.doubts()] == [
        "is id 1 the source's bos and unk",
        "is id 1 the target's bos and unk",
    ]
