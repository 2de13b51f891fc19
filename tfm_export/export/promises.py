"""Whether an adapter computes the longest sequences that a bundle of it promises."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from tfm_export.bundle import Limits
from tfm_export.checkpoints import Adapter
from tfm_export.errors import ExportError
from tfm_export.export.size_guards import users_place
from tfm_export.verify.steps import longest_compared

SHORT = 2


@torch.inference_mode()
def check_promises(adapter: Adapter, limits: Limits) -> None:
    """Run an adapter's own code once at the limits, before anything is made of it.

    What it computes is for verification to judge; here it is whether it computes anything.

    Args:
        adapter: in float32.
        limits: the longest sequences to be promised.

    Raises:
        ExportError: its code fails on such a sequence; with the longest one that it takes, and its line.
    """
    longest = longest_compared(adapter.config.heads)
    source, target = min(limits.max_source_length, longest), min(limits.max_target_length, longest)

    def run(source: int, target: int) -> None:
        ids, mask = torch.zeros(1, source, dtype=torch.long), torch.ones(1, source, dtype=torch.bool)
        memory = adapter.encode(ids, mask)
        target_ids = torch.zeros(1, target, dtype=torch.long)
        adapter.decode_with_cache(target_ids, memory, mask)
        if adapter.has_decode:
            adapter.decode(target_ids, memory, mask)

    _check("source", "max_length", source, lambda length: run(length, min(SHORT, target)))
    _check("target", "max_target_length", target, lambda length: run(source, length))


def _check(side: str, field: str, promised: int, run: Callable[[int], None]) -> None:
    try:
        run(promised)
    except Exception as problem:  # whatever the user's code meets there
        place = users_place(traceback.extract_tb(problem.__traceback__))
        works = _longest_that_works(promised, run)
        raise ExportError(
            f"{'' if place is None else f'{place}{chr(10)}  '}fails on a {side} of {promised:,} tokens, the longest "
            f"that would be promised: {type(problem).__name__}: {problem}; "
            + (f"it takes {works:,} and no more" if works else "it takes none at all"),
            f"{field}={works} in the AdapterConfig, or --max-{side}-length {works}" if works else "mend the code",
        ) from problem


def _longest_that_works(promised: int, run: Callable[[int], None]) -> int:
    """By halving: how long a sequence may be; 0 if none works."""
    works, fails = 0, promised
    while fails - works > 1:
        middle = (works + fails) // 2
        try:
            run(middle)
        except Exception:  # noqa: BLE001 (the one that is told has been met)
            fails = middle
        else:
            works = middle
    return works
