"""Which tokens may follow what.

A constraint is any callable that takes what the target has so far, the start token not among it, and returns the ids
that may follow, or None where all may. A hypothesis after which nothing may follow is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

Constraint = Callable[[Sequence[int]], Collection[int] | None]


class Trie:
    """Allows the given targets and nothing else.

    >>> from tfm_export.decoding import Trie
    >>> [sorted(Trie([[18, 13, 23], [18, 7]], end=2)(tokens)) for tokens in ([], [18], [18, 7], [9])]
    [[18], [7, 13], [2], []]

    Args:
        targets: ids of each, without the end token.
        end: the end token, which may follow a whole target.
    """

    def __init__(self, targets: Iterable[Sequence[int]], end: int) -> None:
        self._end = end
        self._root: dict[int, dict[int, object]] = {}
        for target in targets:
            node = self._root
            for token in [*target, end]:
                node = node.setdefault(token, {})  # type: ignore[assignment]

    def __call__(self, tokens: Sequence[int]) -> Collection[int]:
        """The tokens that lead on to one of the targets."""
        node = self._root
        for token in tokens:
            if token not in node:
                return ()
            node = node[token]  # type: ignore[assignment]
        return node.keys()
