"""Special ids of the two sides: given by the user, told by a dictionary's own tokens, or the same on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfm_export.bundle import SourceIds, SpecialIds
from tfm_export.tokenizer.special_tokens import NAMES, is_doubtful, is_marked, told_id

ROLES = tuple(NAMES)
SOURCE = {role: f"source_{role}" for role in ROLES}
WRAPPING = {"bos": "source_starts_with_bos", "eos": "source_ends_with_eos"}
SPECIAL_IDS = (*ROLES, *SOURCE.values(), *WRAPPING.values())


def told_sources(known: Mapping[str, Any], tokens: Mapping[str, Sequence[str]]) -> dict[str, tuple[int | None, str]]:
    """The special ids of sources that the source's dictionary tells, where they are not those of targets.

    Args:
        known: those of targets, and whether sources have a start and an end token.
        tokens: of "source" and "target", in the order of their ids; nothing is told where a side is missing.

    Returns:
        By the setting's name, the id, or None for a token that sources do not have, and where it comes from.
    """
    if len(tokens) < 2:
        return {}
    found: dict[str, tuple[int | None, str]] = {}
    for role, name in SOURCE.items():
        shared = known.get(role)
        here, there = (_token(tokens[side], shared) for side in ("source", "target"))
        if here is not None and here == there:
            continue
        told = told_id(tokens["source"], role)
        if told is not None and told != shared:
            found[name] = told, f"{tokens['source'][told]!r} in the source's dictionary"
        elif (
            told is None
            and role != "pad"
            and not known.get(WRAPPING.get(role, ""))
            and here is not None
            and (is_doubtful(here, role) or not is_marked(here))
        ):
            found[name] = None, f"the source's dictionary has none: {shared} is {here!r}"
    return found


def told_target(role: str, tokens: Mapping[str, Sequence[str]]) -> tuple[int, str] | None:
    """The special id of targets that the target's dictionary tells, and where it comes from."""
    told = told_id(tokens.get("target", ()), role)
    return None if told is None else (told, f"{tokens['target'][told]!r} in the target's dictionary")


def _token(tokens: Sequence[str], i: int | None) -> str | None:
    return tokens[i] if i is not None and 0 <= i < len(tokens) else None


def make_special_ids(known: Mapping[str, Any]) -> SpecialIds:
    """The ids of a model, from what is known by the names of settings; a source's are the target's unless known."""
    source: dict[str, Any] = {role: known.get(name, known.get(role)) for role, name in SOURCE.items()}
    wrapping = {name: known.get(name, False) for name in WRAPPING.values()}
    return SpecialIds(
        pad=known["pad"],
        bos=known["bos"],
        eos=known["eos"],
        unk=known.get("unk"),
        source=SourceIds(**source),
        **wrapping,
    )


def id_problems(known: Mapping[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """Special ids that lie outside of their vocabulary, or that sources need and do not have.

    Args:
        known: by the names of settings; what is not known has no problem.
        sizes: of the vocabularies of "source" and "target".
    """
    of_sources = [role for role in ROLES if role not in WRAPPING or known.get(WRAPPING[role])]
    ids = {("target", role): known.get(role) for role in ROLES}
    ids |= {("source", role): known.get(SOURCE[role], known.get(role)) for role in of_sources}
    problems = [
        f"{role} id {i} is outside the {side} vocabulary of {sizes[side]}"
        for (side, role), i in ids.items()
        if i is not None and not 0 <= i < sizes[side]
    ]
    # `inspect` asks about sources, whose ids may be those of targets for want of others.
    unk = known.get("unk")
    problems += [
        f"unk id {unk} is {role} too: an unknown word would be taken for it"
        for role in ROLES
        if role != "unk" and unk is not None and known.get(role) == unk
    ]
    return problems + [
        f"{name} is true, and the source's vocabulary has no {role}: --source-{role} gives one"
        for role, name in WRAPPING.items()
        if known.get(name) and SOURCE[role] in known and known[SOURCE[role]] is None
    ]
