"""Folders of Hugging Face transformers: config.json, generation_config.json, weights in one file or in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfm_export.checkpoints import bart, t5
from tfm_export.checkpoints.files import CONFIG, GENERATION_CONFIG, Contents, read_json
from tfm_export.checkpoints.generation import GenerationSettings, apply_generation, generation_settings, special_id
from tfm_export.checkpoints.partial import PartialCheckpoint
from tfm_export.checkpoints.wrapping import Weights
from tfm_export.errors import CheckpointError
from tfm_export.quotation import quote

FAMILIES: dict[str, Callable[[Contents, Weights, Mapping[str, Any]], PartialCheckpoint]] = {
    **dict.fromkeys(bart.FAMILIES, bart.read),
    **dict.fromkeys(t5.FAMILIES, t5.read),
}
# What transformers does where the file that it reads lacks a special id.
MISSING = {"bos": "transformers refuses", "eos": "lets transformers end no target before it is the longest"}
# Encoder-decoders of other things than tokens.
NOT_TEXT = {
    "speech": [
        "whisper",
        "speech_to_text",
        "speech_to_text_2",
        "speecht5",
        "speech-encoder-decoder",
        "moonshine",
        "moonshine_streaming",
        "seamless_m4t",
        "seamless_m4t_v2",
        "musicgen",
        "musicgen_melody",
        "pop2piano",
    ],
    "images": ["vision-encoder-decoder", "pix2struct", "trocr", "florence2", "kosmos-2", "udop"],
}

# What settings must be where they are not null; others are checked where they are used.
WHOLE = (
    "encoder_attention_heads", "decoder_attention_heads", "max_position_embeddings", "n_positions", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "pad_token_id", "decoder_start_token_id", "bos_token_id",
    "num_beams",
    "forced_bos_token_id", "relative_attention_max_distance", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "top_k",
)  # fmt: skip
ONE_OR_MORE = ("eos_token_id", "forced_eos_token_id")
LISTS = ("suppress_tokens", "begin_suppress_tokens")
SEQUENCES = ("bad_words_ids",)
BIASES = ("sequence_bias",)
TEXTS = ("model_type", "activation_function", "feed_forward_proj")


def _check_types(contents: Contents) -> None:
    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def ids_alone(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(one, list) and one and all(map(whole, one)) for one in value)

    def biases(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and ids_alone(value[:1])

    problems = []
    for file, values in ((CONFIG, contents.config), (GENERATION_CONFIG, contents.generation)):
        for name, value in values.items():
            several = isinstance(value, list) and bool(value) and all(map(whole, value))
            for names, fits, expected in (
                (WHOLE, whole(value), "a whole number"),
                (ONE_OR_MORE, whole(value) or several, "a whole number, or a list of some"),
                (LISTS, isinstance(value, list), "a list"),
                (SEQUENCES, ids_alone(value), "a list of lists of ids"),
                (
                    BIASES,
                    isinstance(value, list) and all(map(biases, value)),
                    "a list of lists of ids with a number each",
                ),
                (TEXTS, isinstance(value, str), "a text"),
            ):
                if name in names and value is not None and not fits:
                    problems.append(f"{contents.path}: {file} has {name} {quote(value)}, expected {expected}")
    if problems:
        raise CheckpointError(problems, "correct it")


def read(contents: Contents, weights: Weights, settings: Mapping[str, Any]) -> PartialCheckpoint | None:
    """What such a folder tells; None if it is something else.

    Raises:
        CheckpointError: its model is of no known family.
    """
    family = contents.config.get("model_type")
    if family is None:
        return None
    for what, types in NOT_TEXT.items():
        if family in types:
            raise CheckpointError(
                f"{contents.path} has model_type {family!r}: it takes or makes {what}, which is not supported",
                f"sources and targets must be tokens; known are {', '.join(FAMILIES)}",
            )
    _check_types(contents)
    if family not in FAMILIES:
        raise CheckpointError(
            f"{contents.path} has model_type {quote(family)}; known are {', '.join(FAMILIES)}",
            "write an adapter for it (examples/custom_model), or load the weights into a reference_model.Transformer "
            "and save that with reference_model.save_checkpoint",
        )
    found = FAMILIES[family](contents, weights, settings)
    found.files = contents.files
    generation = generation_settings(contents, settings.get("ignore_generation", []))
    _special_ids(found, contents, generation)
    apply_generation(found, contents, generation)
    return found


def _special_ids(found: PartialCheckpoint, contents: Contents, generation: GenerationSettings) -> None:
    wanted = {"pad": "pad_token_id", "bos": "decoder_start_token_id", "eos": "eos_token_id"}
    for name, theirs in wanted.items():
        value, origin = special_id(generation, contents, theirs)
        if name in MISSING.keys() - found.settings.keys() and value is not None and origin != generation.origin:
            found.notes.append(
                f"{generation.origin} has no {theirs}, which {MISSING[name]}: "
                f"the bundle takes {CONFIG}'s {quote(value)}"
            )
        if isinstance(value, list) and value:
            found.options["end_token"] = value
            value = value[0]
        if value is None:
            found.ask(name, f"{CONFIG} and {GENERATION_CONFIG} have no {theirs}")
        else:
            found.know(name, value, origin)
    if contents.config["model_type"] == "m2m_100" and found.value("bos") == found.value("pad") is not None:
        found.problems.append(
            f"decoder_start_token_id is the padding id {found.value('pad')}: this family gives padding no position, "
            "and all tokens after it another one; that is not supported"
        )
    unknown = _unknown_id(contents)
    if unknown is not None and unknown in [found.value(name) for name in wanted] and "unk" not in found.settings:
        found.notes.append(f"its tokenizer's unknown token is the special id {unknown} too: taken as none")
    elif unknown is not None:
        found.know("unk", unknown, "its tokenizer")
    found.know("source_ends_with_eos", True, "the tokenizers of this family")


def _unknown_id(contents: Contents) -> int | None:
    """The id of the unknown token, as the tokenizer's file has it."""
    if "tokenizer.json" in contents.files:
        model = read_json(contents.files["tokenizer.json"]).get("model")
        if not isinstance(model, dict):
            return None
        vocabulary, token = model.get("vocab"), model.get("unk_token")
        if isinstance(vocabulary, dict):
            found = vocabulary.get(token) if isinstance(token, str) else None
        else:
            found = model.get("unk_id")
    else:
        found = read_json(contents.files["vocab.json"]).get("<unk>") if "vocab.json" in contents.files else None
    return found if isinstance(found, int) else None
