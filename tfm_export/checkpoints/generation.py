"""How a folder of Hugging Face is decoded by default: as transformers' `generate` decodes it.

Of generation_config.json and config.json, transformers reads one: the first where it is there, whatever it lacks, and
otherwise the second. What no file says has the defaults of `generate`, not those of this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tfm_export.checkpoints.files import CONFIG, GENERATION_CONFIG, Contents
from tfm_export.checkpoints.generation_keys import KEYS, SPECIAL
from tfm_export.checkpoints.partial import PartialCheckpoint
from tfm_export.quotation import quote, shorten, shorten_all

DEFAULT_NEW_TOKENS = 20  # of a target where nothing says how long it may be
DEFAULT_TOP_K = 50
# Keys that are applied as they are, and the options that they become.
SAME = {
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty": "encoder_repetition_penalty",
    "exponential_decay_length_penalty": "exponential_decay_length_penalty",
    "sequence_bias": "sequence_bias",
    "renormalize_logits": "renormalize_logits",
    "forced_bos_token_id": "forced_bos",
    "early_stopping": "early_stopping",
}
FACTS = {"num_beams": "beam_size", "length_penalty": "length_penalty"}
PARTS = ("decoder", "generator", "text_config")  # of a config.json, that may have what it lacks


@dataclass(frozen=True)
class GenerationSettings:
    """What transformers reads.

    Attributes:
        origin: the file that it reads.
        values: what is there and not null.
        ignored: what the user had left out.
    """

    origin: str
    values: dict[str, Any]
    ignored: dict[str, Any]


def generation_settings(contents: Contents, ignore: list[str]) -> GenerationSettings:
    """What transformers reads of a folder.

    Args:
        contents: the folder's.
        ignore: keys that are to be left out.
    """
    if GENERATION_CONFIG in contents.files:
        origin, values = GENERATION_CONFIG, contents.generation
    else:
        parts = (contents.config.get(part) for part in PARTS)
        part: dict[str, Any] = next((part for part in parts if part and isinstance(part, dict)), {})
        found = {**part, **{name: value for name, value in contents.config.items() if value is not None}}
        origin, values = CONFIG, {name: value for name, value in found.items() if name in KEYS}
        if values.pop("force_bos_token_to_be_generated", False) and "bos_token_id" in values:
            values["forced_bos_token_id"] = values["bos_token_id"]
    there = {name: value for name, value in values.items() if value is not None}
    return GenerationSettings(
        origin=origin,
        values={name: value for name, value in there.items() if name not in ignore},
        ignored={name: there[name] for name in ignore if name in there},
    )


def special_id(settings: GenerationSettings, contents: Contents, name: str) -> tuple[Any, str]:
    """A special id and where it stands: in the file that transformers reads, or else in config.json."""
    names = (name, "bos_token_id") if name == "decoder_start_token_id" else (name,)
    for key in names:
        if key in settings.values:
            return settings.values[key], settings.origin
    return contents.config.get(name), CONFIG


def apply_generation(found: PartialCheckpoint, contents: Contents, settings: GenerationSettings) -> None:
    """Put into a checkpoint's options what `generate` would do by default, and note or refuse what it cannot."""
    values, origin = settings.values, settings.origin
    found.options["compatibility"] = "huggingface"
    for theirs, ours in FACTS.items():
        if theirs in values:
            found.know(ours, values[theirs], origin)
    for theirs, ours in SAME.items():
        if theirs in values and values[theirs] not in KEYS[theirs].neutral:
            found.options[ours] = values[theirs]
    problems = [*_suppressed(found, values), *_forced(found, values), *_sampling(found, values)]
    found.problems += [f"{origin} has {problem}" for problem in problems]
    _lengths(found, contents, settings)
    found.problems += [f"{origin} has {problem}" for problem in _beyond_vocabulary(found, values)]
    _tell(found, contents, settings)


def _suppressed(found: PartialCheckpoint, values: dict[str, Any]) -> Iterator[str]:
    size = _vocabulary(found)
    ends = _ends(found)
    sequences = []
    if "bad_words_ids" in values:
        sequences = [sequence for sequence in values["bad_words_ids"] if sequence not in [[end] for end in ends]]
        if not sequences:
            yield f"bad_words_ids {quote(values['bad_words_ids'])}: transformers takes no list of end tokens alone"
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        # Theirs compare these with the ids that there are: others do no harm, such as -1 for none.
        tokens = [token for token in values.get(name, []) if size is None or token in range(size)]
        if name == "begin_suppress_tokens" and tokens:
            found.options[name] = tokens
        elif name == "suppress_tokens":
            sequences += [[token] for token in tokens]
            for forced in ("forced_bos_token_id", "forced_eos_token_id"):
                if values.get(forced) in tokens:
                    yield f"{forced} {quote(values[forced])} among suppress_tokens, which leaves no token there"
    if sequences:
        found.options["suppress_sequences"] = sequences


def _forced(found: PartialCheckpoint, values: dict[str, Any]) -> Iterator[str]:
    ends = _ends(found)
    if values.get("forced_bos_token_id") in ends:
        yield f"forced_bos_token_id {quote(values['forced_bos_token_id'])}, which ends a target right away"
    forced_end = values.get("forced_eos_token_id")
    several = sorted(set(forced_end)) if isinstance(forced_end, list) else [forced_end]
    if len(several) > 1 and values.get("num_beams", 1) > 1:
        yield f"forced_eos_token_id {quote(forced_end)}: of several, which are all as likely, a beam search takes any"
    if forced_end is not None:
        found.options["forced_eos"] = several[0]


