"""Of several workers one at a time is in a module that uses the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = "from tests.gpu.conftest import _alone_on_the_gpu\n\n__all__ = ['_alone_on_the_gpu']\n"
TESTS = """
import os, time
from pathlib import Path
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture(scope="module", autouse=True)
def _busy(worker_id):
    busy = Path(os.environ["BUSY"])
    busy.touch(exist_ok=False)  # fails where another worker is in one of these modules
    yield
    busy.unlink()

@pytest.mark.parametrize("i", range(3))
def test_it(i, worker_id):
    Path(os.environ["BUSY"]).with_name(f"by_{worker_id}").touch()
    time.sleep(0.1)
"""


def test_one_module_at_a_time_uses_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(TESTS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BUSY": str(tmp_path / "busy")}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-n", "2"]
    done = subprocess.run(
        [*command, "--dist", "loadfile", f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'base'}", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert "12 passed" in done.stdout, done.stdout + done.stderr
    assert len([*tmp_path.glob("by_*")]) == 2
