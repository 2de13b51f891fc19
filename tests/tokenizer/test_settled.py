"""What of a target's text stands before its end: whatever follows, for every kind of tokenizer."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.skips import import_or_skip
from tests.tokenizer.nasty import NASTY
from tests.tokenizer.test_huggingface import SPECIAL, UNKNOWN, bundle_of, byte_pairs, unigram
from tfm_export.checkpoints.vocabularies import piece_files, vocabulary_files
from tfm_export.tokenizer import Tokenizer, load_tokenizer
from tfm_export.tokenizer.pieces import rewrites_targets
from tfm_export.tokenizer.settled import settled_text

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁a", "a", "b", "▁日", "é", "\u0301", "👩", "\u200d", "🚀", "▁▁", ".", " ", "\u3000", "\ufffd", "n't"]
TEXTS = [*NASTY, "👩\u200d🚀 日本", "e\u0301a\u0308", "do n't , is it ?", "\ufffd\ufffd a", " \u3000 "]


def words(decoder: Any, tokens: list[str]) -> tokenizers.Tokenizer:
    """A tokenizer of whole tokens and a decoder."""
    found = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *tokens])}, unk_token=UNKNOWN))
    found.add_special_tokens(SPECIAL)
    found.pre_tokenizer, found.decoder = pre_tokenizers.WhitespaceSplit(), decoder
    return found


def llama(*more: Any) -> Any:
    """The decoder of tokenizers that fall back to bytes."""
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def ctc_tokens() -> list[str]:
    return ["<ctc>", "|", "a", "b", "a|", "<ctc>|", " ."]


PIECES = ["##a", "##", "a", " .", ".", "n't", " n't", "do", " do not", "##s", "?", "b"]
SUFFIXED = ["a</w>", "a", "</w>", "b</w>c", "</w></w>", "é</w>", "b"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())

HUGGINGFACE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "unigram": unigram,
    "byte pairs": byte_pairs,
    "no decoder": lambda: words(None, WORDS),
    "byte fallback": lambda: words(llama(decoders.Strip(" ", 1, 0)), [*WORDS, *BYTES]),
    "stripped behind": lambda: words(llama(decoders.Strip(" ", 0, 1)), [*WORDS, *BYTES]),
    "stripped ideographic space": lambda: words(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip("\u3000", 0, 1)]), [*ALPHABET, "ãĢĢ", "ãĢ"]
    ),
    "metaspace": lambda: words(decoders.Metaspace(), WORDS),
    "bytes, then metaspace": lambda: words(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), [*WORDS, *BYTES]
    ),
    "word pieces": lambda: words(decoders.WordPiece(cleanup=True), PIECES),
    "word pieces as they are": lambda: words(decoders.WordPiece(cleanup=False), PIECES),
    "suffixes": lambda: words(decoders.BPEDecoder("</w>"), SUFFIXED),
    "suffixes that overlap": lambda: words(decoders.BPEDecoder("aa"), ["a", "aa", "aaa", "aab", "b"]),
    "ctc": lambda: words(decoders.CTC("<ctc>", "|", True), ctc_tokens()),
    "whole texts are rewritten": lambda: words(llama(decoders.Replace("a a", "b")), [*WORDS, *BYTES]),
}
UNSETTLED = {"whole texts are rewritten"}


def sentencepiece_model(**options: Any) -> bytes:
    sentencepiece = import_or_skip("sentencepiece", "tokenizers")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "the quick brown fox", "jumps over it", *"abcdefgh"] * 3),
        model_writer=written,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return written.getvalue()


def of_pieces(model: bytes) -> tuple[dict[str, bytes], int]:
    """The files of a tokenizer with a SentencePiece model's pieces, and some that it does not have."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    tokens = [*SPECIAL, *pieces, "▁Fremdes", "Fremdes", "\u3000", "\ufffd", "日"]
    return piece_files({"source": model, "target": model}, {"source": tokens, "target": tokens}), len(tokens)


def of_codes() -> tuple[dict[str, bytes], int]:
    import_or_skip("subword_nmt.apply_bpe", "tokenizers")
    tokens = [*SPECIAL, "a", "a@@", "@@", "@", "b@@", "é", "👩@@", "🚀"]
    codes = b"#version: 0.2\na b\n"
    return piece_files({"source": codes, "target": codes}, {"source": tokens, "target": tokens}), len(tokens)


def of_list(split: str) -> tuple[dict[str, bytes], int]:
    tokens = [*SPECIAL, *"ab é日", "\u0301", "👩", "\u200d", "🚀", "\ufffd", "a b"]
    side = {"tokens": tokens, "split": split, "lowercase": False}
    return vocabulary_files({"source": side, "target": side}), len(tokens)


OTHERS: dict[str, Callable[[], tuple[dict[str, bytes], int]]] = {
    "sentencepiece": lambda: of_pieces(sentencepiece_model(vocab_size=60)),
    "sentencepiece with bytes": lambda: of_pieces(
        sentencepiece_model(vocab_size=330, byte_fallback=True, remove_extra_whitespaces=False)
    ),
    "sentencepiece of pairs": lambda: of_pieces(
        sentencepiece_model(vocab_size=330, byte_fallback=True, model_type="bpe", treat_whitespace_as_suffix=True)
    ),
    "codes of subword-nmt": of_codes,
    "words": lambda: of_list("words"),
    "characters": lambda: of_list("characters"),
}


