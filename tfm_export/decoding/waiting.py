"""Requests that wait for a place in a batch: whose turn it is."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)

# Requests of higher priority may go first so often before one of a lower priority is the next, and requests that come
# one by one so often before the next one of a list.
MOST_OVERTAKEN = 256


class WaitingRequests(Generic[ItemT]):
    """A queue: the highest priority first, of equals the one that came first; and nobody is overtaken for ever.

    Each request may wait once only. The requests of a list come one after the other, and what comes meanwhile does not
    wait for all of them: the n-th of a list waits for a turn that lies n turns ahead, and what comes by itself has its
    turn at once. (Start-time fair queueing, Goyal et al. 1996, each list and each single request being a flow; time
    also goes on by 1 / MOST_OVERTAKEN with each request, so that no list waits for ever.)

    >>> from tfm_export.decoding.waiting import WaitingRequests
    >>> queue = WaitingRequests()
    >>> for place, name in enumerate("abc"):
    ...     queue.add(name, place=place)
    >>> queue.take(), queue.add("single"), queue.take(), queue.take()
    ('a', None, 'single', 'b')
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[float, int, ItemT]]] = {}  # of each priority: turns, numbers, requests
        self._passed: dict[int, int] = {}  # how often each priority's requests were passed over since one was taken
        self._there: dict[ItemT, None] = {}
        self._turn, self._added = 0.0, 0

    @property
    def turn(self) -> float:
        """How far the queue has come, in turns."""
        return self._turn

    def __len__(self) -> int:
        return len(self._there)

    def __contains__(self, item: object) -> bool:
        return item in self._there

    def __iter__(self) -> Iterator[ItemT]:
        return iter(tuple(self._there))

    def add(self, item: ItemT, *, priority: int = 0, place: int = 0, since: float | None = None) -> None:
        """Have a request wait.

        Args:
            item: the request.
            priority: the highest goes first.
            place: in its list, from 0 on; 0 for a request that comes by itself.
            since: what `turn` was when the list came; None is now.
        """
        turn = (self._turn if since is None else since) + place
        heapq.heappush(self._heaps.setdefault(priority, []), (turn, self._added, item))
        self._there[item] = None
        self._added += 1

    @property
    def first(self) -> ItemT:
        """The one whose turn it is."""
        return self._heaps[self._next_priority()][0][2]

    def take(self) -> ItemT:
        """Take the first out of the queue."""
        priority = self._next_priority()
        turn, _, item = heapq.heappop(self._heaps[priority])
        del self._there[item]
        self._turn = max(self._turn + 1 / MOST_OVERTAKEN, turn)
        self._passed[priority] = 0
        for lower in self._heaps:
            if lower < priority:
                self._passed[lower] = self._passed.get(lower, 0) + 1
        return item

    def discard(self, item: ItemT) -> bool:
        """Take a request out whose turn it need not be. Returns whether it was there."""
        if item not in self._there:
            return False
        del self._there[item]
        return True

    def clear(self) -> None:
        """Forget all."""
        self._heaps.clear()
        self._there.clear()
        self._passed.clear()

    def _next_priority(self) -> int:
        """The priority of the next request; priorities of which nobody waits are forgotten."""
        for priority, heap in list(self._heaps.items()):
            while heap and heap[0][2] not in self._there:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[priority]
                self._passed.pop(priority, None)
        overtaken = [priority for priority in self._heaps if self._passed.get(priority, 0) >= MOST_OVERTAKEN]
        return max(overtaken or self._heaps)
