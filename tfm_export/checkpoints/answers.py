"""What of a model's reading rests on an answer alone, the user's or a default's, and what else could be answered.

The shapes and names of weights tell nothing of these settings, and a wrong answer still gives a model that runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from reference_model import TransformerConfig
from tfm_export.bundle import SpecialIds
from tfm_export.checkpoints.adapter import AdapterConfig
from tfm_export.checkpoints.settings import CHOICES, SETTINGS, setting_problem

if TYPE_CHECKING:
    from tfm_export.checkpoints.partial import Fact

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-3)
SMALL_IDS = 10  # special ids are the first of a vocabulary, nearly always
# Of what is given: what changes how texts become ids, and which weights are taken. The file is read again for these.
READ_AGAIN = ("weights", "keys", "lowercase", "source_split", "target_split")
WRAPPING = ("source_starts_with_bos", "source_ends_with_eos")
SPECIAL = ("pad", "bos", "eos", "unk")
# Answers of another kind: they say how to decode, how long texts may be, or what tokens are called.
NO_READING = ("beam_size", "length_penalty", "generation_length", "max_length", "longest_target", "dropout")


def answered(
    facts: Mapping[str, Fact], settings: Mapping[str, Any], given: str, *, wraps: bool = True
) -> dict[str, dict[str, Any]]:
    """The settings that the file does not tell, each with its value and where that comes from.

    Args:
        facts: what is known of the model.
        settings: what the user said.
        given: the origin of facts that the user said.
        wraps: the special ids decide what is put around sources, not the checkpoint's own tokenizer.
    """
    found = {
        name: {"value": fact.value, "origin": fact.origin}
        for name, fact in facts.items()
        if fact.origin == given or "default" in fact.origin
    }
    found |= {name: {"value": settings[name], "origin": given} for name in READ_AGAIN[1:] if name in settings}
    if wraps:
        found |= {name: {"value": False, "origin": "the default"} for name in WRAPPING if name not in facts}
    order = {name: place for place, name in enumerate(SETTINGS)}
    return {name: found[name] for name in sorted(found, key=lambda n: order.get(n, -1)) if name not in NO_READING}


def alternatives(
    name: str, answer: Mapping[str, Any], config: TransformerConfig | AdapterConfig, special: SpecialIds
) -> Iterator[Any]:
    """Other values that an answer could have had; whoever takes one finds out whether the file allows it.

    Args:
        name: of the setting.
        answer: what was answered, as `answered` tells it.
        config: the model's.
        special: the model's special ids.
    """
    value, others = answer["value"], [*answer.get("others", ())]
    if name == "heads" and isinstance(config, TransformerConfig):
        others = [n for n in range(1, config.d_model + 1) if config.d_model % n == 0]
    elif name == "layer_norm_epsilon":
        others = [*EPSILONS]
    elif name in SPECIAL:
        size = min(config.source_vocabulary_size, config.target_vocabulary_size)
        others = [i for i in range(SMALL_IDS) if i < size] + [special.pad, special.bos, special.eos]
    elif name == "keys":
        yield from _exchanged(value)
    elif SETTINGS[name].kind == "bool":
        others = [False, True]
    elif name == "positions":
        others = ["sinusoidal", "none"]  # others have weights, which the file tells
    elif name in CHOICES:
        others = [*CHOICES[name]]
    yield from dict.fromkeys(other for other in others if other != value)


def _exchanged(keys: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Two names of weights with their roles exchanged."""
    names = [*keys]
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            yield {**keys, one: keys[other], other: keys[one]}


def how_to_answer(name: str, value: Any) -> str:
    """What to type to give a setting a value.

    >>> how_to_answer("heads", 6), how_to_answer("norm_first", False), how_to_answer("lowercase", True)
    ('--heads 6', '--norm-last', '"lowercase": true in --config FILE')
    """
    assert setting_problem(name, value) is None
    option = SETTINGS[name].option
    if option is None:
        return f'"{name}": {json.dumps(value, ensure_ascii=False)} in --config FILE'
    if "/" in option:
        return option.split("/")[0 if value else 1]
    return re.sub(r"[A-Z]+$", lambda _: str(value), option)