@pytest.fixture(params=[*HUGGINGFACE, *OTHERS])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def ours(tmp_path: Path, kind: str) -> tuple[Tokenizer, int]:
    """A bundle's tokenizer of each kind, and its size."""
    if kind in HUGGINGFACE:
        theirs = HUGGINGFACE[kind]()
        files = {"tokenizer.json": b'{"kind": "huggingface"}', "huggingface.json": theirs.to_str().encode()}
        size = theirs.get_vocab_size()
    else:
        files, size = OTHERS[kind]()
    found = load_tokenizer(bundle_of(tmp_path, files, size=size))
    assert found is not None
    return found, size


def targets(tokenizer: Tokenizer, size: int) -> Iterator[list[int]]:
    """Random tokens, and those of texts with random ones among them: bytes that are no character, half an emoji."""
    chance = random.Random(1)
    for _ in range(150):
        yield [chance.randrange(size) for _ in range(chance.randrange(1, 12))]
    few = [chance.randrange(size) for _ in range(4)]
    for _ in range(50):
        yield chance.choices(few, k=8)
    for text in TEXTS:
        ids = tokenizer.encode_target(text[:200])
        yield ids
        yield [i for i in ids for i in ((i, chance.randrange(size)) if chance.random() < 0.1 else (i,))]


def test_what_stands_is_how_every_longer_target_begins(ours: tuple[Tokenizer, int]) -> None:
    tokenizer, size = ours
    for ids in targets(tokenizer, size):
        stands = [tokenizer.settled_target(ids[:n]) for n in range(1, len(ids) + 1)]
        texts = [tokenizer.decode_target(ids[:n]) for n in range(1, len(ids) + 1)]
        for n, early in enumerate(stands):
            assert all(text.startswith(early) for text in texts[n:]), (ids, n, early, texts)


def test_text_is_not_held_back_for_long(ours: tuple[Tokenizer, int], kind: str) -> None:
    tokenizer, _ = ours
    ids = [i for i in tokenizer.encode_target("a b a") if i != 2]
    if kind in UNSETTLED:
        assert tokenizer.settled_target(ids) == ""
    else:
        assert ids
        assert tokenizer.settled_target(ids) == tokenizer.decode_target(ids)


def test_a_character_that_may_become_white_space_to_strip(tmp_path: Path) -> None:
    strip = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("\u3000", 0, 2)])
    theirs = words(strip, ["a", "ãĢĢ", "ãĢ", "Ģ"])  # the second is an ideographic space, the last two make one
    files = {"tokenizer.json": b'{"kind": "huggingface"}', "huggingface.json": theirs.to_str().encode()}
    tokenizer = load_tokenizer(bundle_of(tmp_path, files))
    assert tokenizer is not None
    a, space, begun, end = range(4, 8)
    assert tokenizer.decode_target([a, space, begun, end]) == "a"
    assert tokenizer.settled_target([a, space, begun]) == "a"


def test_decoders_of_which_nothing_is_known() -> None:
    fuse, bytes_of, fallback = ({"type": kind} for kind in ("Fuse", "ByteLevel", "ByteFallback"))

    def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
        return {"type": "Replace", "pattern": {kind: pattern}, "content": content}

    for parts in (
        [{"type": "Another"}],
        [fuse, bytes_of],
        [fuse, fallback],
        [replace("xy", "z"), fallback],
        [replace("«", "<"), fallback],
        [replace("«", ""), fallback],
        [fuse, replace("a", "b", "Regex")],
        [bytes_of, replace("\ufffd", "b")],
        [fuse, {"type": "Strip", "content": "\ufffd", "start": 0, "stop": 1}],
        [fuse, {"type": "BPEDecoder", "suffix": "</w>"}],
    ):
        assert not settled_text({"type": "Sequence", "decoders": parts}).known, parts
    assert settled_text({"type": "Sequence", "decoders": [fuse, replace("a", "bc")]}).known


def test_models_that_rewrite_their_targets(tmp_path: Path) -> None:
    (tmp_path / "rules.tsv").write_text("41\t42\n")
    plain, rewriting = (
        sentencepiece_model(vocab_size=60, **options)
        for options in ({}, {"denormalization_rule_tsv": str(tmp_path / "rules.tsv")})
    )
    assert (rewrites_targets(plain), rewrites_targets(rewriting)) == (False, True)
    tokenizer = load_tokenizer(bundle_of(tmp_path, *of_pieces(rewriting)))
    assert tokenizer is not None
    assert tokenizer.settled_target(tokenizer.encode_target("hello")) == ""


def test_a_piece_of_the_other_side_keeps_no_mark_for_a_space(tmp_path: Path) -> None:
    files, size = of_pieces(sentencepiece_model(vocab_size=60))
    tokens = json.loads(files["tokenizer.json"])["target"]["tokens"]
    tokenizer = load_tokenizer(bundle_of(tmp_path, files, size=size))
    assert tokenizer is not None
    ids = [tokens.index(token) for token in ("▁Fremdes", "a", "▁Fremdes", "Fremdes")]
    assert tokenizer.decode_target(ids) == "Fremdesa FremdesFremdes"
