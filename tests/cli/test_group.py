"""The command group: errors and exit codes, Ctrl-C, pipes, completion."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tfm_export import cli as cli_module
from tfm_export.cli import COMMANDS, CommandGroup, cli
from tfm_export.errors import ParityError, RequestError, TfmExportError

SCRIPT = Path(sys.executable).with_name("tfm-export")


def group_that_raises(error: BaseException) -> click.Group:
    """A group like ours with the one command `fail`."""

    class Group(CommandGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            return click.Group.get_command(self, ctx, cmd_name)

    group = Group("tfm-export")

    @group.command()
    def fail() -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RequestError("a source is empty"), 1, "Error: a source is empty\n"),
        (TfmExportError(["one", "two"], "three"), 1, "Error: - one\n- two\nTry: three\n"),
        (ParityError("token 3 differs"), 3, "Error: token 3 differs\n"),
    ],
)
def test_an_error_of_ours_is_one_message_and_its_exit_code(error: TfmExportError, code: int, message: str) -> None:
    result = CliRunner().invoke(group_that_raises(error), ["fail"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", message)


def test_any_other_exception_keeps_its_traceback() -> None:
    result = CliRunner().invoke(group_that_raises(ZeroDivisionError("a bug")), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_and_other_errors_of_the_system_keep_their_traceback(number: int) -> None:
    result = CliRunner().invoke(group_that_raises(OSError(number, os.strerror(number))), ["fail"])
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: the output could not be written: {os.strerror(number)}\nTry: make room on the disk\n"
    )
    result = CliRunner().invoke(group_that_raises(OSError(errno.EIO, "Input/output error")), ["fail"])
    assert isinstance(result.exception, OSError)


def test_an_interrupt_ends_with_130_and_without_a_message() -> None:
    result = CliRunner().invoke(group_that_raises(KeyboardInterrupt()), ["fail"])
    assert (result.exit_code, result.output) == (130, "\n")


WAIT = """
import time
import click
from tfm_export.cli import CommandGroup

class Group(CommandGroup):
    get_command = click.Group.get_command

@click.group(cls=Group)
def group():
    pass

@group.command()
def wait():
    click.echo("ready")
    time.sleep(60)

group(["wait"])
"""


def test_ctrl_c_ends_a_command_at_work_with_130() -> None:
    command = [sys.executable, "-c", WAIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "\n")


def test_output_is_utf8_whatever_the_locale_says(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [str(SCRIPT), "inspect", str(tmp_path / "二")]
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert result.returncode == 1
    assert "二 is not a bundle" in result.stderr.decode()


def test_a_terminated_command_cleans_up_and_ends_with_143() -> None:
    code = """
import time
from tfm_export import cli

def work(prog_name):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)

cli.cli = work
cli.main()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (143, "cleaned up\n", "")


def test_a_reader_that_goes_away_ends_a_command_quietly(tiny_bundle: Path) -> None:
    process = subprocess.Popen(
        [str(SCRIPT), "inspect", str(tiny_bundle)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert errors == ""


@pytest.mark.parametrize("arguments", [["nonsense"], ["inspect", "--nonsense"], ["onnx"]])
def test_wrong_usage_ends_with_2_and_says_where_help_is(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, arguments, prog_name="tfm-export")
    assert result.exit_code == 2
    assert "Try 'tfm-export" in result.stderr


def test_the_word_error_is_red_on_a_terminal_unless_colours_are_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed_on_a_terminal() == "\x1b[31m\x1b[1mError:\x1b[0m wrong"
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed_on_a_terminal() == "Error: wrong"


def printed_on_a_terminal() -> str:
    """What `print_error` writes when standard error is a terminal."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        script = "from tfm_export import cli, errors; cli.print_error(errors.RequestError('wrong'))"
        subprocess.run([sys.executable, "-c", script], stderr=terminal, check=True)
        written = os.read(master, 1000).decode()
    os.close(master)
    return written.strip()


def test_the_group_lists_every_command_module_and_no_other() -> None:
    files = Path(cli_module.__file__).parent.glob("*.py")
    assert set(COMMANDS) == {
        path.stem.replace("_", "-") for path in files if "\ndef command(" in path.read_text(encoding="utf-8")
    }


@pytest.mark.parametrize(("shell", "sign"), [("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete --")])
def test_completion_prints_the_script_of_each_shell(shell: str, sign: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell], prog_name="tfm-export")
    assert result.exit_code == 0
    assert sign in result.stdout
    assert "_TFM_EXPORT_COMPLETE" in result.stdout


def test_the_completion_script_asks_for_words_and_gets_them() -> None:
    environment = {
        **os.environ,
        "_TFM_EXPORT_COMPLETE": "bash_complete",
        "COMP_WORDS": "tfm-export ins",
        "COMP_CWORD": "1",
    }
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "plain,inspect\n"
