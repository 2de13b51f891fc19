"""Lists of tokens that come with a checkpoint, as the bundle's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reference_model import TransformerConfig, Vocabulary
from tfm_export.errors import CheckpointError

SPLITS = ("characters", "words")


def vocabulary_files(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """The tokenizer folder of two lists of tokens.

    Args:
        sides: "source" and "target", each with tokens, split and lowercase.
    """
    return {"tokenizer.json": json.dumps({"kind": "vocabulary", **sides}, ensure_ascii=False, indent=1).encode()}


def given_vocabulary(path: Path, settings: Mapping[str, Any], config: TransformerConfig) -> dict[str, bytes]:
    """The tokenizer folder of the lists of tokens in the settings; empty if there are none.

    Raises:
        CheckpointError: a list is missing, is not as long as its embedding, or names a token twice.
    """
    names = ("source_tokens", "target_tokens")
    if not any(name in settings for name in names):
        return {}
    problems = [f"{name} is missing: both sides need their tokens" for name in names if name not in settings]
    sizes = {"source": config.source_vocabulary_size, "target": config.target_vocabulary_size}
    sides = {}
    for side, size in sizes.items():
        tokens: Sequence[str] = settings.get(f"{side}_tokens", ())
        split, lowercase = settings.get(f"{side}_split", "words"), settings.get("lowercase", False)
        if tokens and len(tokens) != size:
            problems.append(f"{side}_tokens has {len(tokens)} tokens, the embedding {size} rows")
        try:
            Vocabulary(tuple(tokens), split)
        except ValueError as problem:
            problems.append(f"{side}_tokens: {problem}")
        sides[side] = {"tokens": list(tokens), "split": split, "lowercase": lowercase and side == "source"}
    if problems:
        raise CheckpointError([f"{path}: {problem}" for problem in problems], "give every id its token, in order")
    return vocabulary_files(sides)
