"""Which tokens may follow what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

# What the target has so far (the start token not among it) -> the ids that may follow; None allows all.
Constraint = Callable[[Sequence[int]], Collection[int] | None]
