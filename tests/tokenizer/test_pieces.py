"""Subword models in a bundle: SentencePiece as MarianMT uses it, subword-nmt as fairseq's data has it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.skips import import_or_skip
from tests.tokenizer.nasty import EMPTY, NASTY
from tests.tokenizer.test_huggingface import TEXTS, bundle_of
from tfm_export.checkpoints.vocabularies import piece_files
from tfm_export.errors import BundleError, RequestError
from tfm_export.tokenizer import load_tokenizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Recommended. pip install sacremoses"
)  # its tokenizer makes no use of it
SPECIAL = ["</s>", "<unk>"]
IDS = {"pad": 0, "bos": 0, "eos": 0, "unk": 1}


@pytest.fixture(scope="module")
def model() -> bytes:
    """A SentencePiece model of a few pieces."""
    sentencepiece = import_or_skip("sentencepiece", "tokenizers")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=written, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    return written.getvalue()


@pytest.fixture(scope="module")
def marian(model: bytes, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' tokenizer on it, with a language code among its tokens."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("marian")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, ">>fra<<", *pieces, "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(model)
    files = {name: str(folder / name) for name in ("vocab.json", "source.spm", "target.spm")}
    return transformers.MarianTokenizer(
        source_spm=files["source.spm"], target_spm=files["target.spm"], vocab=files["vocab.json"]
    )


def tokens_of(marian: Any) -> list[str]:
    return [token for token, _ in sorted(marian.get_vocab().items(), key=lambda item: item[1])]


@pytest.mark.parametrize("text", [*NASTY, ">>fra<< hello world", ">>deu<< hello"], ids=lambda text: repr(text[:12]))
def test_marians_ids_and_texts(tmp_path: Path, model: bytes, marian: Any, text: str) -> None:
    tokens = tokens_of(marian)
    files = piece_files({"source": model, "target": model}, {"source": tokens, "target": tokens}, language_codes=True)
    assert [*files] == ["tokenizer.json", "source.spm"]
    ours = load_tokenizer(bundle_of(tmp_path, files, size=len(tokens), **{**IDS, "pad": len(tokens) - 1}))
    assert ours is not None
    if "</s>" in text:  # theirs takes special tokens out of texts before it splits them; ours has no such names
        return
    ids = ours.encode_source(text)
    assert ids == marian(text).input_ids
    known = [i for i in ids if i != IDS["unk"]]  # theirs leaves unknown tokens out of texts, ours shows them
    assert ours.decode_target(known) == marian.decode(known, skip_special_tokens=True)


@pytest.mark.parametrize("text", EMPTY)
def test_empty_texts_are_refused(tmp_path: Path, model: bytes, text: str) -> None:
    tokens = {"source": ["a", "b"], "target": ["a", "b"]}
    ours = load_tokenizer(bundle_of(tmp_path, piece_files({"source": model, "target": model}, tokens), size=2, **IDS))
    assert ours is not None
    with pytest.raises(RequestError, match="the text is empty"):
        ours.encode_source(text)


@pytest.mark.parametrize("text", NASTY, ids=lambda text: repr(text[:12]))
def test_codes_of_subword_nmt(tmp_path: Path, text: str) -> None:
    learn, apply = (import_or_skip(f"subword_nmt.{name}", "tokenizers") for name in ("learn_bpe", "apply_bpe"))
    written = io.StringIO()
    learn.learn_bpe(io.StringIO("\n".join(TEXTS) + "\n"), written, 40)
    codes = written.getvalue().encode()
    theirs = apply.BPE(io.StringIO(written.getvalue())).process_line(text)
    pieces = theirs.split()
    tokens = [*SPECIAL, *dict.fromkeys(pieces)]
    files = piece_files({"source": codes, "target": codes}, {"source": tokens, "target": tokens})
    ours = load_tokenizer(bundle_of(tmp_path, files, size=len(tokens), **IDS))
    assert ours is not None
    ids = ours.encode_source(text)
    assert ours.source_tokens(ids[:-1]) == ["<unk>" if piece == "</s>" else piece for piece in pieces]
    plain = text.split() == [word for word in text.split(" ") if word]  # other white space does not come back
    if plain and "</s>" not in text:
        assert ours.decode_target(ids).split() == text.split()


@pytest.mark.parametrize(
    ("codes", "problem"),
    [
        (b"#version: 0.2\nh e\n\nl l\n", "line 3 must be two units, separated by a space, found"),
        (b"#version: 0.2\nh e l\n", "line 2 must be two units"),
        (b"#version: 9.2\nh e\n", "its version must be one of 0.1, 0.2, found '#version: 9.2"),
    ],
)
def test_damaged_codes_do_not_end_the_process(
    tmp_path: Path, codes: bytes, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    import_or_skip("subword_nmt", "tokenizers")
    files = piece_files({"source": codes, "target": codes}, {"source": ["a"], "target": ["a"]})
    with pytest.raises(BundleError, match=problem):
        load_tokenizer(bundle_of(tmp_path, files, size=1, **IDS))
    assert capfd.readouterr() == ("", "")


def test_all_that_does_not_fit_is_named(tmp_path: Path) -> None:
    state = {
        "kind": "pieces",
        "source": {"tokens": ["a"], "splitter": "words", "file": "none.spm"},
        "target": {"tokens": "abc", "splitter": "bpe", "file": "tokenizer.json"},
    }
    with pytest.raises(BundleError) as caught:
        load_tokenizer(bundle_of(tmp_path, {"tokenizer.json": json.dumps(state).encode()}, size=3))
    assert caught.value.problems == [
        "the tokenizer's source splitter must be one of sentencepiece, bpe, found 'words'",
        "the tokenizer's source file none.spm is not in the bundle",
        "the tokenizer's source vocabulary must have the model's 3 tokens, found 1",
        "the tokenizer's target tokens must be a list of strings",
    ]
