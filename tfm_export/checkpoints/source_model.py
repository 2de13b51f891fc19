"""What every checkpoint becomes before it is exported."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference_model import Transformer
from tfm_export.bundle import GenerationDefaults, SpecialIds
from tfm_export.checkpoints.adapter import Adapter
from tfm_export.checkpoints.vocabularies import tokens_by_id
from tfm_export.tokenizer.special_tokens import NamedSpecialIds


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """A trained model, whole and checked.

    Attributes:
        path: where it was read from.
        model: in fp32 and evaluation mode; an adapter of the user's own code, or a reference model.
        special_ids: the ids that are not text.
        generation: decoding defaults.
        tokenizer: the files that go into the bundle's tokenizer folder, by name; empty if the checkpoint has none.
        training: what the checkpoint says about its making.
        settings: what the user had to say of it.
        notes: what was cast, stripped or ignored, for people.
        answers: the settings that the file does not tell, each with its value and where that comes from.
    """

    path: Path
    model: Transformer | Adapter
    special_ids: SpecialIds
    generation: GenerationDefaults
    tokenizer: dict[str, bytes]
    training: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def special_tokens(self) -> NamedSpecialIds:
        """The special ids with their tokens."""
        return NamedSpecialIds(ids=self.special_ids, tokens=tokens_by_id(self.tokenizer))
