"""Why a test is skipped, and the one command that makes it run: nothing else in tests/ skips.

At the end of a run `pytest_terminal_summary`, which conftest.py takes over, says both for each reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

import pytest

COMMAND = re.compile(r": run `[^`]+`|^does not apply:")
NOT_APPLICABLE = "does not apply:"

# Commands that more than one place names.
ON_A_GPU = "make gpu-check", "on a machine with one"
ANOTHER_GPU = "a GPU that takes it", "make gpu-check", "on another GPU"
WITHOUT_GPU = "CUDA_VISIBLE_DEVICES=-1 make test"
ON_LINUX = "make test", "on Linux"
JAVASCRIPT = "apt-get install nodejs npm chromium && make javascript"


def reason(need: str, command: str, where: str = "", *, found: str = "") -> str:
    """The reason of a skip.

    Args:
        need: what the test needs: "an NVIDIA GPU".
        command: which makes it run.
        where: what else there is to say of the command: "on a machine with one".
        found: what is there instead.
    """
    text = f"needs {need}{f' ({found})' if found else ''}: run `{command}`"
    return f"{text} {where}".rstrip()


def skip(need: str, command: str, where: str = "", *, found: str = "") -> NoReturn:
    """Skip the test that runs, see `reason`."""
    pytest.skip(reason(need, command, where, found=found))


def skip_if(condition: bool, need: str, command: str, where: str = "", *, found: str = "") -> pytest.MarkDecorator:
    """A mark that skips tests on a condition, see `reason`."""
    return pytest.mark.skipif(condition, reason=reason(need, command, where, found=found))


def does_not_apply(why: str) -> NoReturn:
    """Skip one combination of parameters, which means nothing: no command makes it run."""
    pytest.skip(f"{NOT_APPLICABLE} {why}")


def install(extra: str) -> str:
    """The command that installs an extra of this project beside what `make` has installed."""
    return f".venv/bin/pip install -e '.[{extra}]' -c constraints.txt"


def import_or_skip(name: str, extra: str) -> Any:
    """A module; where it is not installed, the test or the whole file is skipped.

    Args:
        name: of the module.
        extra: of this project, which has it.
    """
    return pytest.importorskip(name, reason=reason(name.partition(".")[0], install(extra)))


def summary(reasons: Iterable[str]) -> list[str]:
    """A line for each reason, the most frequent first; those that name no command come last, and are told as such."""
    counted = sorted(Counter(reasons).items(), key=lambda item: (not COMMAND.search(item[0]), -item[1], item[0]))
    return [
        f"{count} {'test' if count == 1 else 'tests'}: {why}{'' if COMMAND.search(why) else ' (NAMES NO COMMAND)'}"
        for why, count in counted
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was skipped, and what to do about it."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    if skipped:
        terminalreporter.section("skipped, and what makes them run")
        for line in summary(str(text).removeprefix("Skipped: ") for text in skipped):
            terminalreporter.line(line)
