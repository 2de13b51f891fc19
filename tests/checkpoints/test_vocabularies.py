"""What turns texts into ids comes along: tokenizer.json files, Marian's pairs, dictionaries and subword models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from reference_model import TransformerConfig
from tests.oracles.layouts import Tutorial
from tests.tokenizer.test_huggingface import unigram
from tfm_export.checkpoints import read_checkpoint
from tfm_export.checkpoints.vocabularies import DICTIONARIES, assumed_splits, folder_tokenizer
from tfm_export.errors import CheckpointError
from tfm_export.export import export_bundle
from tfm_export.model import load

CONFIG = TransformerConfig(source_vocabulary_size=130, target_vocabulary_size=130, d_model=4, heads=1)
SETTINGS = {"heads": 3, "pad": 1, "bos": 0, "eos": 2, "unk": 3, "source_starts_with_bos": False}


def test_a_folders_own_tokenizer_comes_along(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    original = unigram()
    path.write_text(original.to_str())
    files, said = folder_tokenizer({"tokenizer.json": path}, CONFIG)
    assert json.loads(files["tokenizer.json"]) == {"kind": "huggingface"}
    assert files["huggingface.json"] == path.read_bytes()
    count = len(original.get_vocab())
    assert said == [f"the tokenizer has {count} tokens, the embedding 130 rows: the others have no text"]
    small = TransformerConfig(source_vocabulary_size=130, target_vocabulary_size=20, d_model=4, heads=1)
    with pytest.raises(CheckpointError, match="has ids that the model's 20 rows have not"):
        folder_tokenizer({"tokenizer.json": path}, small)
    path.write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match="no tokenizer of Hugging Face"):
        folder_tokenizer({"tokenizer.json": path}, CONFIG)


def test_a_pair_of_sentencepiece_models_comes_along(tmp_path: Path) -> None:
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(b"\n\x0e" + name.encode())
    (tmp_path / "vocab.json").write_text(json.dumps({"</s>": 0, "<unk>": 1, "a": 2, "<pad>": 129}))
    paths = {path.name: path for path in tmp_path.iterdir()}
    files, _ = folder_tokenizer(paths, CONFIG)
    state = json.loads(files["tokenizer.json"])
    assert (state["kind"], state["language_codes"]) == ("pieces", True)
    assert state["source"]["tokens"][:4] == ["</s>", "<unk>", "a", "<3>"]
    assert files["source.spm"] == paths["source.spm"].read_bytes()
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 130}))
    with pytest.raises(CheckpointError, match="an id of its own from 0 to 129"):
        folder_tokenizer(paths, CONFIG)


def test_how_texts_become_tokens_is_told_where_nobody_said_it() -> None:
    lists = {"source_tokens": ["a"], "target_dictionary": "dict.txt"}
    told = assumed_splits(lists)
    assert [note.split(":")[0] for note in told] == ["source_split was not given", "target_split was not given"]
    assert "tokens of targets are taken for words" in told[1]
    assert len(assumed_splits({**lists, "source_split": "characters"})) == 1
    assert assumed_splits({**lists, "source_subwords": "a", "target_subwords": "b"}) == []
    assert assumed_splits({}) == []


def test_a_folder_without_a_tokenizer_is_told() -> None:
    files, said = folder_tokenizer({}, CONFIG)
    assert files == {}
    assert "takes ids, not texts" in said[0]


def test_the_tokenizer_of_m2m_100_comes_along(tmp_path: Path) -> None:
    """Languages are behind the tokens of vocab.json."""
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"\0pieces")
    (tmp_path / "vocab.json").write_text(json.dumps({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}))
    config = replace(CONFIG, source_vocabulary_size=104, target_vocabulary_size=104)
    files, said = folder_tokenizer({path.name: path for path in tmp_path.iterdir()}, config)
    assert json.loads(files["tokenizer.json"])["source"]["tokens"][3:6] == ["<unk>", "__af__", "__am__"]
    assert said == []


@pytest.mark.parametrize("name", ["sentencepiece.bpe.model", "spiece.model"])
def test_a_folder_with_sentencepiece_alone_is_told(tmp_path: Path, name: str) -> None:
    files, said = folder_tokenizer({name: tmp_path / name}, CONFIG)
    assert files == {}
    assert said[0].startswith(f"the folder has {name} and no tokenizer.json")
    assert "takes ids, not texts" in said[0]
    assert "--config" in said[0]


def test_dictionaries_in_their_forms() -> None:
    assert list(DICTIONARIES["fairseq"]("a 10\nb@@ 3\n\u00a0 2\n")) == [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "a",
        "b@@",
        "\u00a0",
    ]
    marian = '</s>: 0\n"\\"": 2\n\'\'\'\': 3\n<unk>: 1\n": ": 4\n"\\u2581a\\t": 5\n"\\x41": 7\n'
    assert list(DICTIONARIES["marian"](marian)) == ["</s>", "<unk>", '"', "'", ": ", "\u2581a\t", "<6>", "A"]
    assert list(DICTIONARIES["lines"]("a\nb\t3\r\n c\n")) == ["a", "b", " c"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model of the tutorial's layout with 16 and 24 rows."""
    torch.save(Tutorial((16, 24), 12, (1, 1), 3, 8, 20).state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.fixture
def dictionaries(tmp_path: Path) -> dict[str, str]:
    """Fairseq's, of 14 and 17 tokens: the tables are padded to a multiple of 8."""
    for side, letters in (("source", "abcdefghij"), ("target", "klmnopqrstuvw")):
        (tmp_path / f"dict.{side}.txt").write_text("".join(f"{letter} 1\n" for letter in letters))
    return {
        "source_dictionary": str(tmp_path / "dict.source.txt"),
        "target_dictionary": str(tmp_path / "dict.target.txt"),
        "dictionary_format": "fairseq",
    }


def test_texts_through_a_model_with_dictionaries(
    tmp_path: Path, checkpoint: Path, dictionaries: dict[str, str]
) -> None:
    settings = {**SETTINGS, **dictionaries}
    bundle, report = export_bundle(checkpoint, tmp_path / "bundle", settings=settings, inputs=["a b c", "j i h g"])
    assert report is not None
    assert report.passed
    assert [note for note in bundle.manifest.model["notes"] if "padding" in note] == [
        "the source dictionary has 14 tokens, the embedding 16 rows: the last 2 are taken for padding",
        "the target dictionary has 17 tokens, the embedding 24 rows: the last 7 are taken for padding",
    ]
    with load(bundle.path) as model:
        assert model.tokenizer is not None
        assert model.tokenizer.encode_source("a j z") == [4, 13, 3, 2]
        assert model.generate("a b c").tokens == model.generate_ids([[4, 5, 6, 2]])[0].hypotheses[0].tokens


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s: s.pop("target_dictionary"), "target_tokens is missing, or target_dictionary"),
        (lambda s: s.update(source_dictionary="none"), "none cannot be read"),
        (lambda s: s.update(source_subwords=s["source_dictionary"]), "source_subwords and target_subwords go together"),
        (lambda s: s.update(source_dictionary=s["target_dictionary"]), "source_tokens has 17 tokens, the embedding 16"),
        (lambda s: s.update(target_dictionary=s["source_dictionary"]), "target_tokens has 14 tokens, the embedding 24"),
        (lambda s: s.update(unk=2), "unk id 2 is eos too"),
        (lambda s: s.update(dictionary_format="json"), "dictionary_format must be one of fairseq, marian, lines"),
    ],
)
def test_what_does_not_fit_is_refused(
    checkpoint: Path, dictionaries: dict[str, str], change: Callable[[dict[str, Any]], Any], problem: str
) -> None:
    settings: dict[str, Any] = {**SETTINGS, **dictionaries}
    change(settings)
    with pytest.raises(CheckpointError, match=problem):
        read_checkpoint(checkpoint, settings)


