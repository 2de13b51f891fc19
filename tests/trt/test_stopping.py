"""Builds that are stopped, that fail half-way, or that run at the same time: the bundle is whole whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from tests.trt.conftest import Told, build, unchanged
from tfm_export.bundle import Bundle
from tfm_export.engines import read_engine
from tfm_export.errors import BundleError
from tfm_export.trt import builder as builder_module
from tfm_export.trt.flavor import Flavor
from tfm_export.trt.monitor import stoppable

pytestmark = pytest.mark.usefixtures("rtx")
COMMAND = [sys.executable, "-m", "tfm_export.cli", "trt"]
ROOT = Path(__file__).parents[2]


def test_ctrl_c_in_the_middle_stops_the_builder_and_leaves_nothing(bundle: Bundle) -> None:
    told = Told()

    def press(phase: str) -> None:
        if phase == "Building engine from subgraph":
            signal.raise_signal(signal.SIGINT)
            told.phases.append("pressed")

    told.on_phase = press
    start = time.process_time()  # a busy machine does not count
    with unchanged(bundle), pytest.raises(KeyboardInterrupt):
        build(bundle, told, variant="fp16")
    assert told.phases[-1] == "pressed" or told.phases.index("pressed") > 0
    assert not any("decoder_step" in text for text in told.begun), "the encoder's build was stopped"
    assert time.process_time() - start < 30
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("step", ["parse", "builder"])
def test_ctrl_c_is_not_lost_in_what_the_library_calls_back_elsewhere(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """What it logs while it is made, or while it parses: an exception that is raised in there goes nowhere."""
    log, pressed = builder_module._log, []

    def logging(trt: ModuleType) -> Any:
        class Log(type(log(trt))):  # type: ignore[misc]
            def log(self, severity: Any, message: str) -> None:
                if not pressed and (step == "builder" or pressing):
                    pressed.append(message)
                    signal.raise_signal(signal.SIGINT)
                super().log(severity, message)

        return Log()

    pressing: list[bool] = []
    parse = builder_module.Builder._parse

    def parsing(self: Any, source: Any, folder: Path) -> Any:
        pressing.append(True)
        return parse(self, source, folder)

    monkeypatch.setattr(builder_module, "_log", logging)
    monkeypatch.setattr(builder_module.Builder, "_parse", parsing)
    told = Told()
    with unchanged(bundle), pytest.raises(KeyboardInterrupt):
        build(bundle, told, variant="fp16")
    assert pressed
    assert "proving encoder.plan" not in told.begun


def test_sigterm_is_passed_on_once_the_builder_has_stopped(bundle: Bundle) -> None:
    received: list[int] = []

    def handler(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise SystemExit(143)

    usual = signal.signal(signal.SIGTERM, handler)
    told = Told()
    told.on_phase = lambda _: signal.raise_signal(signal.SIGTERM) if not received else None
    try:
        with unchanged(bundle), pytest.raises(SystemExit):
            build(bundle, told, variant="fp16")
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert received == [signal.SIGTERM]


def test_what_goes_wrong_in_a_callback_is_raised(bundle: Bundle) -> None:
    """The builder would drop it."""
    told = Told()

    def broken(_: str) -> None:
        raise RuntimeError("the terminal is gone")

    told.on_phase = broken
    with unchanged(bundle), pytest.raises(RuntimeError, match="the terminal is gone"):
        build(bundle, told, variant="fp16")


def test_signals_that_are_ignored_stay_ignored() -> None:
    """As nohup and a shell's background jobs want it."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.wanted
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)


@pytest.mark.full
def test_other_threads_build_too(engine_bundle: Path, tmp_path: Path) -> None:
    """Only the main thread may handle signals."""
    bundle = Bundle.open(shutil.copytree(engine_bundle, tmp_path / "b"))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            build(bundle, variant="fp16", name="other")
        except BaseException as problem:  # noqa: BLE001 (given to the main thread)
            failures.append(problem)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert read_engine(Bundle.open(bundle.path), "other").name == "other"


def start(bundle: Path, *options: str) -> subprocess.Popen[str]:
    command = [*COMMAND, str(bundle), "--flavor", "rtx", "--no-verify", "--max-beam-size", "2", *options]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_two_builds_at_once_both_join_the_bundle(bundle: Bundle) -> None:
    builds = [start(bundle.path, "--fp16"), start(bundle.path, "--w8")]
    for process in builds:
        _, problem = process.communicate(timeout=300)
        assert process.returncode == 0, problem
    opened = Bundle.open(bundle.path)
    assert opened.manifest.engines.keys() == {"fp16-rtx", "w8-rtx"}
    for name in opened.manifest.engines:
        read_engine(opened, name)
    assert [p.name for p in (bundle.path / "engines").iterdir() if p.name.startswith(".")] == []


@pytest.mark.full
def test_of_two_builds_of_the_same_name_one_is_kept_whole(bundle: Bundle) -> None:
    builds = [start(bundle.path, "--fp16") for _ in range(2)]
    texts = [process.communicate(timeout=300)[1] for process in builds]
    assert sorted(process.returncode for process in builds) == [0, 1]
    assert any("has engines/fp16-rtx already" in text for text in texts)
    read_engine(Bundle.open(bundle.path), "fp16-rtx")
    assert [p.name for p in (bundle.path / "engines").iterdir()] == ["fp16-rtx"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full), (signal.SIGKILL, -9)],
)
def test_a_command_that_is_ended_leaves_the_bundle_as_it_was(bundle: Bundle, number: int, code: int) -> None:
    """Killed, it cannot clean up: the next build does."""
    process = start(bundle.path, "--fp16")
    deadline = time.monotonic() + 120
    while not list(bundle.path.glob("engines/.fp16-rtx.new.*/encoder.onnx")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.communicate(timeout=120)
    assert process.returncode == code
    leftovers = list((bundle.path / "engines").iterdir())
    assert len(leftovers) == (1 if number == signal.SIGKILL else 0)
    assert Bundle.open(bundle.path).manifest == bundle.manifest
    if number == signal.SIGKILL:
        build(bundle, variant="fp16")
        assert [p.name for p in (bundle.path / "engines").iterdir()] == ["fp16-rtx"]


def test_a_full_disk_is_told_and_leaves_nothing(tiny_variants: Path, tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk's: the graphs fit, a plan does not."""
    path = shutil.copytree(tiny_variants, tmp_path / "b")
    code = f"""
import resource
from pathlib import Path
from tests.trt.conftest import build
from tfm_export.bundle import Bundle
from tfm_export.errors import BundleError
bundle = Bundle.open(Path({str(path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    build(bundle, variant="fp16")
except BundleError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "could not be written" in result.stdout, result.stderr
    assert "MB free" in result.stdout
    assert list((path / "engines").iterdir()) == []
    Bundle.open(path)


def test_a_bundle_that_cannot_be_written_to_is_told_before_the_build(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda _, mode: mode != os.W_OK)
    told = Told()
    with pytest.raises(BundleError, match="cannot be written to"):
        build(bundle, told, variant="fp16")
    assert told.begun == ["deriving the graphs"]


def test_the_library_is_the_one_that_is_installed(rtx: Flavor) -> None:
    assert rtx.version == rtx.module.__version__
