"""What is known of a model while it is being read: every fact with where it comes from, and what is still missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from reference_model import TransformerConfig
from tfm_export.bundle import GenerationDefaults
from tfm_export.checkpoints.adapter import AdapterConfig
from tfm_export.checkpoints.answers import answered
from tfm_export.checkpoints.key_map import KeyMap, refuse
from tfm_export.checkpoints.settings import SETTINGS, how_to_say
from tfm_export.checkpoints.source_model import SourceModel
from tfm_export.checkpoints.special_ids import (
    ROLES,
    SPECIAL_IDS,
    id_problems,
    make_special_ids,
    told_sources,
    told_target,
)
from tfm_export.checkpoints.vocabularies import (
    assumed_splits,
    folder_tokenizer,
    given_tokens,
    given_vocabulary,
    tokens_by_id,
)
from tfm_export.decoding import DecodeOptions
from tfm_export.errors import RequestError
from tfm_export.quotation import quote
from tfm_export.tokenizer.special_tokens import NamedSpecialIds

CONFIG_FIELDS = tuple(f.name for f in fields(TransformerConfig))
GIVEN = "as given"
DECODING = ("beam_size", "length_penalty")


@dataclass(frozen=True)
class Fact:
    """A value and where it comes from."""

    value: Any
    origin: str


@dataclass
class PartialCheckpoint:
    """A model on its way from a file to a `SourceModel`.

    Attributes:
        path: of the checkpoint.
        format: whose checkpoint it is, for people.
        keys: where each weight goes.
        settings: what the user said.
        facts: what is known, by the name of the setting or the field of `TransformerConfig`.
        missing: what only the user can say, each with what is known of it.
        problems: what does not fit.
        notes: what was stripped, cast, ignored or assumed.
        options: decoding options that the model is meant to be used with, fields of `DecodeOptions`.
        tokenizer: the files of the bundle's tokenizer folder.
        dictionary: the form of the format's dictionaries: "fairseq", "marian" or "lines".
        files: those of a folder, by name.
        hint: what to try where something does not fit.
        training: what the checkpoint says about its making.
        place: where in the file the weights were.
        other_places: where there are weights, too.
    """

    path: Path
    format: str
    keys: KeyMap
    settings: Mapping[str, Any]
    facts: dict[str, Fact] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, bytes] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    dictionary: str = "lines"
    files: Mapping[str, Path] = field(default_factory=dict)
    place: str = ""
    other_places: tuple[str, ...] = ()
    hint: str = "docs/checkpoints.md tells what is supported, and how to say more"

    def infer(self, name: str, value: Any, origin: str) -> Any:
        """A fact that the weights themselves tell: a setting that says otherwise is a problem."""
        if name in self.settings and self.settings[name] != value:
            self.problems.append(
                f"{name} is {quote(value)} by {origin}, and {quote(self.settings[name])} in the settings"
            )
        self.facts[name] = Fact(value, origin)
        return value

    def infer_each(self, name: str, sizes: Sequence[int], origin: str) -> None:
        """`infer` a size of the encoder, and that of the decoder where it is another."""
        encoder, decoder = sizes
        self.infer(name, encoder, origin)
        if decoder != encoder:
            self.infer(f"decoder_{name}", decoder, origin)

    def know(self, name: str, value: Any, origin: str) -> Any:
        """A fact that the file's configuration or its layout tells: a setting takes its place."""
        if name in self.settings:
            if self.settings[name] != value:
                self.notes.append(f"{name} is {quote(self.settings[name])} as given; {origin} says {quote(value)}")
            return self._given(name)
        self.facts[name] = Fact(value, origin)
        return value

    def ask(self, name: str, known: str = "") -> Any:
        """A fact that only the user can tell; None, and counted as missing, where they have not.

        Special ids may be told by the dictionary of targets that they have given.
        """
        if name in self.settings:
            return self._given(name)
        if name in ROLES and self._told(name):
            return self.value(name)
        self.missing[name] = known
        return None

    def know_heads(self, heads: Sequence[Any], origin: str) -> None:
        """`know` the heads of the encoder, and those of the decoder where there are others; `ask` if None."""
        for name, count in zip(("heads", "decoder_heads"), heads, strict=True):
            if count is None:
                self.ask(name, f"{origin} does not say; d_model is {self.value('d_model')}")
            elif name == "heads" or count != heads[0]:
                self.know(name, count, origin)

    def _told(self, role: str) -> bool:
        """Whether the dictionary of targets has a special token, which then is a fact."""
        if told := told_target(role, self.tokens):
            self._tell(role, *told)
        return told is not None

    def _tell(self, name: str, value: int | None, origin: str) -> None:
        self.facts[name] = Fact(value, origin)
        self.notes.append(f"{name} is {value}: {origin}")

    @cached_property
    def tokens(self) -> dict[str, list[str]]:
        """The tokens of each side that the user has given, in the order of their ids."""
        return given_tokens(self.settings, self.dictionary)

    def _given(self, name: str) -> Any:
        self.facts[name] = Fact(self.settings[name], GIVEN)
        return self.settings[name]

    def value(self, name: str, otherwise: Any = None) -> Any:
        """A fact's value."""
        return self.facts[name].value if name in self.facts else otherwise

    def count_layers(self, pattern: str) -> int:
        """How many layers the file has, by a name such as "encoder.layers.{}.norm1.weight"; at least 1.

        A gap in their numbers is bridged: what is missing between two layers is told as missing.
        """
        form = re.compile(re.escape(pattern).replace(r"\{\}", r"(\d{1,6})"))
        numbers = [int(match[1]) for name in self.keys.tensors if (match := form.fullmatch(name))]
        return min(max(numbers, default=0) + 1, len(self.keys.tensors))

    def config(self) -> TransformerConfig | None:
        """The configuration, if what is known makes one; what does not fit is noted as a problem."""
        values = {name: fact.value for name, fact in self.facts.items() if name in CONFIG_FIELDS}
        given = {name: value for name, value in self.settings.items() if name in CONFIG_FIELDS}
        for name in given.keys() - values.keys() - self.missing.keys():
            values[name] = self._given(name)
        try:
            return TransformerConfig(**values)
        except (TypeError, ValueError) as problem:
            self.problems += str(problem).split("; ")
            return None

    def all_problems(self) -> list[str]:
        """Everything that does not fit, weights included, as far as can be told while something is missing."""
        self.keys.ignore_matching(self.settings.get("ignore", ()), "as the settings say")
        for name in (*SPECIAL_IDS, *DECODING):
            if name in self.settings and name not in self.facts:
                self._given(name)
        if "unk" not in self.facts:
            self._told("unk")
        for name, told in told_sources(self._known(*SPECIAL_IDS), self.tokens).items():
            if name not in self.facts:
                self._tell(name, *told)
        if self.keys.malformed:  # other shapes cannot be judged
            return [*self.problems, *self.keys.problems, *self.keys.malformed.values()]
        config = None if self.missing else self.config()
        if config is None:
            return [*self.problems, *self.keys.problems]
        values = {**self._known(*SPECIAL_IDS, *DECODING), **self.options}
        return [*self.problems, *self.keys.fitting_problems(config), *value_problems(config, values)]

    def _known(self, *names: str) -> dict[str, Any]:
        return {name: self.facts[name].value for name in names if name in self.facts}

    def finish(self) -> SourceModel:
        """The model.

        Raises:
            CheckpointError: naming all that is missing and all that does not fit.
        """
        problems = self.all_problems()
        if self.missing:
            told = [f"it is {self.format}, and its file does not say:", *map(self.question, self.missing), *problems]
            options = " ".join(how_to_say(name).split("/")[0] for name in self.missing)
            raise refuse(
                self.path,
                told,
                f"{options} (or --config FILE with all of it); tfm-export inspect {self.path} shows what is known",
            )
        config = self.config()
        if problems or config is None:
            raise refuse(self.path, problems, self.hint)
        tokenizer, said = self._tokenizer(config)
        return SourceModel(
            path=self.path,
            model=self.keys.build(config),
            special_ids=make_special_ids(self._known(*SPECIAL_IDS)),
            generation=GenerationDefaults(
                max_length=min(config.max_target_length, self.value("generation_length", config.max_target_length)),
                options=self.options,
                **self._known(*DECODING),
            ),
            tokenizer=tokenizer,
            settings=dict(self.settings),
            training=self.training,
            notes=[*self.notes, *said, *self.keys.notes(), *assumed_splits(self.settings)],
            answers=self.answers(tokenizer),
        )

    def _tokenizer(self, config: TransformerConfig) -> tuple[dict[str, bytes], list[str]]:
        """The files of the bundle's tokenizer folder, and what there is to say of them."""
        tokenizer, said = given_vocabulary(self.path, self.settings, config, self.dictionary)
        tokenizer = tokenizer or self.tokenizer
        return folder_tokenizer(self.files, config) if self.files and not tokenizer else (tokenizer, said)

    def special_tokens(self) -> NamedSpecialIds | None:
        """The special ids with their tokens; None as long as something is missing or does not fit.

        Raises:
            CheckpointError: the tokens do not fit.
        """
        config = None if self.missing or self.all_problems() else self.config()
        if config is None:
            return None
        ids = make_special_ids(self._known(*SPECIAL_IDS))
        return NamedSpecialIds(ids=ids, tokens=tokens_by_id(self._tokenizer(config)[0]))

    def answers(self, tokenizer: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
        """What rests on an answer alone; a tokenizer of Hugging Face puts around sources what it has learnt to."""
        wraps = bool(tokenizer) and "huggingface.json" not in tokenizer
        found = answered(self.facts, self.settings, GIVEN, wraps=wraps)
        if self.other_places:
            origin = GIVEN if "weights" in self.settings else "the default: the first usual place"
            found["weights"] = {"value": self.place, "origin": origin, "others": [*self.other_places]}
        return found

    def question(self, name: str) -> str:
        """What is asked for, with what is known of it."""
        known = self.missing[name]
        return f"{name}: {SETTINGS[name].question}" + (f" ({known})" if known else "")


def value_problems(config: TransformerConfig | AdapterConfig, known: Mapping[str, Any]) -> list[str]:
    """What keeps special ids and decoding options from being those of a model; both may lack what is not known."""
    sizes = {"source": config.source_vocabulary_size, "target": config.target_vocabulary_size}
    problems = id_problems(known, sizes)
    try:
        DecodeOptions(**{name: value for name, value in known.items() if name not in SPECIAL_IDS})
    except RequestError as error:
        problems += error.problems
    return problems


def find_prefix(names: Iterable[str], signature: str) -> str | None:
    """What stands before a name that tells a layout, such as "model." before "encoder.layers.0.fc1.weight"."""
    ends = [name.removesuffix(signature) for name in names if name == signature or name.endswith(f".{signature}")]
    return min(ends, key=len) if ends else None


def without_prefix(tensors: dict[str, Tensor], prefix: str) -> tuple[dict[str, Tensor], list[str]]:
    """Names without a prefix that some have, and a note of it; a name that would clash keeps its own."""
    if not prefix:
        return tensors, []
    short = {
        name.removeprefix(prefix) if name.removeprefix(prefix) not in tensors else name: tensor
        for name, tensor in tensors.items()
    }
    return short, [f"stripped from names: {quote(prefix)}"]


def same(tensors: Iterable[Tensor | None]) -> bool:
    """Whether tensors that are there are all equal, and there are at least two."""
    found = [tensor for tensor in tensors if tensor is not None]
    return len(found) > 1 and all(
        found[0].shape == other.shape and bool((found[0] == other).all()) for other in found[1:]
    )
