"""What turns texts into ids, as the bundle's tokenizer folder: lists of tokens, subword models, tokenizer.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reference_model import TransformerConfig, Vocabulary
from tfm_export.checkpoints.files import read_json
from tfm_export.checkpoints.language_codes import LANGUAGE_CODES
from tfm_export.errors import CheckpointError
from tfm_export.quotation import quote, shorten
from tfm_export.text_files import MARK, decode_text

SIDES = ("source", "target")
PADDED_TO = (8, 16, 32, 64, 128)  # tables have more rows than tokens where they are padded to a multiple of these
MOST_SURPLUS = 8  # tokens of a tokenizer beyond the rows of the model, such as a mask that only training used
MOST_IDS = 10_000_000  # of a dictionary that writes its ids
# Of slow tokenizers: M2M-100's, PLBart's, mBART's; T5's and Pegasus's.
SENTENCE_PIECES = ("sentencepiece.bpe.model", "spiece.model", "spm.model")
M2M_100 = "sentencepiece.bpe.model"  # the name of its file
MADE_UP_WORDS = 8  # at the end of M2M-100's embedding, as its tokenizer has them
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
        return _own_tokenizer(files["tokenizer.json"], config)
    said: list[str] = []
    if {"source.spm", "target.spm", "vocab.json"} <= files.keys():
        names = {
            "source": "vocab.json",
            "target": "target_vocab.json" if "target_vocab.json" in files else "vocab.json",
        }
        tokens = {side: _by_id(files[name], side, _size(config, side), said) for side, name in names.items()}
        models = {side: files[f"{side}.spm"].read_bytes() for side in SIDES}
        return piece_files(models, tokens, language_codes=True), [*dict.fromkeys(said)]
    if {M2M_100, "vocab.json"} <= files.keys():
        return _m2m_100(files, config, said), said
    if pieces := [name for name in SENTENCE_PIECES if name in files]:
        unread = (
            f"the folder has {pieces[0]} and no tokenizer.json: only the code of transformers says which id a piece "
            "has, so the bundle takes ids, not texts. Save tokenizer.json with a fast tokenizer, or give subwords and "
            "tokens of both sides in --config"
        )
        return {}, [unread]
    missing = (
        "the folder has no tokenizer.json, nor source.spm, target.spm and vocab.json: the bundle takes ids, not texts; "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) of a fast tokenizer writes tokenizer.json"
    )
    return {}, [missing]


def _m2m_100(files: Mapping[str, Path], config: TransformerConfig, said: list[str]) -> dict[str, bytes]:
    """The tokenizer folder of M2M-100: languages are behind the tokens of vocab.json, and sources begin with one."""
    settings = read_json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    codes = LANGUAGE_CODES.get(settings.get("language_codes", "m2m100"))
    if codes is None:
        raise CheckpointError(
            f"{files['tokenizer_config.json']} has language_codes {quote(settings['language_codes'])}; known are "
            f"{', '.join(LANGUAGE_CODES)}"
        )
    ids = read_json(files["vocab.json"])
    ids |= {f"__{code}__": len(ids) + i for i, code in enumerate(codes)}
    size = min(_size(config, side) for side in SIDES)
    if 0 < (missing := size - len(ids)) <= MADE_UP_WORDS:
        ids |= {f"madeupword{i:04}": len(ids) + i for i in range(missing)}
    tokens = _named(ids, "source and target", size, files["vocab.json"], said)
    models = dict.fromkeys(SIDES, files[M2M_100].read_bytes())
    return piece_files(models, dict.fromkeys(SIDES, tokens), source_language=settings.get("src_lang") or "en")


def _own_tokenizer(path: Path, config: TransformerConfig) -> tuple[dict[str, bytes], list[str]]:
    state = read_json(path)
    model, added = state.get("model"), state.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
        raise CheckpointError(f"{path} is no tokenizer of Hugging Face: it has no model with a vocab", "save it again")
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    ids = [*numbers, *(token.get("id", -1) for token in added if isinstance(token, dict))]
    smallest = min(_size(config, side) for side in SIDES)
    if any(type(i) is not int for i in ids):
        raise CheckpointError(f"{path} has ids that are no integers", "take the model's own")
    content, said = path.read_bytes(), []
    most = max(ids, default=-1) + 1
    if most > smallest:
        cut = _without_surplus(state, smallest)
        if cut is None:
            raise CheckpointError(
                f"{path} has {most} tokens, the embedding {smallest} rows: it has ids that the model's {smallest} rows "
                "have not",
                "take the model's own",
            )
        content = _json(cut)
        said = [f"the tokenizer has {most} tokens, the embedding {smallest} rows: those without a row were left out"]
    elif most < smallest:
        said = [f"the tokenizer has {most} tokens, the embedding {smallest} rows: the others have no text"]
    return {"tokenizer.json": _json({"kind": "huggingface"}), "huggingface.json": content}, said


def _without_surplus(state: Mapping[str, Any], size: int) -> dict[str, Any] | None:
    """A tokenizer without the few tokens that the model has no rows for; None if it needs them, or they are many."""
    model, added = state["model"], [token for token in state["added_tokens"] if isinstance(token, dict)]
    vocabulary = model["vocab"]
    names = [token.get("content") for token in added if token.get("id", -1) >= size]
    if isinstance(vocabulary, dict):
        kept: Any = {token: i for token, i in vocabulary.items() if i < size}
        names += [token for token, i in vocabulary.items() if i >= size]
    else:
        kept = vocabulary[:size]
        names += [piece[0] if isinstance(piece, list) and piece else None for piece in vocabulary[size:]]
    needed = json.dumps([state.get("post_processor"), model.get("unk_token")], ensure_ascii=False)
    merges = {
        "".join(pair) if isinstance(pair, list) else str(pair).replace(" ", "") for pair in model.get("merges") or ()
    }
    if len({*names}) > MOST_SURPLUS or any(
        not isinstance(name, str) or json.dumps(name, ensure_ascii=False) in needed or name in merges for name in names
    ):
        return None
    return {
        **state,
        "model": {**model, "vocab": kept},
        "added_tokens": [token for token in added if token.get("id", -1) < size],
    }


def given_vocabulary(
    path: Path, settings: Mapping[str, Any], config: TransformerConfig, dictionary: str
) -> tuple[dict[str, bytes], list[str]]:
    """The tokenizer folder of the tokens and subword models in the settings, and what there is to say of it.

    Both are empty if there are none.

    Args:
        path: of the checkpoint, for messages.
        settings: what the user said.
        config: the model's.
        dictionary: the form of dictionaries: "fairseq", "marian" or "lines".

    Raises:
        CheckpointError: a list is missing or of another length than its embedding, or names a token twice; a file is
            not there.
    """
    problems: list[str] = []
    tokens = {side: _side_tokens(side, settings, dictionary, problems) for side in SIDES}
    if not any(tokens.values()) and not problems:
        return {}, []
    said: list[str] = []
    for side in SIDES:
        found, size = tokens[side], _size(config, side)
        padded = found is not None and f"{side}_tokens" not in settings and is_padded(len(found), size)
        if found is not None and padded:
            said.append(_padding_note(f"the {side} dictionary", len(found), size))
        problems += token_problems(side, found, size, padded=padded)
    subwords = {side: settings.get(f"{side}_subwords") for side in SIDES}
    models = {side: _bytes(Path(name), problems) for side, name in subwords.items() if name}
    if len(models) == 1:
        problems.append("source_subwords and target_subwords go together; both may be the same file")
    if problems:
        raise CheckpointError([f"{path}: {problem}" for problem in problems], "give every id its token, in order")
    named = {side: _filled(tokens[side] or [], _size(config, side)) for side in SIDES}
    if models:
        return piece_files(models, named), said
    splits = {side: settings.get(f"{side}_split", "words") for side in SIDES}
    lowercase = {"source": settings.get("lowercase", False), "target": False}
    sides = {side: {"tokens": named[side], "split": splits[side], "lowercase": lowercase[side]} for side in SIDES}
    return vocabulary_files(sides), said


def given_tokens(settings: Mapping[str, Any], dictionary: str) -> dict[str, list[str]]:
    """The tokens of each side that the settings give, as far as they can be read; see `given_vocabulary`."""
    found = {side: _side_tokens(side, settings, dictionary, []) for side in SIDES}
    return {side: tokens for side, tokens in found.items() if tokens}


def tokens_by_id(files: Mapping[str, bytes]) -> dict[str, dict[int, str]]:
    """The tokens of "source" and "target" that a tokenizer folder has, by id; none where it is empty."""
    state = json.loads(files["tokenizer.json"]) if files else {}
    if state.get("kind") != "huggingface":
        return {side: dict(enumerate(state.get(side, {}).get("tokens", ()))) for side in SIDES}
    own = json.loads(files["huggingface.json"])
    vocabulary = own["model"]["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((t[0], i) for i, t in enumerate(vocabulary))
    found = {i: token for token, i in pairs} | {token["id"]: token["content"] for token in own["added_tokens"]}
    return dict.fromkeys(SIDES, found)


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
        path = Path(settings[f"{side}_dictionary"])
        text = decode_text(_bytes(path, problems), errors="replace")
        try:
            return list(DICTIONARIES[settings.get("dictionary_format", dictionary)](text))
        except ValueError as problem:
            problems.append(f"{path}: {problem}")
    return None


def is_padded(tokens: int, rows: int) -> bool:
    """Whether an embedding has more rows than tokens because it was padded to a multiple of 8, 16, 32, 64 or 128."""
    return tokens < rows and any(-(-tokens // multiple) * multiple == rows for multiple in PADDED_TO)


def _padding_note(what: str, tokens: int, rows: int) -> str:
    return f"{what} has {tokens} tokens, the embedding {rows} rows: the last {rows - tokens} are taken for padding"


def token_problems(side: str, tokens: Sequence[str] | None, size: int, *, padded: bool = False) -> list[str]:
    """What keeps a list of tokens from being that of an embedding of so many rows, the last of which may be padding."""
    if tokens is None:
        return [f"{side}_tokens is missing, or {side}_dictionary: both sides need their tokens"]
    problems = []
    if len(tokens) != size and not padded:
        problems.append(f"{side}_tokens has {len(tokens)} tokens, the embedding {size} rows")
    try:
        Vocabulary(tuple(tokens), "words")
    except ValueError as problem:
        problems.append(f"{side}_tokens: {problem}")
    return problems


def _filled(tokens: Sequence[str], size: int) -> list[str]:
    """Tokens with made-up names for the rows that have none."""
    return [*tokens, *(f"<{i}>" for i in range(len(tokens), size))]


def _by_id(path: Path, side: str, size: int, said: list[str]) -> list[str]:
    return _named(read_json(path), side, size, path, said)


def _named(ids: Mapping[str, Any], side: str, size: int, path: Path, said: list[str]) -> list[str]:
    """The token of every id, with a made-up name for those that have none."""
    names = {i: token for token, i in ids.items() if type(i) is int}
    most = max(names, default=-1) + 1
    if len(names) != len(ids) or any(not 0 <= i < size for i in names):
        raise CheckpointError(
            f"{path} must give every token an id of its own from 0 to {size - 1}, and its largest is {most - 1}",
            "copy it again",
        )
    if is_padded(most, size):
        said.append(_padding_note(path.name, most, size))
    elif most != size:
        raise CheckpointError(
            f"{path} has {most} tokens, the {side} embedding {size} rows", "take the vocab.json of this model"
        )
    return [names.get(i, f"<{i}>") for i in range(size)]


def _bytes(path: Path, problems: list[str]) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as problem:  # ValueError: a name that no disk can have
        why = problem.strerror if isinstance(problem, OSError) else problem
        problems.append(f"{shorten(os.path.abspath(path))} cannot be read: {why}")
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
        if colon and re.fullmatch(r"\s*[0-9]{1,9}\s*", number):
            found[int(number)] = _unquoted(token)
    if max(found, default=0) >= MOST_IDS:
        raise ValueError(f"it has the id {max(found)}, more than {MOST_IDS:,}")
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
