"""Whose checkpoint is it? Each layout is told by the names of its weights, or by the configuration beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfm_export.checkpoints import annotated, eole, fairseq, huggingface, marian, opennmt, torch_transformer, tutorial
from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.partial import PartialCheckpoint
from tfm_export.checkpoints.reference import read as read_reference
from tfm_export.checkpoints.wrapping import Weights, find_weights
from tfm_export.errors import CheckpointError
from tfm_export.quotation import shorten, shorten_all

MOST_SHOWN = 40  # plain values beside the weights
MOST_CHARACTERS = 60
# Each reads contents of its layout, and gives None for others. The more particular ones come first.
Reader = Callable[[Contents, Weights, Mapping[str, Any]], PartialCheckpoint | None]
READERS: tuple[Reader, ...] = (
    huggingface.read,
    fairseq.read,
    opennmt.read,
    eole.read,
    marian.read,
    tutorial.read,
    annotated.read,
    torch_transformer.read,
)
KNOWN = (
    "folders of Hugging Face with config.json, fairseq's, OpenNMT-py's, Eole's, Marian's, "
    "reference_model.save_checkpoint's, torch.nn.Transformer's state dict, the tutorial Transformer's (fc_q, fc_k, "
    "fc_v, fc_o), the annotated Transformer's (linears.0)"
)


def recognise_checkpoint(contents: Contents, settings: Mapping[str, Any]) -> PartialCheckpoint:
    """Find the layout, and what it tells.

    Args:
        contents: of the checkpoint.
        settings: what the user said.

    Raises:
        CheckpointError: there are no weights, or they are of no known layout.
    """
    if (own := read_reference(contents, settings)) is not None:
        return own
    try:
        weights = find_weights(contents.state, settings.get("weights"), settings.get("ignore", ()))
    except CheckpointError as error:
        raise CheckpointError([f"{contents.path}: {problem}" for problem in error.problems], error.hint) from error
    for reader in READERS:
        found = reader(contents, weights, settings)
        if found is not None:
            found.notes[:0] = [*weights.notes, *_settings_beside(weights)]
            found.place, found.other_places = weights.place, weights.others
            if settings.get("ignore_generation") and reader is not huggingface.read:
                found.problems.append("ignore_generation is for folders of Hugging Face: no other format has such keys")
            return found
    raise CheckpointError(
        f"{contents.path} is not a checkpoint of a known format: {_described(weights)}; known are: {KNOWN}",
        "write an adapter for it (examples/custom_model), or load the weights into a reference_model.Transformer "
        "and save that with reference_model.save_checkpoint",
    )


def _described(weights: Weights) -> str:
    names = [*weights.tensors]
    told = f"it has {len(names)} tensors, such as {shorten_all(names[:3])}"
    first = Counter(name.split(".", maxsplit=1)[0] for name in names)
    if len(first) < 2 or first.most_common(1)[0][1] < len(names) / 2:
        return told
    others = [f"{name}.*" for name in first if name != first.most_common(1)[0][0]]
    return f"{told}; if some are not the model's, such as {shorten_all(others)}, --ignore-weights leaves them out"


def _settings_beside(weights: Weights) -> list[str]:
    """Plain values that lie beside the weights: their names are the user's own, so that only people can read them."""
    found = [*_plain_values(weights.beside, "")][:MOST_SHOWN]
    return [f"beside the weights the file says: {', '.join(found)}"] if found else []


def _plain_values(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, int | float | str) and len(str(value)) <= MOST_CHARACTERS:
            yield shorten(f"{prefix}{name}={value}")
        elif isinstance(value, dict) and not prefix:
            yield from _plain_values(value, f"{name}.")
