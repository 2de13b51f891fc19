"""What is made once is made by one process of several, whole or not at all, and is not shared with other runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.once import make_once

ROOT = Path(__file__).parents[1]


def test_the_first_makes_it_and_the_others_find_it(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise AssertionError(f"{folder} is made twice")

    made = make_once(tmp_path, "thing", lambda folder: (folder / "file").write_text("one"))
    assert make_once(tmp_path, "thing", fail) == made
    assert (made / "file").read_text() == "one"


def test_what_fails_is_made_anew(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        make_once(tmp_path, "thing", fail)
    made = make_once(tmp_path, "thing", lambda folder: (folder / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.once import make_once

def make(folder):
    (folder / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)

make_once(Path(sys.argv[1]), "thing", make)
"""


def test_what_a_killed_process_left_is_made_anew(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], env=environment, check=False)
    assert done.returncode < 0
    assert (tmp_path / "thing/half").exists()
    made = make_once(tmp_path, "thing", lambda folder: (folder / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]


CONFTEST = """
from functools import partial
import os, pytest, time
from tests.once import make_once, shared_folder

@pytest.fixture(scope="session")
def thing(pytestconfig, tmp_path_factory):
    def make(folder):
        with open(os.environ["MADE"], "a") as file:
            file.write(f"{folder}\\n")
        time.sleep(0.5)  # meanwhile the other worker asks for it
        (folder / "file").write_text("whole")
    return make_once(shared_folder(pytestconfig, tmp_path_factory), "thing", make)
"""
TESTS = """
import pytest, time

@pytest.mark.parametrize("i", range(8))
def test_it(thing, i, worker_id):
    assert (thing / "file").read_text() == "whole"
    open(thing / f"by_{worker_id}", "w").close()
    time.sleep(0.05)  # so that both workers get some
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_workers_share_it_and_runs_do_not(tmp_path: Path, workers: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    # As in a worker of another run, whose variables a pytest that it starts inherits.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MADE": str(tmp_path / "made")}
    environment |= {"PYTEST_XDIST_WORKER": "gw0", "PYTEST_XDIST_WORKER_COUNT": "2"}
    for run in (1, 2):
        base = f"--basetemp={tmp_path / f'run{run}'}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", base]
        done = subprocess.run(
            [*command, "-n", workers, tmp_path / "test_it.py"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
        assert "8 passed" in done.stdout, done.stdout + done.stderr
        made = (tmp_path / "made").read_text().splitlines()
        assert len(made) == run
        assert Path(made[-1]).is_relative_to(tmp_path / f"run{run}")
        assert len([*Path(made[-1]).glob("by_*")]) == max(1, int(workers))
