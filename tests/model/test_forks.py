"""A model in forks of the process that loaded it: they load the same files anew, answer, and come to an end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tfm_export
from tests import skips
from tests.emulation.onnx_cuda import emulated_provider
from tests.model.conftest import ROOT
from tfm_export import BackendUnavailable

pytestmark = skips.skip_if(sys.platform == "win32", "forks, which Windows has not", *skips.ON_LINUX)

SCRIPT = """
import os, sys, threading, time, warnings
import tfm_export
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks of processes with threads
WORDS = ["hello", "transformer", "parity"]

def end(child, seconds=60):
    "The exit code of a child, which must end by itself."
    for _ in range(seconds * 20):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hangs"

def fork(work):
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)  # as servers end: with all of Python's and the libraries' destructors
    return child
"""


def run(bundle: Path, body: str, threads: int = 2) -> str:
    script = f"{SCRIPT}\nmodel = tfm_export.load({str(bundle)!r}, threads={threads})\n{textwrap.dedent(body)}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("threads", [1, 2])
def test_forks_answer_as_their_parent_does_and_end(tiny_bundle: Path, threads: int) -> None:
    body = """
    wanted = [answer.tokens for answer in model.generate(WORDS)]
    assert [answer.tokens for answer in model.generate_async(WORDS).result(60)] == wanted
    time.sleep(0.5)  # the threads of pools go to sleep: those are waited for

    def work():
        assert [answer.tokens for answer in model.generate_async(WORDS).result(60)] == wanted
        assert [answer.tokens for answer in model.generate(WORDS)] == wanted
        with tfm_export.load(model.bundle.path) as another:
            assert [answer.tokens for answer in another.generate(WORDS)] == wanted

    children = [fork(work) for _ in range(2)]
    print([end(child) for child in children])
    assert [answer.tokens for answer in model.generate_async(WORDS).result(60)] == wanted
    """
    assert run(tiny_bundle, body, threads) == "[0, 0]\n"


def test_forks_that_do_nothing_and_forks_that_close_the_model_end(tiny_bundle: Path) -> None:
    body = """
    model.generate(WORDS)
    time.sleep(0.5)

    def twice():
        print(end(fork(lambda: model.generate("hello"))))

    print([end(fork(work)) for work in (lambda: None, model.close, twice)])
    """
    assert run(tiny_bundle, body) == "0\n[0, 0, 0]\n"


def test_a_fork_while_the_parent_is_decoding(tiny_bundle: Path) -> None:
    """Locks that the parent's threads hold are none of the fork's."""
    body = """
    stop = threading.Event()

    def decode():
        while not stop.is_set():
            model.generate_async(WORDS).result()

    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    work = lambda: model.generate_async(WORDS).result(60)
    print({end(fork(work)) for _ in range(10)})
    stop.set()
    for thread in threads:
        thread.join()
    """
    assert run(tiny_bundle, body) == "{0}\n"


def test_the_model_of_a_fork_is_the_one_that_was_loaded(tiny_bundle: Path, tmp_path: Path) -> None:
    body = """
    import shutil
    wanted = [answer.tokens for answer in model.generate(WORDS)]
    shutil.rmtree(model.bundle.path)

    def work():
        assert [answer.tokens for answer in model.generate(WORDS)] == wanted

    print(end(fork(work)))
    """
    import shutil

    assert run(shutil.copytree(tiny_bundle, tmp_path / "bundle"), body) == "0\n"


def test_pools_of_forked_processes(tiny_bundle: Path) -> None:
    body = """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    def decode(text):
        return model.generate(text).tokens

    wanted = [answer.tokens for answer in model.generate(WORDS)]
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(decode, WORDS) == wanted
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        assert [*pool.map(decode, WORDS)] == wanted
    """
    assert run(tiny_bundle, body) == ""


def test_a_model_on_a_gpu_refuses_in_a_fork(tiny_bundle: Path) -> None:
    with emulated_provider():
        model = tfm_export.load(tiny_bundle, device=0)
        model.generate("hello")
        model.step_model.after_fork()  # type: ignore[attr-defined]  # as in a fork
        with pytest.raises(BackendUnavailable, match=r"CUDA does not work in forks(?s:.)*in each process"):
            model.generate("hello")
