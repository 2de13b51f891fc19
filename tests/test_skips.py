"""What is skipped says what it needs and which command makes it run, with workers and without."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import skips
from tests.skips import COMMAND, reason, summary

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(skips.__file__))
BARE = {"pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif", "unittest.skip"}


def nameless(source: str) -> list[int]:
    """The lines that skip with a reason that may name no command."""
    nodes = [*ast.walk(ast.parse(source))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    reasons = {id(call.func): word.value for call in calls for word in call.keywords if word.arg == "reason"}
    skipping = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node) in BARE]
    return sorted(node.lineno for node in skipping if not names_a_command(reasons.get(id(node))))


def names_a_command(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Constant):
        return bool(COMMAND.search(str(value.value)))
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "reason"


def test_whatever_is_skipped_names_the_command_that_makes_it_run() -> None:
    found = {str(path.relative_to(ROOT)): nameless(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}, "tests/skips.py has a way for each to skip"


def test_reasons_without_a_command_are_found() -> None:
    source = """
import pytest
pytest.importorskip("a", reason="needs a: run `pip install a`")
pytest.importorskip("a", reason="needs a")
pytest.importorskip("a")
@pytest.mark.skip
def test_1(): pytest.skip("not today")
@pytest.mark.skipif(True, reason=reason("time", "make time"))
def test_2(): ...
@pytest.mark.skipif(True, reason=f"{1}: run `it`")
def test_3(): ...
"""
    assert nameless(source) == [4, 5, 6, 7, 10]


def test_a_reason_says_what_is_needed_found_and_run() -> None:
    assert reason("a GPU", "make gpu-check", "on a machine with one", found="none") == (
        "needs a GPU (none): run `make gpu-check` on a machine with one"
    )
    assert reason("Node", "apt-get install nodejs") == "needs Node: run `apt-get install nodejs`"


def test_reasons_are_counted_and_those_without_a_command_stand_out() -> None:
    node, gpu = reason("Node", "apt-get install nodejs"), reason("a GPU", "make gpu-check")
    assert summary([node, "not today", gpu, "not today", "not today", gpu, "does not apply: the same twice"]) == [
        f"2 tests: {gpu}",
        "1 test: does not apply: the same twice",
        f"1 test: {node}",
        "3 tests: not today (NAMES NO COMMAND)",
    ]


TESTS = """
import pytest
from tests.skips import import_or_skip, skip, skip_if

@pytest.mark.parametrize("i", range(3))
def test_skipped(i): skip("Node", "apt-get install nodejs")

@skip_if(True, "more time", "make time")
def test_marked(): ...

def test_library(): import_or_skip("no_such_library", "rtx")

def test_bad(): pytest.skip("not today")

def test_good(): ...
"""
MODULE = 'import pytest\npytest.importorskip("no_such", reason="needs all: run `make all`")\ndef test_lost(): ...\n'


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_the_end_of_a_run_tells_what_was_skipped(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "conftest.py").write_text(
        'from tests.skips import pytest_terminal_summary\n__all__ = ["pytest_terminal_summary"]\n', encoding="utf-8"
    )
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "test_module.py").write_text(MODULE, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *workers]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [*command, tmp_path], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    _, _, told = done.stdout.partition("skipped, and what makes them run")
    assert told.splitlines()[1:6] == [
        "3 tests: needs Node: run `apt-get install nodejs`",
        "1 test: needs all: run `make all`",
        "1 test: needs more time: run `make time`",
        "1 test: needs no_such_library: run `.venv/bin/pip install -e '.[rtx]' -c constraints.txt`",
        "1 test: not today (NAMES NO COMMAND)",
    ], done.stdout + done.stderr
