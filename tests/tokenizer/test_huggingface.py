"""Tokenizers of Hugging Face in a bundle: the same ids and texts as transformers gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tokenizer.nasty import EMPTY, NASTY
from tfm_export.bundle import Bundle, GenerationDefaults, Limits, Manifest, SpecialIds
from tfm_export.errors import BundleError, RequestError
from tfm_export.graph import Dimensions
from tfm_export.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ["<pad>", "</s>", "<unk>", "<s>"]
TEXTS = [
    "hello world",
    "the quick brown fox",
    "jumps over the lazy dog",
    "ÉTÉ été naïve",
    "日本語 テキスト",
    *"abcdefgh",
] * 3
SIZE = 400
PAD, END, UNKNOWN, START = SPECIAL


def unigram() -> tokenizers.Tokenizer:
    """As T5's: a language model of pieces, the end token behind sources."""
    found = tokenizers.Tokenizer(models.Unigram())
    found.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    found.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token=UNKNOWN, show_progress=False)
    )
    found.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return found


def byte_pairs() -> tokenizers.Tokenizer:
    """As BART's: pairs of bytes, start and end token around sources."""
    found = tokenizers.Tokenizer(models.BPE(unk_token=UNKNOWN))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=350,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    found.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 1)])
    return found


KINDS = {"unigram": unigram, "byte pairs": byte_pairs}


def bundle_of(path: Path, files: dict[str, bytes], size: int = SIZE, **special: Any) -> Bundle:
    """A bundle with nothing but a tokenizer."""
    ids = SpecialIds(pad=0, bos=0, eos=1, source_ends_with_eos=True, unk=2)
    manifest = Manifest(
        dimensions=Dimensions(
            source_vocabulary_size=size,
            target_vocabulary_size=size,
            decoder_layers=1,
            heads=1,
            head_size=2,
            candidates=2,
        ),
        limits=Limits(max_source_length=9, max_target_length=9),
        special_ids=replace(ids, **special),
        generation=GenerationDefaults(max_length=9),
    )
    (path / "tokenizer").mkdir()
    bundle = Bundle(path, manifest)
    for name, content in files.items():
        (path / "tokenizer" / name).write_bytes(content)
    bundle.add_files({f"tokenizer/{name}": "" for name in files})
    return bundle


@pytest.fixture(params=KINDS)
def theirs(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    """Each kind of theirs, trained."""
    return KINDS[request.param]()


@pytest.fixture
def ours(tmp_path: Path, theirs: tokenizers.Tokenizer) -> Tokenizer:
    """The same in a bundle; padding and truncation that its file asks for are not done."""
    theirs.enable_truncation(3)
    theirs.enable_padding(length=50)
    files = {
        "tokenizer.json": json.dumps({"kind": "huggingface"}).encode(),
        "huggingface.json": theirs.to_str().encode(),
    }
    theirs.no_truncation()
    theirs.no_padding()
    found = load_tokenizer(bundle_of(tmp_path, files))
    assert found is not None
    return found


@pytest.fixture
def fast(theirs: tokenizers.Tokenizer) -> Callable[..., Any]:
    """The same in transformers."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=theirs, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, bos_token=START
    )


@pytest.mark.parametrize("text", NASTY, ids=lambda text: repr(text[:12]))
def test_the_ids_and_the_text_are_theirs(ours: Tokenizer, fast: Any, text: str) -> None:
    ids = ours.encode_source(text)
    assert ids == fast(text).input_ids
    assert ours.encode_target(text) == fast(text, add_special_tokens=False).input_ids
    assert ours.decode_target(ids) == fast.decode(ids, skip_special_tokens=True)
    assert ours.source_tokens(ids) == fast.convert_ids_to_tokens(ids)
    assert len(ours.split_source(text)) == len(ids) - 1


@pytest.mark.parametrize("text", EMPTY[:1])
def test_empty_texts_are_refused(ours: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="the text is empty"):
        ours.encode_source(text)
    assert ours.encode_target(text) == []


def test_pieces_of_the_source_stand_for_themselves(ours: Tokenizer) -> None:
    pieces = ours.split_source("hello world")
    assert all(piece in "hello world" for piece in pieces)
    assert set("".join(pieces)) >= set("helloworld")


def test_tokens_may_be_replaced(ours: Tokenizer) -> None:
    ids = ours.encode_target("the quick fox")
    plain = ours.decode_target(ids, {})
    assert ours.decode_target([*ids, 1], {len(ids): "ZZ"}).replace(" ", "") == f"{plain}ZZ".replace(" ", "")


def test_rows_without_a_token_and_wrong_ids(ours: Tokenizer) -> None:
    assert ours.target_tokens([399]) == ["<399>"]
    with pytest.raises(RequestError, match="at least 0, found -1"):
        ours.decode_target([-1])


def test_damaged_files_and_too_many_tokens_are_refused(tmp_path: Path) -> None:
    state = {"tokenizer.json": b'{"kind": "huggingface"}'}
    for folder in ("damaged", "large"):
        (tmp_path / folder).mkdir()
    with pytest.raises(BundleError, match=r"huggingface\.json is no tokenizer"):
        load_tokenizer(bundle_of(tmp_path / "damaged", {**state, "huggingface.json": b"{}"}))
    with pytest.raises(BundleError, match=r"has token id \d+, the model 20 rows"):
        load_tokenizer(
            bundle_of(tmp_path / "large", {**state, "huggingface.json": unigram().to_str().encode()}, size=20)
        )


def test_what_the_library_fails_at_is_told(tmp_path: Path) -> None:
    state = json.loads(unigram().to_str())
    state["model"]["unk_id"] = None
    files = {"tokenizer.json": b'{"kind": "huggingface"}', "huggingface.json": json.dumps(state).encode()}
    bundle = bundle_of(tmp_path, files)
    ours = load_tokenizer(bundle)
    assert ours is not None
    with pytest.raises(RequestError, match=r"the tokenizer cannot split 'ш': .*unk_id"):
        ours.encode_source("ш")
    state["model"]["unk_id"] = 10**6
    (tmp_path / "tokenizer" / "huggingface.json").write_text(json.dumps(state))
    with pytest.raises(BundleError, match="is no tokenizer: "):
        load_tokenizer(bundle)