def test_tokens_that_the_model_has_no_rows_for_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    original = unigram()
    whole = json.loads(original.to_str())
    count = len(original.get_vocab())
    whole["added_tokens"].append({**whole["added_tokens"][0], "id": count, "content": "<mask>"})
    path.write_text(json.dumps(whole))
    config = TransformerConfig(source_vocabulary_size=count, target_vocabulary_size=count, d_model=4, heads=1)
    files, said = folder_tokenizer({"tokenizer.json": path}, config)
    tokenizer = tokenizers.Tokenizer.from_str(files["huggingface.json"].decode())
    assert tokenizer.get_vocab() == original.get_vocab()
    assert tokenizer.encode("a b").ids == original.encode("a b").ids
    assert said == [
        f"the tokenizer has {count + 1} tokens, the embedding {count} rows: those without a row were left out"
    ]
    whole["post_processor"] = {"type": "BertProcessing", "sep": ["<mask>", count], "cls": ["<mask>", count]}
    path.write_text(json.dumps(whole))  # every source would get it
    with pytest.raises(CheckpointError, match=f"has {count + 1} tokens, the embedding {count} rows"):
        folder_tokenizer({"tokenizer.json": path}, config)


def test_a_vocabulary_of_another_length_is_refused(tmp_path: Path) -> None:
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(b"\n\x0e" + name.encode())
    (tmp_path / "vocab.json").write_text(json.dumps({str(i): i for i in range(110)}))
    paths = {path.name: path for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"vocab\.json has 110 tokens, the source embedding 130 rows"):
        folder_tokenizer(paths, CONFIG)


def test_a_dictionary_with_a_huge_id_takes_no_memory(checkpoint: Path, dictionaries: dict[str, str]) -> None:
    Path(dictionaries["source_dictionary"]).write_text("a: 0\nb: 999999999\n")
    with pytest.raises(CheckpointError, match="it has the id 999999999, more than 10,000,000"):
        read_checkpoint(checkpoint, {**SETTINGS, **dictionaries, "dictionary_format": "marian"})
