"""How to decode: every option, validated when it is made.

Names and meanings are CTranslate2's. Where CTranslate2 and Hugging Face's `generate` do differently, the difference is
an option of its own, and `compatibility` sets them all.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.request import are_ids
from tfm_export.errors import RequestError
from tfm_export.quotation import quote

if TYPE_CHECKING:
    from tfm_export.decoding.constraints import Constraint

Compatibility = Literal["ctranslate2", "huggingface"]
LengthFormula = Literal["with_prefix", "without_prefix", "gnmt"]
ScoreChange = Literal["before_softmax", "after_softmax"]

COMPATIBILITIES = ("ctranslate2", "huggingface")
BATCH_TYPES = ("examples", "tokens")
LENGTH_FORMULAS = ("with_prefix", "without_prefix", "gnmt")
SCORE_CHANGES = ("before_softmax", "after_softmax")
END_AFTER_PREFIX = ("any_rank", "first_rank")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules that differ between the two worlds, as they hold for some options, whose names they have."""

    stop_rule: Compatibility
    early_stopping: bool | Literal["never"]
    length_formula: LengthFormula
    score_change: ScoreChange
    start_token_repeats: bool
    end_after_prefix: Literal["any_rank", "first_rank"]


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How to decode. Lengths count target tokens: the forced prefix and the end token do, the start token does not.

    >>> from tfm_export import DecodeOptions
    >>> model.generate("hello", options=DecodeOptions(beam_size=4, num_hypotheses=2)).texts
    ['HH EH L OW', 'HH EY L OW']

    Attributes:
        beam_size: K, hypotheses kept at each step; 1 is greedy search or sampling.
        patience: CTranslate2's stop rule ends a search at round(beam_size * patience) finished hypotheses.
        num_hypotheses: how many to return; with sampling, how many to draw.
        length_penalty: the exponent by which a hypothesis's length divides its score; 0 compares plain sums.
        length_formula: "with_prefix" counts every token of the target (CTranslate2), "without_prefix" only those that
            were searched for (Hugging Face), "gnmt" divides by ((5 + length) / 6) ** length_penalty (Wu et al. 2016).
        stop_rule: when a beam search ends. "ctranslate2": at round(beam_size * patience) finished hypotheses; without
            a length penalty already when the best candidate of some step has finished and num_hypotheses have.
            "huggingface": as early_stopping says.
        early_stopping: under Hugging Face's rule, once beam_size hypotheses have finished: True ends the search; False
            does when no live one would beat the worst finished one at its present length; "never" at the length most
            favourable to it.
        score_change: whether masks and penalties act before the softmax is normalised (the rest share the mass of
            what is forbidden: CTranslate2, and Hugging Face unless it searches with beams) or after.
        repetition_penalty: tokens that the target has already get this many times less likely (Keskar et al. 2019).
        encoder_repetition_penalty: tokens of the source get this many times likelier, below 1 less likely. This option
            and the next need a source and a target with the same vocabulary.
        encoder_no_repeat_ngram_size: no n-gram of the source of this size may come in the target; 0 allows all.
        no_repeat_ngram_size: no n-gram of this size may come twice; 0 allows all.
        renormalize_logits: where score_change is after_softmax, let the scores be log-probabilities again after that.
        start_token_repeats: the start token counts as one that the target has already (Hugging Face).
        end_after_prefix: whether an end token right after a forced prefix may come from any of the beam_size best
            candidates, or only from the best (CTranslate2).
        disable_unk: never generate the unknown token.
        suppress_sequences: sequences never to generate; one of a single token forbids that token.
        begin_suppress_tokens: tokens that may not come first, after what is forced.
        sequence_bias: pairs of a sequence and a number, which is added to the score of the sequence's last token where
            the others stand before it; a mapping will do. A sequence of a single token has its number added everywhere.
        exponential_decay_length_penalty: (start, factor): once more than `start` tokens were searched for, n more, the
            score s of an end token becomes s + |s| (factor ** n - 1).
        prefix_bias_beta: target_prefix becomes a wish: while a hypothesis follows it, its next token's probability p
            becomes (1 - beta) p + beta. 0 forces the prefix.
        target_prefix: tokens that every target begins with. They are part of the result, with log-probability 0.
        start_tokens: what the decoder starts from, instead of the model's start token; not part of the result. A
            target language's token goes here, or into target_prefix or forced_bos if the result shall have it.
        forced_bos: the token that every target begins with; it counts as searched for.
        forced_eos: the token that a target ends with at the length limit, with log-probability 0.
        end_token: what ends a target, one id or several; None takes the model's.
        return_end_token: leave the end token in the result.
        max_decoding_length: the longest target; None is the longest that the model takes.
        min_decoding_length: no end token before so many tokens. 0, since it is what PyTorch's own greedy search does
            (CTranslate2's own default is 1).
        sampling_topk: draw from so many of the best tokens; 1 takes the best, 0 draws from all.
        sampling_topp: draw from the best tokens whose probabilities reach this sum.
        sampling_temperature: divides the log-probabilities before the draw.
        seed: the same one draws the same tokens, whatever else is in the batch; None draws anew each time.
        return_scores: give the log-probability of every token.
        return_logits_vocab: give the log-probabilities of the whole vocabulary at every token.
        return_alternatives: return one hypothesis for each of the num_hypotheses likeliest tokens after the prefix.
        min_alternative_expansion_prob: an alternative less likely than this is left out, except the likeliest.
        constraint: which tokens may follow what, a function of the tokens so far; `Trie` is one.
        coverage_penalty: adds this many times sum_j log(min(sum_t attention[t, j], 1)) to a score, over those tokens t
            that the length counts (Wu et al. 2016). This option and the next two need a model whose steps give
            attention; all that a batch attends to is kept, 4 bytes x rows x cache slots x source length.
        return_attention: give what every token attends to.
        replace_unknowns: give that for a caller that puts source words in the place of unknown ones.
        max_batch_size: how much is decoded at once, in batch_type.
        batch_type: "examples", or "tokens" of padded sources.
        compatibility: whose rules hold where an option above is None.
    """

    beam_size: int = 1
    patience: float = 1.0
    num_hypotheses: int = 1
    length_penalty: float = 1.0
    length_formula: LengthFormula | None = None
    stop_rule: Compatibility | None = None
    early_stopping: bool | Literal["never"] | None = None
    score_change: ScoreChange | None = None
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    renormalize_logits: bool = False
    start_token_repeats: bool | None = None
    end_after_prefix: Literal["any_rank", "first_rank"] | None = None
    disable_unk: bool = False
    suppress_sequences: Sequence[Sequence[int]] = ()
    begin_suppress_tokens: Sequence[int] = ()
    sequence_bias: Sequence[tuple[Sequence[int], float]] | Mapping[tuple[int, ...], float] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    prefix_bias_beta: float = 0.0
    target_prefix: Sequence[int] = ()
    start_tokens: Sequence[int] | None = None
    forced_bos: int | None = None
    forced_eos: int | None = None
    end_token: int | Sequence[int] | None = None
    return_end_token: bool = False
    max_decoding_length: int | None = None
    min_decoding_length: int = 0
    sampling_topk: int = 1
    sampling_topp: float = 1.0
    sampling_temperature: float = 1.0
    seed: int | None = None
    return_scores: bool = True
    return_logits_vocab: bool = False
    return_alternatives: bool = False
    min_alternative_expansion_prob: float = 0.0
    constraint: Constraint | None = None
    coverage_penalty: float = 0.0
    return_attention: bool = False
    replace_unknowns: bool = False
    max_batch_size: int = 32
    batch_type: Literal["examples", "tokens"] = "examples"
    compatibility: Compatibility = "ctranslate2"

    def __post_init__(self) -> None:
        if problems := [*_wrong_types(self)] or [*_out_of_range(self), *_wrong_parts(self), *_contradictions(self)]:
            raise RequestError(problems)
        sequences = ("target_prefix", "start_tokens", "end_token", "begin_suppress_tokens")
        for name in (*sequences, "exponential_decay_length_penalty"):
            if (value := getattr(self, name)) is not None and not isinstance(value, numbers.Integral):
                object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "suppress_sequences", tuple(tuple(sequence) for sequence in self.suppress_sequences))
        # The last of two numbers for the same sequence holds, as in Hugging Face's processor.
        biases = {tuple(sequence): float(bias) for sequence, bias in pairs(self.sequence_bias)}
        object.__setattr__(self, "sequence_bias", tuple(biases.items()))

    @cached_property
    def rules(self) -> Rules:
        """The rules that hold: those chosen, and the compatible world's for the rest."""
        huggingface = self.compatibility == "huggingface"
        # Hugging Face's beam search changes log-probabilities, its greedy search and sampling change logits.
        late = huggingface and self.beam_size > 1
        return Rules(
            stop_rule=self.stop_rule or self.compatibility,
            early_stopping=False if self.early_stopping is None else self.early_stopping,
            length_formula=self.length_formula or ("without_prefix" if huggingface else "with_prefix"),
            score_change=self.score_change or ("after_softmax" if late else "before_softmax"),
            start_token_repeats=huggingface if self.start_token_repeats is None else self.start_token_repeats,
            end_after_prefix=self.end_after_prefix or ("any_rank" if huggingface else "first_rank"),
        )

    @property
    def enough(self) -> int:
        """The finished hypotheses at which CTranslate2's stop rule ends a search."""
        return max(math.floor(min(MOST_OTHERWISE, self.beam_size * self.patience + 0.5)), 1)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return self.sampling_topk != 1 and self.sampling_temperature != 0

    @property
    def batch_shape(self) -> tuple[int, int, str, int]:
        """What requests have in common that are decoded in one batch; all other options may be each one's own.

        beam_size, max_batch_size, batch_type, and, where attention is kept, how many tokens the decoder starts from.
        """
        start = len(self.start_tokens or [0]) if self.needs_attention else 0
        return self.beam_size, self.max_batch_size, self.batch_type, start

    @property
    def attention_options(self) -> list[str]:
        """The options set that need attention weights."""
        return [name for name in ("coverage_penalty", "return_attention", "replace_unknowns") if getattr(self, name)]

    @property
    def source_options(self) -> list[str]:
        """The options set by which a source's tokens change a target's scores."""
        set_ = {
            "encoder_repetition_penalty": self.encoder_repetition_penalty != 1,
            "encoder_no_repeat_ngram_size": self.encoder_no_repeat_ngram_size > 0,
        }
        return [name for name, is_set in set_.items() if is_set]

    @property
    def needs_attention(self) -> bool:
        """Whether steps must give attention."""
        return bool(self.attention_options)

    def end_ids(self, special: SpecialIds) -> tuple[int, ...]:
        """What ends a target."""
        if self.end_token is None:
            return (special.eos,)
        return (self.end_token,) if isinstance(self.end_token, int) else tuple(self.end_token)

    def begin(self, own_prefix: Sequence[int] | None) -> tuple[int, ...]:
        """What a target begins with, or is drawn to: forced_bos, and a request's own prefix if it has one, or this."""
        first = () if self.forced_bos is None else (self.forced_bos,)
        return (*first, *(self.target_prefix if own_prefix is None else own_prefix))

    def divisor(self, length: int, prefix: int) -> float:
        """What the score of a hypothesis of `length` tokens is divided by, of which `prefix` were forced."""
        counted = max(length - prefix if self.rules.length_formula == "without_prefix" else length, 1)
        base = (5 + counted) / 6 if self.rules.length_formula == "gnmt" else counted
        return math.pow(base, self.length_penalty)


def pairs(biases: Any) -> list[Any]:
    """The pairs of sequence_bias, which may be a mapping."""
    return [*(biases.items() if isinstance(biases, Mapping) else biases)]


LEAST = {"beam_size": 1, "num_hypotheses": 1, "max_batch_size": 1, "no_repeat_ngram_size": 0, "sampling_topk": 0}
LEAST |= {"encoder_no_repeat_ngram_size": 0}
LEAST |= {"min_decoding_length": 0, "max_decoding_length": 1, "sampling_temperature": 0, "seed": 0}
MOST = {"seed": 2**63 - 1}  # of any other integer:
MOST_OTHERWISE = 2**31 - 1
MOST_PENALTY = 50.0  # no length's power of it overflows, and none vanishes
CHOICES: dict[str, tuple[object, ...]] = {
    "compatibility": COMPATIBILITIES,
    "batch_type": BATCH_TYPES,
    "stop_rule": (None, *COMPATIBILITIES),
    "early_stopping": (None, True, False, "never"),
    "length_formula": (None, *LENGTH_FORMULAS),
    "score_change": (None, *SCORE_CHANGES),
    "end_after_prefix": (None, *END_AFTER_PREFIX),
}


def _wrong_types(o: DecodeOptions) -> Iterator[str]:
    """Numbers that are none: options may come from a request that a service was sent."""
    kinds = {"int": (numbers.Integral, "an integer"), "float": (numbers.Real, "a number")}
    for field in fields(o):
        kind, what = kinds.get(str(field.type).removesuffix(" | None"), (object, ""))
        value = getattr(o, field.name)
        is_kind = isinstance(value, kind) and (kind is object or not isinstance(value, bool))
        if not is_kind and (value is not None or field.default is not None):
            yield f"{field.name} must be {what}, found {quote(value)}"
    for name in ("target_prefix", "start_tokens", "begin_suppress_tokens", "end_token"):
        value = getattr(o, name)
        if value is not None and not (are_ids(value) or (name == "end_token" and isinstance(value, numbers.Integral))):
            yield f"{name} must be ids, found {quote(value)}"
    sequences: object = o.suppress_sequences
    if not isinstance(sequences, Iterable) or not all(map(are_ids, sequences)):
        yield f"suppress_sequences must be sequences of ids, found {quote(sequences)}"
    biases: object = o.sequence_bias
    if not isinstance(biases, Iterable) or not all(map(_is_bias, pairs(biases))):
        yield f"sequence_bias must be pairs of a sequence of ids and a number, found {quote(biases)}"
    decay: object = o.exponential_decay_length_penalty
    if decay is not None and not _is_decay(decay):
        yield f"exponential_decay_length_penalty must be an integer and a number, found {quote(decay)}"


def _is_bias(pair: object) -> bool:
    return _is_pair(pair) and are_ids(pair[0]) and isinstance(pair[1], numbers.Real)


def _is_decay(pair: object) -> bool:
    return _is_pair(pair) and isinstance(pair[0], numbers.Integral) and isinstance(pair[1], numbers.Real)


def _is_pair(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def _out_of_range(o: DecodeOptions) -> Iterator[str]:
    for name, least in LEAST.items():
        value = getattr(o, name)
        if value is not None and not value >= least:
            yield f"{name} must be at least {least}, found {value}"
        if isinstance(value, numbers.Integral) and int(value) > (most := MOST.get(name, MOST_OTHERWISE)):
            yield f"{name} must be at most {most}, found {value}"
    for name, allowed in CHOICES.items():
        if getattr(o, name) not in allowed:
            yield f"{name} must be one of {', '.join(map(quote, allowed))}, found {quote(getattr(o, name))}"
    within = {
        "patience": (0 < o.patience < math.inf, "above 0"),
        "repetition_penalty": (0 < o.repetition_penalty < math.inf, "above 0"),
        "encoder_repetition_penalty": (0 < o.encoder_repetition_penalty < math.inf, "above 0"),
        "length_penalty": (abs(o.length_penalty) <= MOST_PENALTY, f"from {-MOST_PENALTY:g} to {MOST_PENALTY:g}"),
        "coverage_penalty": (math.isfinite(o.coverage_penalty), "a finite number"),
        "sampling_topp": (0 < o.sampling_topp <= 1, "above 0 and at most 1"),
        "prefix_bias_beta": (0 <= o.prefix_bias_beta < 1, "at least 0 and below 1"),
        "min_alternative_expansion_prob": (0 <= o.min_alternative_expansion_prob <= 1, "from 0 to 1"),
    }
    yield from (f"{name} must be {what}, found {getattr(o, name)}" for name, (fits, what) in within.items() if not fits)


def _wrong_parts(o: DecodeOptions) -> Iterator[str]:
    if any(not sequence for sequence in o.suppress_sequences):
        yield "suppress_sequences must not hold an empty sequence"
    for sequence, bias in pairs(o.sequence_bias):
        if not len(sequence):
            yield "sequence_bias must not hold an empty sequence"
        if not math.isfinite(bias):
            yield f"sequence_bias must hold finite numbers, found {bias}: suppress_sequences forbids a sequence"
    if (decay := o.exponential_decay_length_penalty) is not None and not (decay[0] >= 0 and 0 < decay[1] < math.inf):
        yield (
            "exponential_decay_length_penalty must be a start of at least 0 and a finite factor above 0, "
            f"found {decay!r}"
        )
    for name in ("end_token", "start_tokens"):
        if isinstance(value := getattr(o, name), Sequence) and not value:
            yield f"{name} must name at least one id"


def _contradictions(o: DecodeOptions) -> Iterator[str]:
    huggingface = (o.stop_rule or o.compatibility) == "huggingface"
    most = o.beam_size if huggingface else o.enough
    searches = not o.samples and not o.return_alternatives
    clashes = {
        f"min_decoding_length {o.min_decoding_length} is above max_decoding_length {o.max_decoding_length}": (
            o.max_decoding_length is not None and o.min_decoding_length > o.max_decoding_length
        ),
        "early_stopping belongs to Hugging Face's stop rule: set stop_rule or compatibility to 'huggingface'": (
            o.early_stopping is not None and not huggingface
        ),
        "patience belongs to CTranslate2's stop rule, over a beam_size above 1": (
            o.patience != 1 and (huggingface or o.beam_size == 1)
        ),
        "sampling draws single tokens: it needs beam_size 1": o.samples and o.beam_size > 1,
        "sampling_topp has no effect unless tokens are drawn: set sampling_topk": not o.samples
        and o.sampling_topp != 1,
        "sampling_temperature has no effect unless tokens are drawn: set sampling_topk": (
            not o.samples and o.sampling_temperature not in (0, 1)
        ),
        "seed has no effect unless tokens are drawn: set sampling_topk": not o.samples and o.seed is not None,
        f"num_hypotheses {o.num_hypotheses} is more than the {most} that the search finishes": (
            searches and o.num_hypotheses > most
        ),
        "prefix_bias_beta and return_alternatives exclude each other: alternatives come after a forced prefix": (
            bool(o.prefix_bias_beta) and o.return_alternatives
        ),
        "exponential_decay_length_penalty and return_alternatives exclude each other: the one counts from the first "
        "token, the others are searched for in two parts": (
            o.exponential_decay_length_penalty is not None and o.return_alternatives
        ),
        "prefix_bias_beta and forced_bos exclude each other: the one wishes, the other forces": (
            bool(o.prefix_bias_beta) and o.forced_bos is not None
        ),
        "forced_bos and target_prefix both say how the target begins: give one": (
            o.forced_bos is not None and bool(o.target_prefix)
        ),
        "min_alternative_expansion_prob has no effect without return_alternatives": (
            bool(o.min_alternative_expansion_prob) and not o.return_alternatives
        ),
    }
    yield from (clash for clash, found in clashes.items() if found)
