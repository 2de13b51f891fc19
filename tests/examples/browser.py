"""Chromium without a window, driven through its debugging pipe: nothing to install but Chromium itself."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PATIENCE = 60.0  # seconds; a busy machine takes long to start a browser


class Browser:
    """A browser with one page.

    Attributes:
        messages: what the page's console and its network said of errors.

    Args:
        profile: a folder for its files.
        size: of the page in pixels.
    """

    def __init__(self, profile: Path, *, size: tuple[int, int] = (900, 720)) -> None:
        self.messages: list[str] = []
        self._number, self._session, self._unread = 0, None, b""
        # Chromium reads commands from file descriptor 3 and answers on 4.
        theirs_in, self._commands = _pipe()
        self._answers, theirs_out = _pipe()
        options = [
            "--headless",
            "--no-sandbox",  # containers run it as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
        ]
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", CHROMIUM, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def open(self, url: str) -> None:
        """Open a page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and give its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} did not become true; {self.messages}"
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        """Press keys, one for each character."""
        for character in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=character)
            self.call("Input.dispatchKeyEvent", type="keyUp")

    def screenshot(self, path: Path) -> None:
        """Write a picture of the page as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            assert ready, "Chromium does not answer"
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium has ended"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Log.entryAdded":
            self.messages.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(f"{parameters['type']}: {parameters['args'][0].get('value')}")
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(parameters["exceptionDetails"]))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self._process.terminate()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not 3 and 4, which Chromium's will be."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
