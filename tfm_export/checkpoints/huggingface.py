"""Folders of Hugging Face transformers: config.json, generation_config.json, weights in one file or in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfm_export.checkpoints import bart, t5
from tfm_export.checkpoints.files import Contents, read_json
from tfm_export.checkpoints.partial import PartialCheckpoint
from tfm_export.checkpoints.wrapping import Weights
from tfm_export.errors import CheckpointError
from tfm_export.quotation import quote

FAMILIES: dict[str, Callable[[Contents, Weights, Mapping[str, Any]], PartialCheckpoint]] = {
    **dict.fromkeys(bart.FAMILIES, bart.read),
    **dict.fromkeys(t5.FAMILIES, t5.read),
}
CONFIG, GENERATION = "config.json", "generation_config.json"

# Their generation settings and our options of the same meaning.
SAME = {
    "num_beams": "beam_size",
    "length_penalty": "length_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "forced_bos_token_id": "forced_bos",
    "min_new_tokens": "min_decoding_length",
    "bad_words_ids": "suppress_sequences",
    "early_stopping": "early_stopping",
}
# Settings that would change what comes out and have no counterpart, with the value at which they do nothing.
WITHOUT_COUNTERPART = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "do_sample": False,
    "num_return_sequences": 1,
    "renormalize_logits": False,
}


# What settings must be where they are not null; others are checked where they are used.
WHOLE = (
    "encoder_attention_heads", "decoder_attention_heads", "max_position_embeddings", "n_positions", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "pad_token_id", "decoder_start_token_id", "num_beams",
    "forced_bos_token_id", "relative_attention_max_distance", "no_repeat_ngram_size",
)  # fmt: skip
ONE_OR_MORE = ("eos_token_id", "forced_eos_token_id")
LISTS = ("suppress_tokens", "bad_words_ids")
TEXTS = ("model_type", "activation_function", "feed_forward_proj")


def _check_types(contents: Contents) -> None:
    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    problems = []
    for file, values in ((CONFIG, contents.config), (GENERATION, contents.generation)):
        for name, value in values.items():
            several = isinstance(value, list) and bool(value) and all(map(whole, value))
            for names, fits, expected in (
                (WHOLE, whole(value), "a whole number"),
                (ONE_OR_MORE, whole(value) or several, "a whole number, or a list of some"),
                (LISTS, isinstance(value, list), "a list"),
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
    _check_types(contents)
    if family not in FAMILIES:
        raise CheckpointError(
            f"{contents.path} has model_type {quote(family)}; known are {', '.join(FAMILIES)}",
            "write an adapter for it (examples/custom_model), or load the weights into a reference_model.Transformer "
            "and save that with reference_model.save_checkpoint",
        )
    found = FAMILIES[family](contents, weights, settings)
    found.files = contents.files
    _special_ids(found, contents)
    _generation(found, contents)
    return found


def _special_ids(found: PartialCheckpoint, contents: Contents) -> None:
    wanted = {"pad": "pad_token_id", "bos": "decoder_start_token_id", "eos": "eos_token_id"}
    for name, theirs in wanted.items():
        value, origin = _setting(contents, theirs)
        if isinstance(value, list) and value:
            found.options["end_token"] = value
            value = value[0]
        if value is None:
            found.ask(name, f"{CONFIG} and {GENERATION} have no {theirs}")
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


def _setting(contents: Contents, name: str) -> tuple[Any, str]:
    """A setting of generation, which old models have in their config.json, and where it stands."""
    for file, values in ((GENERATION, contents.generation), (CONFIG, contents.config)):
        if values.get(name) is not None:
            return values[name], file
    return None, CONFIG


def _generation(found: PartialCheckpoint, contents: Contents) -> None:
    found.options["compatibility"] = "huggingface"
    for theirs, ours in SAME.items():
        value, origin = _setting(contents, theirs)
        if value is not None and ours in {"beam_size", "length_penalty"}:
            found.know(ours, value, origin)
        elif value is not None and (value or ours == "forced_bos"):
            found.options[ours] = value
    suppressed, _ = _setting(contents, "suppress_tokens")
    if suppressed:
        sequences = [*found.options.get("suppress_sequences", []), *([token] for token in suppressed)]
        found.options["suppress_sequences"] = sequences
    forced_end, _ = _setting(contents, "forced_eos_token_id")
    if forced_end is not None:
        found.options["forced_eos"] = forced_end[0] if isinstance(forced_end, list) else forced_end
    _lengths(found, contents)
    for name, neutral in WITHOUT_COUNTERPART.items():
        value, origin = _setting(contents, name)
        if value not in (None, neutral):
            found.notes.append(f"{origin} has {name} {quote(value)}, which is not among the bundle's defaults")


def _lengths(found: PartialCheckpoint, contents: Contents) -> None:
    """Their max_length and min_length count the start token; what counts new tokens alone goes before them."""
    longest, origin = _setting(contents, "max_new_tokens")
    if longest is None:
        longest, origin = _setting(contents, "max_length")
        longest = None if longest is None else longest - 1
    if isinstance(longest, int) and longest >= 1:
        found.know("generation_length", longest, origin)
    shortest, _ = _setting(contents, "min_length")
    if "min_decoding_length" not in found.options and isinstance(shortest, int) and shortest > 1:
        found.options["min_decoding_length"] = shortest - 1
    # Theirs may ask for more than there may be: the end comes at the most then, and only there.
    most = found.value("generation_length")
    if most is not None and found.options.get("min_decoding_length", 0) > most:
        found.options["min_decoding_length"] = most
