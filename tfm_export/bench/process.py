"""A process that is measured: it is asked, and answers, by lines of JSON."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tfm_export.errors import BundleError


class MeasuredProcess:
    """A process of its own for whatever is measured; a context manager. An error ends it at once.

    Attributes:
        name: of what is measured, for people.
        loaded: what it answered first, before anything was asked.

    Args:
        name: of what is measured, for people.
        command: the program and its arguments.
        pause: seconds before each request: threads of the process that computed before spin for a while when they run
            out of work.
        environment: of the process; None for this one's.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, pause: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self._pause = name, pause
        self._process = subprocess.Popen(  # noqa: S603 (our own modules, and the user's own paths)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.loaded = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request after the pause, and wait for its answer.

        Raises:
            BundleError: the process has ended.
        """
        assert self._process.stdin is not None
        time.sleep(self._pause)
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise BundleError(
                f"the process that measures {self.name} ended with status {self._process.returncode}",
                "what it printed above says why; a smaller batch takes less memory",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        self.close()
