"""What a user can say of a model that its file does not: from a JSON file and options, checked by name and type."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from reference_model import TransformerConfig
from reference_model.config import ACTIVATIONS, NORMS, POSITIONS
from tfm_export.checkpoints.files import read_json
from tfm_export.errors import CheckpointError
from tfm_export.quotation import quote

CHOICES = {
    "activation": ACTIVATIONS,
    "positions": POSITIONS,
    "norm": NORMS,
    "dictionary_format": ("fairseq", "marian", "lines"),
    "source_split": ("characters", "words"),
    "target_split": ("characters", "words"),
}
FILES = ("source_dictionary", "target_dictionary", "source_subwords", "target_subwords")
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a string"),
    "map": ((dict,), "an object with strings as values"),
    "list": ((list,), "a list of strings"),
}


@dataclass(frozen=True)
class Setting:
    """One thing that can be said of a model.

    Attributes:
        kind: of its value, a key of `KINDS`.
        question: what it answers.
        option: the command line's option for it; None where only the file of settings can say it.
    """

    kind: str
    question: str
    option: str | None = None


# What the shapes of weights cannot tell, in the order in which it is asked for.
ASKED = {
    "heads": Setting("int", "how many attention heads", "--heads N"),
    "norm_first": Setting("bool", "whether a sublayer's input is normalised, or its sum", "--norm-first/--norm-last"),
    "activation": Setting("str", "the feed-forward's activation", "--activation NAME"),
    "positions": Setting("str", "how positions enter", "--positions NAME"),
    "scale_embeddings": Setting(
        "bool", "whether embeddings are multiplied by sqrt(d_model)", "--scale-embeddings/--no-scale-embeddings"
    ),
    "max_length": Setting("int", "the longest source, and target, in tokens", "--max-length N"),
    "layer_norm_epsilon": Setting("float", "what is added to the variance", "--layer-norm-epsilon X"),
    "pad": Setting("int", "the id that fills short targets and sources", "--pad ID"),
    "bos": Setting("int", "the id that the decoder starts from", "--bos ID"),
    "eos": Setting("int", "the id that ends a target", "--eos ID"),
    "unk": Setting("int", "the id of unknown tokens", "--unk ID"),
    "source_pad": Setting("int", "the id that fills short sources, if it is not pad", "--source-pad ID"),
    "source_bos": Setting("int", "the id that sources begin with, if it is not bos", "--source-bos ID"),
    "source_eos": Setting("int", "the id that sources end with, if it is not eos", "--source-eos ID"),
    "source_unk": Setting("int", "the id of unknown tokens in sources, if it is not unk", "--source-unk ID"),
    "source_starts_with_bos": Setting(
        "bool", "whether sources begin with bos", "--source-starts-with-bos/--source-starts-without-bos"
    ),
    "source_ends_with_eos": Setting(
        "bool", "whether sources end with eos", "--source-ends-with-eos/--source-ends-without-eos"
    ),
    "weights": Setting("str", "where in the file the weights are", "--weights PLACE"),
}
# What has an option, and is asked for by no checkpoint, and what is for the file of settings alone.
OTHERS = {
    "keys": Setting("map", "which weight of the file is which of the reference model, by their names"),
    "ignore": Setting(
        "list",
        "weights of the file that are of no use, by name; * stands for any characters",
        "--ignore-weights PATTERN",
    ),
    "ignore_generation": Setting(
        "list", "keys of generation_config.json that are not to be applied", "--ignore-generation KEY"
    ),
    "beam_size": Setting("int", "hypotheses kept at each step, by default"),
    "length_penalty": Setting("float", "the exponent by which length divides a score, by default"),
    "source_tokens": Setting("list", "the source's tokens in the order of their ids"),
    "target_tokens": Setting("list", "the target's tokens in the order of their ids"),
    "source_dictionary": Setting("str", "a file with the source's tokens in the order of their ids"),
    "target_dictionary": Setting("str", "a file with the target's tokens in the order of their ids"),
    "dictionary_format": Setting("str", "the form of those files: fairseq, marian or lines"),
    "source_subwords": Setting(
        "str", "the file of the source's subword model: SentencePiece's, or subword-nmt's codes"
    ),
    "target_subwords": Setting("str", "the file of the target's subword model"),
    "source_split": Setting("str", "what tokens of sources are: characters or words"),
    "target_split": Setting("str", "what tokens of targets are: characters or words"),
    "lowercase": Setting("bool", "whether texts are put in lower case"),
}
CONFIGURATION = {
    field.name: Setting(str(field.type), "see reference_model.TransformerConfig") for field in fields(TransformerConfig)
}
SETTINGS = {**CONFIGURATION, **ASKED, **OTHERS}


def check_settings(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Settings after a check of their names and types.

    Args:
        values: by name; None stands for what was not said.
        origin: where they come from, for messages.

    Raises:
        CheckpointError: naming every one that does not fit.
    """
    given = {name: value for name, value in values.items() if value is not None}
    problems = [f"{origin}: {problem}" for name, value in given.items() if (problem := setting_problem(name, value))]
    if problems:
        raise CheckpointError(problems, "docs/checkpoints.md lists the settings")
    return given


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a JSON file; the files that it names by relative paths are beside it.

    Raises:
        CheckpointError: it is not such a file, or names or types do not fit.
    """
    settings = check_settings(read_json(path), str(path))
    return {name: str(path.parent / value) if name in FILES else value for name, value in settings.items()}


def setting_problem(name: str, value: Any) -> str | None:
    """What keeps a value from being that of a setting, by name, type and choice; None if nothing does."""
    setting = SETTINGS.get(name)
    if setting is None:
        near = difflib.get_close_matches(name, SETTINGS, 1)
        return f"there is no setting {quote(name)}" + (f"; did you mean {quote(near[0])}?" if near else "")
    kinds, expected = KINDS[setting.kind]
    if not isinstance(value, kinds) or isinstance(value, bool) != (setting.kind == "bool"):
        return f"{name} must be {expected}, found {quote(value)}"
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if wrong := [part for part in parts if not _is_text(part)]:
        return f"{name} must be {expected}, found {quote(wrong[0])} in it"
    if name in CHOICES and value not in CHOICES[name]:
        return f"{name} must be one of {', '.join(CHOICES[name])}, found {quote(value)}"
    return None


def _is_text(part: Any) -> bool:
    """Whether it is a string without lone surrogates, which no file can hold."""
    return isinstance(part, str) and part.encode(errors="ignore").decode() == part


def how_to_say(name: str) -> str:
    """How a setting is given: its option, or its place in the file of settings."""
    return SETTINGS[name].option or f'"{name}" in --config FILE'
