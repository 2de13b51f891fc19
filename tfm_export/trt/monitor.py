"""What a build tells while it runs, and how it is stopped.

The builder works for seconds or minutes in one call. Python's signal handlers run when the builder calls back, and an
exception raised there would be lost; so a signal is noted, the builder is asked to stop, and the signal is raised again
once it has.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, Protocol

STOPPING = (signal.SIGINT, signal.SIGTERM)
_LEFT_ALONE = (signal.SIG_IGN, None)


class BuildObserver(Protocol):
    """Who is told how far a build is."""

    def begin(self, what: str) -> None:
        """Something begins that takes time."""
        ...

    def advance(self, phase: str) -> None:
        """What has begun is in this phase now. Called often."""
        ...

    def note(self, text: str) -> None:
        """Something happened that the user should know."""
        ...


class Silent:
    """Tells nobody."""

    def begin(self, what: str) -> None:
        """Leave what begins untold."""

    def advance(self, phase: str) -> None:
        """Leave the phase untold."""

    def note(self, text: str) -> None:
        """Leave the note untold."""


class StopRequest:
    """Whether a build is to stop.

    Attributes:
        signal: that asked for it; None while none did.
        problem: what went wrong in a callback, where it could not be raised; None while nothing did.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.problem: Exception | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is a reason to stop."""
        return self.signal is not None or self.problem is not None


@contextmanager
def stoppable() -> Iterator[StopRequest]:
    """While the block runs, Ctrl-C and SIGTERM ask the build to stop; when it ends, they do what they always do.

    Raises:
        Exception: what went wrong in a callback.
    """
    stop = StopRequest()
    with _noting_signals(stop):
        yield stop
    if stop.problem is not None:
        raise stop.problem


@contextmanager
def _noting_signals(stop: StopRequest) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers in the main thread alone
        return

    def note(number: int, _: FrameType | None) -> None:
        stop.signal = number

    # One that is ignored stays so, and what is not Python's handler could not be put back.
    usual = {number: handler for number in STOPPING if (handler := signal.getsignal(number)) not in _LEFT_ALONE}
    for number in usual:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        if stop.signal is not None:
            signal.raise_signal(stop.signal)


def progress_monitor(trt: ModuleType, progress: BuildObserver, stop: StopRequest) -> Any:
    """An IProgressMonitor that passes phases on, and stops the build when it is asked to.

    Args:
        trt: the TensorRT module.
        progress: is told the phases.
        stop: is asked at every step.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        """Called by the builder, which drops exceptions."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            """A phase begins."""
            try:
                progress.advance(phase_name)
            except Exception as problem:  # noqa: BLE001 (raised again when the builder has stopped)
                stop.problem = problem

        def phase_finish(self, phase_name: str) -> None:
            """A phase ends."""

        def step_complete(self, phase_name: str, step: int) -> bool:  # noqa: ARG002
            """A step of a phase is done; False stops the build."""
            return not stop.wanted

    return Monitor()
