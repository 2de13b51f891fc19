"""What turns texts into ids, as the bundle's tokenizer folder: lists of tokens, subword models, tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reference_model import TransformerConfig, Vocabulary
from tfm_export.checkpoints.files import read_json
from tfm_export.checkpoints.language_codes import LANGUAGE_CODES
from tfm_export.errors import CheckpointError
from tfm_export.text_files import MARK, decode_text, read_text

SIDES = ("source", "target")
M2M_100 = "sentencepiece.bpe.model"  # the name of its file
MOST_UNNAMED = 128  # rows without a token: tables are padded to a multiple of 8 or so
FAIRSEQ_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # of every fairseq dictionary, and not in its file


def vocabulary_files(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """The tokenizer folder of two lists of tokens.

    Args:
        sides: "source" and "target", each with tokens, split and lowercase.
    """
    return {"tokenizer.json": _json({"kind": "vocabulary", **sides})}


def piece_files(
    models: Mapping[str, bytes],
    tokens: Mapping[str, Sequence[str]],
    *,
    language_codes: bool = False,
    source_language: str | None = None,
) -> dict[str, bytes]:
    """The tokenizer folder of subword models and the lists of their pieces.

    Args:
        models: of each side, the file of SentencePiece or subword-nmt.
        tokens: of each side, in the order of ids.
        language_codes: a source may begin with the language to translate to, such as ">>fra<<", which is one token.
        source_language: the language that a source is in where nobody says; None if sources need none.
    """
    names = {side: f"{side}.{'bpe' if _are_codes(model) else 'spm'}" for side, model in models.items()}
    if models["source"] == models["target"]:
        names = dict.fromkeys(SIDES, names["source"])
    sides = {
        side: {
            "tokens": list(tokens[side]),
            "splitter": "bpe" if _are_codes(models[side]) else "sentencepiece",
            "file": names[side],
        }
        for side in SIDES
    }
    state = {"kind": "pieces", "language_codes": language_codes, **sides}
    if source_language is not None:
        state["source_language"] = source_language
    return {"tokenizer.json": _json(state), **{names[side]: models[side] for side in SIDES}}


def folder_tokenizer(files: Mapping[str, Path], config: TransformerConfig) -> tuple[dict[str, bytes], list[str]]:
    """The tokenizer folder of a folder of Hugging Face, and what there is to say of it.

    Raises:
        CheckpointError: a file is damaged, or has more tokens than the model.
    """
    if "tokenizer.json" in files:
        return _own_tokenizer(files["tokenizer.json"], config), []
    if {"source.spm", "target.spm", "vocab.json"} <= files.keys():
        names = {
            "source": "vocab.json",
            "target": "target_vocab.json" if "target_vocab.json" in files else "vocab.json",
        }
        tokens = {side: _by_id(files[name], _size(config, side)) for side, name in names.items()}
        models = {side: files[f"{side}.spm"].read_bytes() for side in SIDES}
        return piece_files(models, tokens, language_codes=True), []
    if {M2M_100, "vocab.json"} <= files.keys():
        return _m2m_100(files, config), []
    said = (
        "the folder has no tokenizer.json, nor source.spm, target.spm and vocab.json: the bundle takes ids, not texts; "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) of a fast tokenizer writes tokenizer.json"
    )
    return {}, [said]


def _m2m_100(files: Mapping[str, Path], config: TransformerConfig) -> dict[str, bytes]:
    """The tokenizer folder of M2M-100: languages are behind the tokens of vocab.json, and sources begin with one."""
    settings = read_json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    codes = LANGUAGE_CODES.get(settings.get("language_codes", "m2m100"))
    if codes is None:
        raise CheckpointError(
            f"{files['tokenizer_config.json']} has language_codes {settings['language_codes']!r}; known are "
            f"{', '.join(LANGUAGE_CODES)}"
        )
    ids = read_json(files["vocab.json"])
    ids |= {f"__{code}__": len(ids) + i for i, code in enumerate(codes)}
    tokens = _named(ids, min(_size(config, side) for side in SIDES), files["vocab.json"])
    models = dict.fromkeys(SIDES, files[M2M_100].read_bytes())
    return piece_files(models, dict.fromkeys(SIDES, tokens), source_language=settings.get("src_lang") or "en")


def _own_tokenizer(path: Path, config: TransformerConfig) -> dict[str, bytes]:
    state = read_json(path)
    model, added = state.get("model"), state.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
        raise CheckpointError(f"{path} is no tokenizer of Hugging Face: it has no model with a vocab", "save it again")
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    ids = [*numbers, *(token.get("id", -1) for token in added if isinstance(token, dict))]
    smallest = min(_size(config, side) for side in SIDES)
    if any(not isinstance(i, int) or i >= smallest for i in ids):
        raise CheckpointError(f"{path} has ids that the model's {smallest} rows have not", "take the model's own")
    return {"tokenizer.json": _json({"kind": "huggingface"}), "huggingface.json": read_text(path).encode()}


def given_vocabulary(
    path: Path, settings: Mapping[str, Any], config: TransformerConfig, dictionary: str
) -> dict[str, bytes]:
    """The tokenizer folder of the tokens and subword models in the settings; empty if there are none.

    Args:
        path: of the checkpoint, for messages.
        settings: what the user said.
        config: the model's.
        dictionary: the form of dictionaries: "fairseq", "marian" or "lines".

    Raises:
        CheckpointError: a list is missing or longer than its embedding, or names a token twice; a file is not there.
    """
    problems: list[str] = []
    tokens = {side: _side_tokens(side, settings, dictionary, problems) for side in SIDES}
    if not any(tokens.values()) and not problems:
        return {}
    for side in SIDES:
        most = 0 if f"{side}_tokens" in settings else MOST_UNNAMED
        problems += token_problems(side, tokens[side], _size(config, side), most)
    subwords = {side: settings.get(f"{side}_subwords") for side in SIDES}
    models = {side: _bytes(Path(name), problems) for side, name in subwords.items() if name}
    if len(models) == 1:
        problems.append("source_subwords and target_subwords go together; both may be the same file")
    if problems:
        raise CheckpointError([f"{path}: {problem}" for problem in problems], "give every id its token, in order")
    named = {side: _filled(tokens[side] or [], _size(config, side)) for side in SIDES}
    if models:
        return piece_files(models, named)
    splits = {side: settings.get(f"{side}_split", "words") for side in SIDES}
    lowercase = {"source": settings.get("lowercase", False), "target": False}
    return vocabulary_files(
        {side: {"tokens": named[side], "split": splits[side], "lowercase": lowercase[side]} for side in SIDES}
    )


def assumed_splits(settings: Mapping[str, Any]) -> list[str]:
    """What is to be told of lists of tokens of which nobody said how texts become tokens."""
    if settings.get("source_subwords") or settings.get("target_subwords"):
        return []
    return [
        f"{side}_split was not given: tokens of {side}s are taken for words, separated by spaces; say "
        f'"{side}_split": "characters" in --config FILE if they are letters'
        for side in SIDES
        if f"{side}_split" not in settings and (f"{side}_tokens" in settings or f"{side}_dictionary" in settings)
    ]


def _size(config: TransformerConfig, side: str) -> int:
    return config.source_vocabulary_size if side == "source" else config.target_vocabulary_size


def _side_tokens(side: str, settings: Mapping[str, Any], dictionary: str, problems: list[str]) -> list[str] | None:
    if f"{side}_tokens" in settings:
        tokens: list[str] = settings[f"{side}_tokens"]
        return tokens
    if f"{side}_dictionary" in settings:
        text = decode_text(_bytes(Path(settings[f"{side}_dictionary"]), problems), errors="replace")
        return list(DICTIONARIES[settings.get("dictionary_format", dictionary)](text))
    return None


def token_problems(side: str, tokens: Sequence[str] | None, size: int, most_unnamed: int = 0) -> list[str]:
    """What keeps a list of tokens from being that of an embedding of so many rows, some of which may have no token."""
    if tokens is None:
        return [f"{side}_tokens is missing, or {side}_dictionary: both sides need their tokens"]
    problems = []
    if not size - most_unnamed <= len(tokens) <= size:
        problems.append(f"{side}_tokens has {len(tokens)} tokens, the embedding {size} rows")
    try:
        Vocabulary(tuple(tokens), "words")
    except ValueError as problem:
        problems.append(f"{side}_tokens: {problem}")
    return problems


def _filled(tokens: Sequence[str], size: int) -> list[str]:
    """Tokens with made-up names for the rows that have none."""
    return [*tokens, *(f"<{i}>" for i in range(len(tokens), size))]


def _by_id(path: Path, size: int) -> list[str]:
    return _named(read_json(path), size, path)


def _named(ids: Mapping[str, Any], size: int, path: Path) -> list[str]:
    """The token of every id, with a made-up name for those that have none."""
    names = {i: token for token, i in ids.items() if isinstance(i, int)}
    if len(names) != len(ids) or any(not 0 <= i < size for i in names):
        raise CheckpointError(f"{path} must give every token an id of its own from 0 to {size - 1}", "copy it again")
    return [names.get(i, f"<{i}>") for i in range(size)]


def _bytes(path: Path, problems: list[str]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        problems.append(f"{path} cannot be read: {problem.strerror}")
        return b""


def _are_codes(model: bytes) -> bool:
    """Whether a subword model is subword-nmt's codes, which are text; SentencePiece's files are not."""
    model = model.removeprefix(MARK)
    return b"\0" not in model and (model.startswith(b"#version") or re.match(rb"\S+ \S+\r?\n", model) is not None)


def _fairseq_tokens(text: str) -> Iterator[str]:
    """Lines "token count"."""
    yield from FAIRSEQ_SPECIAL
    yield from (line.rsplit(" ", 1)[0] for line in text.split("\n") if line)


def _marian_tokens(text: str) -> Iterator[str]:
    """Lines "token: id", tokens in quotes where YAML wants them."""
    found = {}
    for line in text.split("\n"):
        token, colon, number = line.rstrip("\r").rpartition(":")
        if colon and number.strip().isdecimal():
            found[int(number)] = _unquoted(token)
    return iter([found.get(i, f"<{i}>") for i in range(max(found, default=-1) + 1)])


def _unquoted(token: str) -> str:
    if token.startswith("'") and token.endswith("'") and len(token) > 1:
        return token[1:-1].replace("''", "'")
    if token.startswith('"') and token.endswith('"') and len(token) > 1:
        return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", _unescaped, token[1:-1])
    return token


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xu" and len(code) > 1:
        return chr(int(code[1:], 16))
    return {"t": "\t", "n": "\n", "r": "\r"}.get(code, code)


def _line_tokens(text: str) -> Iterator[str]:
    """A token a line; what stands behind a tab, such as a count, is left out."""
    return (line.rstrip("\r").split("\t")[0] for line in text.split("\n") if line.rstrip("\r"))


DICTIONARIES = {"fairseq": _fairseq_tokens, "marian": _marian_tokens, "lines": _line_tokens}


def _json(state: Mapping[str, Any]) -> bytes:
    return json.dumps(state, ensure_ascii=False, indent=1).encode()
