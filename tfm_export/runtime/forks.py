"""What becomes of a loaded model in a fork of its process.

A fork has the memory of its parent and none of its threads. A lock that another thread held stays locked, and a thread
pool of ONNX Runtime waits for threads that do not exist: when it computes, and also when it is destroyed, as Python
ends. So in a fork objects of the runtime begin anew, and what they inherited is left alone, for ever.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol


class OfOneProcess(Protocol):
    """Has something that a fork cannot use."""

    def after_fork(self) -> None:
        """Called in a fork, before anything else there: make what it cannot use anew, or note that it is needed."""
        ...


_LIVING: weakref.WeakSet[OfOneProcess] = weakref.WeakSet()


def tell_of_forks(owner: OfOneProcess) -> None:
    """Have an object's `after_fork` called in forks of this process, as long as it lives."""
    _LIVING.add(owner)


def keep_for_ever(inherited: object) -> None:
    """Never destroy an object, not even as Python ends: its destructor would wait for threads that do not exist."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _after_fork() -> None:
    for owner in [*_LIVING]:
        owner.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_after_fork)
