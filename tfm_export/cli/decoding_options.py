"""The options of decoding on the command line: one table, from which the options, their help and their values come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

import click

from tfm_export.decoding.options import (
    BATCH_TYPES,
    COMPATIBILITIES,
    END_AFTER_PREFIX,
    LENGTH_FORMULAS,
    SCORE_CHANGES,
    DecodeOptions,
)

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def ids(text: str) -> list[int]:
    """Ids separated by spaces.

    Raises:
        ValueError: a word is not a number, which click makes a usage error.
    """
    return [int(word) for word in text.split()]


def biased_sequence(text: str) -> tuple[list[int], float]:
    """A sequence of ids, "=", and what is added to its score.

    Raises:
        ValueError: it is something else, which click makes a usage error.
    """
    sequence, _, bias = text.rpartition("=")
    return ids(sequence), float(bias)


def start_and_factor(text: str) -> tuple[int, float]:
    """Two numbers separated by a space.

    Raises:
        ValueError: it is something else, which click makes a usage error.
    """
    start, factor = text.split()
    return int(start), float(factor)


def token(text: str) -> int | str:
    """A token, or its id."""
    return int(text) if text.isascii() and text.isdecimal() else text


TARGET = click.STRING  # text, or ids with --ids
FLAG = click.BOOL


@dataclass(frozen=True)
class Entry:
    """An option of decoding.

    Attributes:
        type: of its value; FLAG for one that takes none.
        help: what it does.
        aliases: other names.
        default: what the help says of it, where it is not the default of `DecodeOptions`.
        multiple: it may be given several times.
    """

    type: Any
    help: str
    aliases: tuple[str, ...] = ()
    default: str | None = None
    multiple: bool = False


BUNDLE, COMPATIBLE = "the bundle's", "as --compatibility"

# The fields of `DecodeOptions`; all but `constraint`, which is a function.
ENTRIES = {
    "beam_size": Entry(click.INT, "Hypotheses kept at each step; 1 is greedy search or sampling.", default=BUNDLE),
    "num_hypotheses": Entry(click.INT, "Hypotheses to print for each text.", ("--n-best",)),
    "patience": Entry(click.FLOAT, "Search until beam size x patience hypotheses have finished."),
    "length_penalty": Entry(click.FLOAT, "Exponent of the length that divides a score.", default=BUNDLE),
    "coverage_penalty": Entry(click.FLOAT, "Prefer targets that attend to all of the source."),
    "max_decoding_length": Entry(
        click.INT, "Longest target in tokens, end token included.", ("--max-length",), default=BUNDLE
    ),
    "min_decoding_length": Entry(click.INT, "No end token before this many tokens.", ("--min-length",)),
    "target_prefix": Entry(TARGET, "The tokens that every target begins with."),
    "prefix_bias_beta": Entry(click.FLOAT, "Bias targets towards the prefix by this much, instead of forcing it."),
    "sampling_topk": Entry(click.INT, "Draw from this many of the best tokens; 0 draws from all, 1 takes the best."),
    "sampling_topp": Entry(click.FLOAT, "Draw from the best tokens whose probabilities add up to this."),
    "sampling_temperature": Entry(click.FLOAT, "Divides the log-probabilities before a draw."),
    "seed": Entry(click.INT, "The same seed draws the same tokens.", default="anew each time"),
    "repetition_penalty": Entry(click.FLOAT, "Makes tokens that are already in the target less likely."),
    "encoder_repetition_penalty": Entry(click.FLOAT, "Makes tokens of the source more likely, below 1 less likely."),
    "no_repeat_ngram_size": Entry(click.INT, "No n-gram of this size occurs twice; 0 allows all."),
    "encoder_no_repeat_ngram_size": Entry(
        click.INT, "No n-gram of the source of this size occurs in the target; 0 allows all."
    ),
    "disable_unk": Entry(FLAG, "Never generate the unknown token."),
    "suppress_sequences": Entry(
        TARGET, "Never generate this sequence; can be repeated.", ("--suppress",), multiple=True
    ),
    "begin_suppress_tokens": Entry(ids, "Ids of tokens that may not come first, after what is forced."),
    "sequence_bias": Entry(
        biased_sequence,
        'Ids of a sequence, "=", and what to add to the score of its last token after the others; can be repeated.',
        multiple=True,
    ),
    "exponential_decay_length_penalty": Entry(
        start_and_factor,
        "After this many tokens, the scores of end tokens grow by this factor with each token: two numbers.",
    ),
    "replace_unknowns": Entry(FLAG, "Replace an unknown token by the source token with the most attention."),
    "start_tokens": Entry(ids, "Ids of the tokens that the decoder starts from.", default="the model's start token"),
    "forced_bos": Entry(token, "The token that every target begins with, or its id."),
    "forced_eos": Entry(click.INT, "Id of the token that a target ends with at the length limit."),
    "end_token": Entry(ids, "Ids of the tokens that end a target.", default="the model's end token"),
    "return_end_token": Entry(FLAG, "Keep the end token in the tokens."),
    "return_alternatives": Entry(FLAG, "Print a target for each of the most likely tokens after the prefix."),
    "min_alternative_expansion_prob": Entry(
        click.FLOAT, "Leave out alternatives less likely than this; never the likeliest."
    ),
    "return_scores": Entry(FLAG, "Write the log-probability of every token to the JSON."),
    "return_attention": Entry(FLAG, "Write the attention weights of every token to the JSON."),
    "return_logits_vocab": Entry(FLAG, "Write the log-probabilities of the whole vocabulary to the JSON."),
    "compatibility": Entry(click.Choice(COMPATIBILITIES), "Whose decoding rules apply."),
    "stop_rule": Entry(click.Choice(COMPATIBILITIES), "When a beam search ends.", default=COMPATIBLE),
    "early_stopping": Entry(
        click.Choice(["true", "false", "never"]), "How Hugging Face's stop rule ends a search.", default="false"
    ),
    "length_formula": Entry(
        click.Choice(LENGTH_FORMULAS), "How the length of a target is computed.", default=COMPATIBLE
    ),
    "score_change": Entry(click.Choice(SCORE_CHANGES), "Where masks and penalties apply.", default=COMPATIBLE),
    "renormalize_logits": Entry(FLAG, "Normalise scores again after masks and penalties."),
    "end_after_prefix": Entry(
        click.Choice(END_AFTER_PREFIX), "Which candidates may end right after a forced prefix.", default=COMPATIBLE
    ),
    "start_token_repeats": Entry(
        FLAG, "Repetition rules count the start token as a token of the target.", default=COMPATIBLE
    ),
    "max_batch_size": Entry(click.INT, "The size of a batch, in units of --batch-type.", ("--batch-size",)),
    "batch_type": Entry(click.Choice(BATCH_TYPES), "What --batch-size counts: examples, or tokens of padded sources."),
}
_DEFAULTS = {field.name: field.default for field in fields(DecodeOptions)}


def decoding_options(command: CommandT) -> CommandT:
    """Give a command every option of decoding; it gets their values as keywords for `decoding_fields`."""
    for name, entry in reversed(ENTRIES.items()):
        command = _option(name, entry)(command)
    return command


def decoding_fields(values: Mapping[str, Any], *, targets_are_ids: bool) -> dict[str, Any]:
    """The fields of `DecodeOptions` that were given on the command line.

    Args:
        values: what the command got.
        targets_are_ids: not text.
    """
    given = {name: value for name, value in values.items() if value not in (None, ())}
    if targets_are_ids:
        given |= {
            name: _target_ids(name, given[name]) for name in given.keys() & {"target_prefix", "suppress_sequences"}
        }
    if "early_stopping" in given:
        given["early_stopping"] = {"true": True, "false": False}.get(given["early_stopping"], "never")
    return given


def _target_ids(name: str, value: str | tuple[str, ...]) -> list[int] | list[list[int]]:
    try:
        return ids(value) if isinstance(value, str) else [ids(one) for one in value]
    except ValueError as problem:
        raise click.UsageError(f"{flag(name)} takes ids with --ids: {problem}") from None


def flag(name: str) -> str:
    """The option of a field: beam_size is --beam-size."""
    return "--" + name.replace("_", "-")


def _option(name: str, entry: Entry) -> Callable[[CommandT], CommandT]:
    default = entry.default if entry.default is not None else _default_text(_DEFAULTS[name])
    text = entry.help + (f"  [default: {default}]" if default else "")
    if entry.type is not FLAG:
        return click.option(
            flag(name), *entry.aliases, name, type=entry.type, default=None, multiple=entry.multiple, help=text
        )
    # A flag that is on, or neither on nor off, unless told otherwise needs a name for off.
    names = flag(name) if _DEFAULTS[name] is False else f"{flag(name)}/--no-{name.replace('_', '-')}"
    return click.option(names, name, is_flag=True, default=None, help=text)


def _default_text(default: Any) -> str:
    if default is True:
        return "yes"
    return "" if default in (None, False, (), MISSING) else str(default)
