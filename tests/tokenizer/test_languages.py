"""Languages by name, where each family of models wants them, and texts that spell special tokens."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from reference_model import TransformerConfig
from tests.skips import import_or_skip
from tests.tokenizer.nasty import NASTY
from tests.tokenizer.test_huggingface import KINDS, SPECIAL, TEXTS, UNKNOWN, bundle_of
from tfm_export.checkpoints.vocabularies import M2M_100, folder_tokenizer, piece_files, vocabulary_files
from tfm_export.errors import CheckpointError, RequestError
from tfm_export.tokenizer import Tokenizer, load_tokenizer
from tfm_export.tokenizer.languages import AS_IT_IS, Languages, Reading, TargetStart

SPELLS = [*NASTY, "</s>", "<s><pad>", "a </s> b", "x</s></s>", "<unk> <s>"]


def loaded(path: Path, files: dict[str, bytes], size: int = 400, **special: Any) -> Tokenizer:
    found = load_tokenizer(bundle_of(path, files, size=size, **special))
    assert found is not None
    return found


def of_huggingface(path: Path, theirs: tokenizers.Tokenizer, **special: Any) -> Tokenizer:
    files = {"tokenizer.json": b'{"kind": "huggingface"}', "huggingface.json": theirs.to_str().encode()}
    return loaded(path, files, **special)


def multilingual(languages: list[str], template: str | None = "eng_Latn $A </s>") -> tokenizers.Tokenizer:
    """As NLLB's: words, and the source's language before them; the ids of languages are 6, 7, ..."""
    words = {token: i for i, token in enumerate([*SPECIAL, "hello", "world"])}
    found = tokenizers.Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found.add_special_tokens([*SPECIAL, *languages])
    if template is not None:
        ids = [(name, found.token_to_id(name)) for name in template.split() if name != "$A"]
        found.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return found


NLLB = ["eng_Latn", "fra_Latn", "deu_Latn", "zho_Hans"]


def test_languages_of_nllb(tmp_path: Path) -> None:
    ours = of_huggingface(tmp_path, multilingual(NLLB))
    assert ours.encode_source("hello world") == [6, 4, 5, 1]
    assert ours.encode_source("hello world", Reading(source_language="fra_Latn")) == [7, 4, 5, 1]
    assert ours.encode_source("hello eng_Latn", Reading(source_language="deu_Latn")) == [8, 4, 6, 1]
    assert ours.encode_source("hello", Reading(source_language="fra_Latn", target_language="deu_Latn")) == [7, 4, 1]
    assert ours.begin_target("zho_Hans") == TargetStart(forced=9)
    assert ours.target_id("fra_Latn") == 7
    assert ours.target_id("none") is None
    assert ours.split_source("hello", Reading(source_language="fra_Latn")) == ["", "hello"]


def test_languages_of_mbart(tmp_path: Path) -> None:
    theirs = multilingual(["en_XX", "ro_RO"], "$A </s> en_XX")
    ours = of_huggingface(tmp_path, theirs, bos=7)
    assert ours.encode_source("hello", Reading(source_language="ro_RO")) == [4, 1, 7]
    assert ours.begin_target("en_XX") == TargetStart(start=6)  # its decoder starts from the language


def test_languages_of_m2m_100_whose_template_has_none(tmp_path: Path) -> None:
    ours = of_huggingface(tmp_path, multilingual(["__en__", "__fr__"], "$A </s>"))
    assert ours.encode_source("hello", Reading(source_language="fr")) == [7, 4, 1]
    assert ours.encode_source("hello", Reading(source_language="__fr__")) == [7, 4, 1]
    assert ours.split_source("hello", Reading(source_language="fr")) == ["", "hello"]
    assert ours.begin_target("en") == TargetStart(forced=6)


@pytest.mark.parametrize(
    ("asked", "near"), [("fra_latn", "fra_Latn"), ("fr", "fra_Latn"), ("zho", "zho_Hans"), ("de_Latn", "deu_Latn")]
)
def test_an_unknown_language_is_refused_with_the_nearest(tmp_path: Path, asked: str, near: str) -> None:
    ours = of_huggingface(tmp_path, multilingual(NLLB))
    with pytest.raises(RequestError, match=f"target_language '{asked}' is none of the model's 4 languages") as caught:
        ours.begin_target(asked)
    assert caught.value.hint is not None
    assert near in caught.value.hint.split(", ")
    with pytest.raises(RequestError, match=f"source_language '{asked}' is none"):
        ours.encode_source("hello", Reading(source_language=asked))


def test_a_model_without_languages_says_so(tmp_path: Path) -> None:
    ours = of_huggingface(tmp_path, KINDS["unigram"]())
    with pytest.raises(RequestError, match="'fra', but the model's vocabulary has no tokens for languages"):
        ours.begin_target("fra")
    with pytest.raises(RequestError, match="must be the name of a language, found 3"):
        ours.begin_target(3)  # type: ignore[arg-type]


def test_what_looks_like_a_language() -> None:
    tokens = {t: i for i, t in enumerate([">>fra<<", "__de__", "[ro_RO]", "en_XX", "a", "__init__", "_a_", "[x]"])}
    assert Languages(tokens.items()).names == ["de", "fra", "ro_RO"]
    assert Languages(tokens.items(), special=True).names == ["de", "en_XX", "fra", "ro_RO"]
    many = Languages((f"__{a}{b}__", i) for i, (a, b) in enumerate((a, b) for a in "abcde" for b in "abcdefgh"))
    with pytest.raises(RequestError, match=r"aa, ab, .* \.\.\."):
        many.id_of("zz", "source_language")


def lists(source: list[str], target: list[str], split: str = "words") -> dict[str, bytes]:
    return vocabulary_files(
        {
            "source": {"tokens": [*SPECIAL, *source], "split": split, "lowercase": False},
            "target": {"tokens": [*SPECIAL, *target], "split": split, "lowercase": False},
        }
    )


def test_languages_of_fairseqs_lists(tmp_path: Path) -> None:
    ours = loaded(tmp_path, lists(["a", "__en__", "__fr__"], ["b", "__fr__", "__de__"]), size=7)
    assert ours.encode_source("a", Reading(source_language="fr")) == [6, 4, 1]
    assert ours.split_source("a", Reading(source_language="fr")) == ["", "a"]
    assert ours.begin_target("fr") == TargetStart(forced=5)
    assert ours.decode_target([5, 4, 4]) == ours.settled_target([5, 4, 4]) == "b b"
    assert ours.encode_source("__en__ a") == [5, 4, 1]
    assert ours.encode_source("__en__ a", Reading(escape=True)) == [2, 4, 1]
    (tmp_path / "mbart").mkdir()
    ours = loaded(tmp_path / "mbart", lists(["a", "[en_XX]", "[ro_RO]"], ["b", "[en_XX]", "[ro_RO]"]), size=7)
    assert ours.encode_source("a", Reading(source_language="en_XX")) == [4, 1, 5]
    assert ours.begin_target("ro_RO") == TargetStart(start=6)
    with pytest.raises(RequestError, match="source_language 'de_DE' is none of the model's 2 languages"):
        ours.encode_source("a", Reading(source_language="de_DE"))


@pytest.fixture(scope="module")
def spm() -> bytes:
    sentencepiece = import_or_skip("sentencepiece", "tokenizers")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=written, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    return written.getvalue()


def test_languages_of_marian(tmp_path: Path, spm: bytes) -> None:
    tokens = ["</s>", "<unk>", "<pad>", ">>fra<<", ">>deu<<", "▁", "h", "e", "l", "o", ">", "<", "f", "r", "a"]
    files = piece_files({"source": spm, "target": spm}, {"source": tokens, "target": tokens}, language_codes=True)
    ours = loaded(tmp_path, files, size=len(tokens), pad=2, bos=2, eos=0, unk=1)
    typed = ours.encode_source(">>fra<< hello")
    assert typed[0] == 3
    assert ours.encode_source("hello", Reading(target_language="fra")) == typed
    assert ours.encode_source("hello", Reading(target_language=">>fra<<")) == typed
    assert ours.begin_target("fra") == TargetStart()
    # The caller's language counts, and what an end user types is text.
    for reading in (Reading(target_language="deu"), Reading(escape=True)):
        found = ours.encode_source(">>fra<< hello", reading)
        assert 3 not in found
        assert len(ours.split_source(">>fra<< hello", reading)) == len(found) - 1
    with pytest.raises(RequestError, match="source_language: the model's sources name the target's language alone"):
        ours.encode_source("hello", Reading(source_language="fra"))
    with pytest.raises(RequestError, match="target_language 'fre' is none of the model's 2 languages") as caught:
        ours.encode_source("hello", Reading(target_language="fre"))
    assert "fra" in str(caught.value.hint)


@pytest.mark.parametrize("kind", [*KINDS, "words"])
def test_special_tokens_that_a_text_spells(tmp_path: Path, kind: str) -> None:
    theirs = KINDS[kind]() if kind in KINDS else multilingual(NLLB)
    ours = of_huggingface(tmp_path, theirs)
    added = theirs.encode("").ids
    special = {i for i, token in theirs.get_added_tokens_decoder().items() if token.special}
    unknown = theirs.token_to_id(UNKNOWN)
    spelled = 0
    for text in [*SPELLS, "hello eng_Latn"]:
        plain = ours.encode_source(text) if text.strip() else []
        spelled += len([i for i in plain if i in special]) > len(added)
        escaped = ours.encode_source(text, Reading(escape=True))
        assert sorted(i for i in escaped if i in special and i != unknown) == sorted(added)
        if kind == "byte pairs":  # nothing is lost
            assert ours.decode_target(escaped) == text
    assert spelled >= 3
    for text in ("hello world", "the quick brown fox"):
        assert ours.encode_source(text, Reading(escape=True)) == ours.encode_source(text, AS_IT_IS)
    assert len(ours.split_source("a </s>", Reading(escape=True))) == len(
        ours.encode_source("a </s>", Reading(escape=True))
    ) - (json.loads(theirs.to_str())["post_processor"]["single"][-1].get("SpecialToken", {}).get("id") == "</s>")


def test_a_folder_of_m2m_100(tmp_path: Path, spm: bytes) -> None:
    """Its tokenizer has no tokenizer.json: languages are behind the tokens of vocab.json."""
    import sentencepiece
    import transformers

    processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "spm.model").write_bytes(spm)
    folder = tmp_path / "saved"
    theirs = transformers.M2M100Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "spm.model"), src_lang="de")
    theirs.save_pretrained(str(folder))
    paths = {path.name: path for path in folder.iterdir()}
    assert M2M_100 in paths
    assert "tokenizer.json" not in paths
    size = len(vocabulary) + 108
    config = TransformerConfig(source_vocabulary_size=size, target_vocabulary_size=size, d_model=4, heads=1)
    files, said = folder_tokenizer(paths, config)
    assert said == []
    (tmp_path / "bundle").mkdir()
    ours = loaded(tmp_path / "bundle", files, size=size, pad=1, bos=2, eos=2, unk=3)
    assert ours.encode_source("hello world") == theirs("hello world").input_ids
    for language in ("fr", "zh", "af", "zu"):
        theirs.src_lang = language
        assert ours.encode_source("hello", Reading(source_language=language)) == theirs("hello").input_ids
        assert ours.begin_target(language) == TargetStart(forced=theirs.get_lang_id(language))
    target = [2, theirs.get_lang_id("fr"), *theirs("hello").input_ids[1:]]
    assert ours.decode_target(target) == theirs.decode(target[2:], skip_special_tokens=True) == "hello"
    with pytest.raises(RequestError, match="'fra' is none of the model's 100 languages"):
        ours.begin_target("fra")
    del paths["tokenizer_config.json"]
    (tmp_path / "plain").mkdir()
    ours, theirs.src_lang = loaded(tmp_path / "plain", folder_tokenizer(paths, config)[0], size, eos=2, unk=3), "en"
    assert ours.encode_source("hello") == theirs("hello").input_ids
    (folder / "tokenizer_config.json").write_text('{"language_codes": "other"}')
    with pytest.raises(CheckpointError, match="language_codes 'other'; known are m2m100, wmt21"):
        folder_tokenizer({**paths, "tokenizer_config.json": folder / "tokenizer_config.json"}, config)
