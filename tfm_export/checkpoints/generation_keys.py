"""The keys of Hugging Face's generation_config.json: the one table of what becomes of each.

The table in docs/checkpoints.md is this one. Every attribute of transformers' GenerationConfig is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Treatment = Literal["applied", "refused", "noted", "no effect"]


@dataclass(frozen=True)
class GenerationKey:
    """What becomes of a key.

    Attributes:
        treatment: "applied", "refused" or "noted" where the value is not neutral; "no effect": it never changes tokens.
        text: what it is applied as, why it is refused, or what it changes.
        neutral: the values at which `generate` does nothing, beside null.
        sampling: it acts only on tokens that are drawn (do_sample).
    """

    treatment: Treatment
    text: str
    neutral: tuple[Any, ...] = ()
    sampling: bool = False


def _applied(text: str, *neutral: Any, sampling: bool = False) -> GenerationKey:
    return GenerationKey("applied", text, neutral, sampling)


def _refused(text: str, *neutral: Any, sampling: bool = False) -> GenerationKey:
    return GenerationKey("refused", text, neutral, sampling)


def _noted(text: str, *neutral: Any) -> GenerationKey:
    return GenerationKey("noted", text, neutral)


_ASSISTANT = GenerationKey("no effect", "read only beside an assistant model, which a folder cannot name")
_OUTPUT = GenerationKey("no effect", "what `generate` returns beside the tokens")
_SPEED = GenerationKey("no effect", "how transformers computes")
_RECORD = GenerationKey("no effect", "a record of where the file comes from")
_FROM_HUB = "transformers itself runs it only with code from its hub"

# Special ids, of which config.json's take the place of those that are not there.
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

KEYS: dict[str, GenerationKey] = {
    # Lengths.
    "max_length": _applied("the longest target: this less the start token"),
    "max_new_tokens": _applied("the longest target, in the place of `max_length`"),
    "min_length": _applied("`min_decoding_length`: this less the start token", 0),
    "min_new_tokens": _applied("`min_decoding_length`, in the place of `min_length`"),
    "max_time": _noted("ends what is not complete after so many seconds, as `deadline` does"),
    "stop_strings": _refused("it ends targets at texts, for which `generate` wants a tokenizer from its caller"),
    # The search.
    "num_beams": _applied("`beam_size`"),
    "length_penalty": _applied("`length_penalty`"),
    "early_stopping": _applied("`early_stopping`"),
    "do_sample": _applied("`sampling_topk`, by `top_k`; refused with `num_beams` above 1", False),
    "temperature": _applied("`sampling_temperature`", 1, sampling=True),
    "top_k": _applied("`sampling_topk`; 50 if it is not there", 50, sampling=True),
    "top_p": _applied("`sampling_topp`", 1, sampling=True),
    "min_p": _refused("tokens are drawn in another way", sampling=True),
    "top_h": _refused("tokens are drawn in another way", sampling=True),
    "typical_p": _refused("tokens are drawn in another way", 1, sampling=True),
    "epsilon_cutoff": _refused("tokens are drawn in another way", 0, sampling=True),
    "eta_cutoff": _refused("tokens are drawn in another way", 0, sampling=True),
    "num_return_sequences": _noted(
        "`generate` returns so many; a bundle returns the best, and more by `num_hypotheses`", 1
    ),
    "num_beam_groups": _refused(f"group beam search: {_FROM_HUB}", 1),
    "diversity_penalty": _refused(f"group beam search: {_FROM_HUB}", 0),
    "force_words_ids": _refused(f"constrained beam search: {_FROM_HUB}"),
    "constraints": _refused(f"constrained beam search: {_FROM_HUB}"),
    "penalty_alpha": _refused(f"contrastive search: {_FROM_HUB}", 0),
    "dola_layers": _refused(f"DoLa: {_FROM_HUB}"),
    "low_memory": _refused("transformers refuses it in a beam search", False),
    # Scores.
    "repetition_penalty": _applied("`repetition_penalty`", 1),
    "no_repeat_ngram_size": _applied("`no_repeat_ngram_size`", 0),
    "encoder_repetition_penalty": _applied("`encoder_repetition_penalty`", 1),
    "encoder_no_repeat_ngram_size": _applied("`encoder_no_repeat_ngram_size`", 0),
    "bad_words_ids": _applied("`suppress_sequences`, but for an end token by itself"),
    "suppress_tokens": _applied("`suppress_sequences` of one token", []),
    "begin_suppress_tokens": _applied("`begin_suppress_tokens`", []),
    "sequence_bias": _applied("`sequence_bias`"),
    "exponential_decay_length_penalty": _applied("`exponential_decay_length_penalty`"),
    "forced_bos_token_id": _applied("`forced_bos`"),
    "force_bos_token_to_be_generated": _applied("of config.json: `forced_bos` is `bos_token_id`", False),
    "forced_eos_token_id": _applied("`forced_eos`; several are refused with `num_beams` above 1"),
    "renormalize_logits": _applied("`renormalize_logits`", False),
    "remove_invalid_values": _noted(
        "transformers replaces numbers that are not finite; here a model that gives some is an error", False
    ),
    "guidance_scale": _refused("the scores of a second pass without the source are needed", 1),
    "watermarking_config": _refused("scores are changed by a secret that a bundle does not keep"),
    "token_healing": _refused("it changes the first tokens by way of a tokenizer", False),
    "forced_decoder_ids": _noted(
        "transformers 5 does nothing with it; earlier versions forced tokens (`target_prefix`)"
    ),
    # Special ids.
    "pad_token_id": _applied("the id of padding"),
    "bos_token_id": _applied("the start token, if `decoder_start_token_id` is not there"),
    "eos_token_id": _applied("the end token; several are `end_token`"),
    "decoder_start_token_id": _applied("the start token"),
    # Other models' help.
    "use_mtp": _refused("other parts of a model guess tokens", False),
    "prompt_lookup_num_tokens": _refused("tokens are guessed from the source; `load(draft=...)` guesses, too"),
    "assistant_early_exit": _refused("tokens are guessed by some of the layers; `load(draft=...)` guesses, too"),
    "is_assistant": _refused("targets end where the model is not confident", False),
    "speculation_type": _refused("tokens are guessed by another model; `load(draft=...)` guesses, too"),
    **dict.fromkeys(
        (
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "assistant_lookbehind",
            "assistant_ensemble_weight",
            "target_lookbehind",
            "max_matching_ngram_size",
        ),
        _ASSISTANT,
    ),
    # What changes no token.
    "cache_implementation": _noted(
        "a quantized cache rounds keys and values; a bundle's does not",
        *("dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid", "hybrid_chunked"),
        *("offloaded_hybrid", "offloaded_hybrid_chunked", "paged"),
    ),
    **dict.fromkeys(
        (
            "use_cache",
            "cache_config",
            "max_cache_len",
            "prefill_chunk_size",
            "compile_config",
            "disable_compile",
            "continuous_batching_config",
        ),
        _SPEED,
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        _OUTPUT,
    ),
    **dict.fromkeys(("_from_model_config", "_commit_hash", "_original_object_hash", "transformers_version"), _RECORD),
}


def documented_table() -> str:
    """The table, as docs/checkpoints.md has it; keys of which the same is to be said share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, key in KEYS.items():
        text = f"{key.text}; only with `do_sample`" if key.sampling else key.text
        rows.setdefault((key.treatment, text), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {treatment} | {text} |" for (treatment, text), names in rows.items()]
    return "\n".join(["| key | what becomes of it | as what, or why |", "|---|---|---|", *lines])
