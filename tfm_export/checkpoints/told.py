"""What a checkpoint's export was told, from the bundle alone: the user's own files may be gone, or elsewhere."""

from __future__ import annotations

from typing import Any

from tfm_export.bundle import TOKENIZER, Bundle
from tfm_export.checkpoints.vocabularies import SIDES
from tfm_export.json_text import parse_json

FILE = f"{TOKENIZER}/tokenizer.json"


def settings_of(bundle: Bundle) -> dict[str, Any]:
    """The settings with which a bundle was exported, its own copies in the place of the user's dictionaries.

    Args:
        bundle: an open bundle, its files checked.
    """
    told = dict(bundle.manifest.model.get("settings", {}))
    if not any(f"{side}_dictionary" in told or f"{side}_subwords" in told for side in SIDES):
        return told
    if FILE not in bundle.manifest.files:
        return told
    state = parse_json((bundle.path / FILE).read_bytes())
    told.pop("dictionary_format", None)
    for side in SIDES:
        if told.pop(f"{side}_dictionary", None) is not None:
            told[f"{side}_tokens"] = state[side]["tokens"]
        if f"{side}_subwords" in told:
            told[f"{side}_subwords"] = str(bundle.path / TOKENIZER / state[side]["file"])
    return told
