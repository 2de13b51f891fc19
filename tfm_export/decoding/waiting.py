"""Requests that wait for a place in the batch: whose turn it is."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from tfm_export.decoding.request import RequestState

# Requests that came later and may go first, because of their priority, before one that waits is the next.
MOST_OVERTAKEN = 256


class WaitingRequests:
    """A queue: the highest priority first, of equals the one that came first; and nobody is overtaken for ever."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, RequestState] = OrderedDict()  # by number, the oldest first
        self._by_priority: list[tuple[int, int]] = []  # a heap of -priority and number
        self._taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, state: RequestState) -> None:
        """Have a request wait. Requests come in the order of their numbers, which count from 0 on."""
        self._waiting[state.number] = state
        heapq.heappush(self._by_priority, (-state.request.priority, state.number))

    @property
    def first(self) -> RequestState:
        """The one whose turn it is."""
        oldest = next(iter(self._waiting.values()))
        # All that came before the oldest have been taken: whatever else was taken has overtaken it.
        overtaken = self._taken - oldest.number
        return oldest if overtaken >= MOST_OVERTAKEN else self._waiting[self._by_priority[0][1]]

    def take(self) -> RequestState:
        """Take the first out of the queue."""
        state = self.first
        del self._waiting[state.number]
        self._taken += 1
        while self._by_priority and self._by_priority[0][1] not in self._waiting:
            heapq.heappop(self._by_priority)
        return state

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()
        self._by_priority.clear()