def _sampling(found: PartialCheckpoint, values: dict[str, Any]) -> Iterator[str]:
    if values.get("do_sample") is not True:
        return
    if values.get("num_beams", 1) > 1:
        yield (
            f"do_sample true and num_beams {quote(values['num_beams'])}: hypotheses are not drawn here; "
            "--ignore-generation do_sample searches with beams, --ignore-generation num_beams draws tokens"
        )
        return
    top_k, size = values.get("top_k", DEFAULT_TOP_K), _vocabulary(found)
    found.options["sampling_topk"] = top_k if size is None or not isinstance(top_k, int) else min(top_k, size)
    if top_k != 1:
        for theirs, ours in {"top_p": "sampling_topp", "temperature": "sampling_temperature"}.items():
            if values.get(theirs, 1) != 1:
                found.options[ours] = values[theirs]


def _lengths(found: PartialCheckpoint, contents: Contents, settings: GenerationSettings) -> None:
    """Their max_length and min_length count the start token; what counts new tokens alone goes before them."""
    values, origin = settings.values, settings.origin
    limit = found.value("longest_target", found.value("max_length"))
    if "max_new_tokens" in values or "max_length" in values:
        name = "max_new_tokens" if "max_new_tokens" in values else "max_length"
        longest = values[name] - (name == "max_length")
        if longest < 1:
            found.problems.append(
                f"{origin} has {name} {quote(values[name])}, which leaves no token: transformers refuses it"
            )
            return
        if limit is not None and longest > limit:
            found.notes.append(f"{origin} has {name} {quote(values[name])}: the model's targets end at {limit} tokens")
    else:
        positions = contents.config.get("max_position_embeddings")
        longest = min([DEFAULT_NEW_TOKENS] + ([positions - 1] if isinstance(positions, int) else []))
        found.notes.append(
            f"{origin} has neither max_length nor max_new_tokens: targets end at {longest} tokens, as those of "
            "transformers' generate do; max_decoding_length (run --max-length) allows longer ones"
        )
    found.know("generation_length", longest, origin)
    shortest = values.get("min_new_tokens", values.get("min_length", 0) - 1)
    # Theirs may ask for more than there may be: the end comes at the most then, and only there.
    shortest = min(shortest, longest if limit is None else min(longest, limit))
    if shortest > 0:
        found.options["min_decoding_length"] = shortest


def _beyond_vocabulary(found: PartialCheckpoint, values: dict[str, Any]) -> Iterator[str]:
    size, sources, options = _vocabulary(found), found.value("source_vocabulary_size"), found.options
    if size is None:
        return
    biases = values.get("sequence_bias", [])
    named = {
        "bad_words_ids": [i for sequence in values.get("bad_words_ids", []) for i in sequence],
        "sequence_bias": [i for pair in biases for i in pair[0]],
        "forced_bos_token_id": [options["forced_bos"]] if "forced_bos" in options else [],
        "forced_eos_token_id": [options["forced_eos"]] if "forced_eos" in options else [],
    }
    for name, ids in named.items():
        if wrong := sorted({i for i in ids if i not in range(size)}):
            yield f"{name} with ids that the vocabulary of {size} lacks: {shorten_all(wrong)}"
    for name in ("encoder_no_repeat_ngram_size", "encoder_repetition_penalty"):
        if name in options and sources is not None and sources > size:
            yield f"{name}, which needs one vocabulary: sources have {sources} tokens, targets have {size}"


def _tell(found: PartialCheckpoint, contents: Contents, settings: GenerationSettings) -> None:
    """Refuse and note, by name, what is not applied."""
    values, origin = settings.values, settings.origin
    for name, value in values.items():
        key = KEYS.get(name)
        said = f"{origin} has {shorten(name)} {quote(value)}"
        if key is None:
            found.notes.append(f"{said}, a key that tfm-export does not know: what it changes is not applied")
        elif value in key.neutral or key.treatment == "no effect":
            continue
        elif key.sampling and values.get("do_sample") is not True:
            found.notes.append(f"{said}, which has no effect without do_sample")
        elif key.treatment == "refused":
            found.problems.append(f"{said}: {key.text}; --ignore-generation {name} leaves it out")
        elif key.treatment == "noted":
            found.notes.append(f"{said}, which is not applied: {key.text}")
    for name, value in settings.ignored.items():
        found.notes.append(f"{origin} has {name} {quote(value)}, which is ignored, as the settings say")
    found.problems += [
        f"ignore_generation names {name}, which {origin} does not have"
        for name in found.settings.get("ignore_generation", ())
        if name not in settings.ignored
    ]
    if origin == GENERATION_CONFIG and (unread := _unread(contents, values)):
        found.notes.append(f"{CONFIG} has {shorten_all(unread)}, which transformers does not read beside {origin}")
    if tasks := contents.config.get("task_specific_params"):
        tasks = shorten_all(tasks) if isinstance(tasks, dict) else quote(tasks)
        found.notes.append(f"{CONFIG} has task_specific_params ({tasks}), which generate does not read: not applied")


def _unread(contents: Contents, values: dict[str, Any]) -> list[str]:
    """What config.json says of generation that is not what holds."""
    return [
        f"{name} {quote(value)}"
        for name, value in contents.config.items()
        if (key := KEYS.get(name)) is not None
        and key.treatment != "no effect"
        and name not in SPECIAL
        and value is not None
        and value != values.get(name)
        and not (value in key.neutral and name not in values)
    ]


def _vocabulary(found: PartialCheckpoint) -> int | None:
    size: int | None = found.value("target_vocabulary_size")
    return size


def _ends(found: PartialCheckpoint) -> list[int]:
    """The end tokens: several, or one."""
    ends: list[int] = found.options.get("end_token", [found.value("eos")])
    return ends
