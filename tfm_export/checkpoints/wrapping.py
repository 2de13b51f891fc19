"""Unwrapping: which part of a file is the weights, and what training wrappers have put before their names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tfm_export.errors import CheckpointError
from tfm_export.quotation import quote, shorten, shorten_all

# Where weights usually are. The first of these that holds some is taken; others are named in the notes.
USUAL_PLACES = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "weights",
    "net",
    "network",
    "params",
)
NOT_WEIGHTS = re.compile(r"optim|sched|scaler|rng|grad", re.IGNORECASE)
DEEPEST = 3
COUNTERS = ("n_averaged",)  # of torch.optim.swa_utils.AveragedModel, beside the weights


@dataclass(frozen=True)
class Weights:
    """The tensors of a model by name, and what was done to find them.

    Attributes:
        tensors: by their names without wrappers.
        beside: the dictionary that they were found in, for settings that lie beside them; empty at the top.
        notes: what was taken, stripped and ignored, for people.
        place: where they were; empty at the top.
        others: where there are weights, too.
    """

    tensors: dict[str, Tensor]
    beside: dict[str, Any]
    notes: list[str]
    place: str = ""
    others: tuple[str, ...] = ()


def find_weights(state: Any, place: str | None = None, ignore: Sequence[str] = ()) -> Weights:
    """Find the weights in the contents of a file.

    Args:
        state: the contents.
        place: where they are, such as "ema" or "callbacks.ema", if that is known.
        ignore: names of weights to leave out, with or without wrappers; * stands for any characters.

    Raises:
        CheckpointError: there are none, or there are several and none of them in a usual place.
    """
    places = dict(_places(state, ""))
    chosen = _choose(places, place)
    notes = [f"the weights were taken from {quote(chosen)} in the file"] if chosen else []
    others = [name for name in places if name != chosen]
    if others:
        notes.append(
            f"{shorten_all(map(quote, others))} has weights too: not used (weights: {shorten(others[0])} takes them)"
        )
    if ignored := [key for key in state if key not in places] if chosen and isinstance(state, dict) else []:
        notes.append(f"not used: {shorten_all(ignored)}")
    found = places[chosen]
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if left := [name for name in found if name not in tensors]:
        notes.append(f"no tensors, not used: {shorten_all(left)}")
    tensors, left_out = _without(tensors, ignore)  # first: one that is not the model's may hide a common prefix
    tensors, stripped = strip_wrappers(tensors)
    tensors, more = _without(tensors, ignore)
    if left_out or more:
        notes.append(f"not used, as the settings say: {shorten_all([*left_out, *more])}")
    return Weights(tensors, state if chosen else {}, notes + stripped, chosen, tuple(others))


def _without(tensors: dict[str, Tensor], patterns: Sequence[str]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors whose names match no pattern, and the names of the others."""
    names = {name for pattern in patterns for name in fnmatch.filter(tensors, pattern)}
    return {name: tensor for name, tensor in tensors.items() if name not in names}, [n for n in tensors if n in names]


def _places(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every dictionary that is mostly tensors, by its place."""
    if not isinstance(value, dict) or not value or NOT_WEIGHTS.search(path):
        return
    if not all(isinstance(key, str) for key in value):
        return
    if 2 * sum(isinstance(item, Tensor) for item in value.values()) >= len(value):
        yield path, value
    elif depth < DEEPEST:
        for key, item in value.items():
            yield from _places(item, f"{path}.{key}" if path else key, depth + 1)


def _choose(places: dict[str, dict[str, Any]], place: str | None) -> str:
    if place is not None:
        if place not in places:
            found = shorten_all(map(quote, places)) or "none"
            raise CheckpointError(
                f"there are no weights in {quote(place)}; there are: {found}", "another place for weights"
            )
        return place
    if not places:
        raise CheckpointError(
            "the file holds no tensors by name: it is no state dict and has none",
            "save the weights: torch.save(model.state_dict(), ...)",
        )
    if len(places) == 1:
        return next(iter(places))
    usual = [name for name in USUAL_PLACES if name in places]
    if not usual:
        raise CheckpointError(
            f"the file has weights in several places: {shorten_all(places)}",
            "say which with weights, such as --weights ema",
        )
    return usual[0]


def strip_wrappers(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Take off what DistributedDataParallel, torch.compile, averaging and enclosing modules put before names.

    `_orig_mod` is taken off wherever it stands, since only torch.compile gives that name; any other name only where
    every tensor has it: a model may well have a part called "module".

    Returns:
        The tensors by their shorter names, and what was stripped, for people.
    """
    found, notes = dict(tensors), []
    if counters := [name for name in COUNTERS if name in found]:
        found = {name: tensor for name, tensor in found.items() if name not in counters}
        notes.append(f"not used: {', '.join(counters)}")
    plain = {re.sub(r"(^|(?<=\.))_orig_mod\.", "", name): tensor for name, tensor in found.items()}
    if len(plain) != len(found):
        raise CheckpointError("names occur both with and without _orig_mod", "save model.state_dict() again")
    if plain.keys() != found.keys():
        notes.append("stripped from names: '_orig_mod.'")
    if prefix := _common_prefix([*plain]):
        notes.append(f"stripped from names: {quote(prefix)}")
    return {name.removeprefix(prefix): tensor for name, tensor in plain.items()}, notes


def _common_prefix(names: list[str]) -> str:
    """The dotted prefix of all names, such as "module.model."."""
    if len(names) < 2:
        return ""
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return "".join(f"{part}." for part in shared)
