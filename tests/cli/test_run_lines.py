"""`tfm-export run`: line n of the output belongs to line n of the input; budgets; runs that go on where they ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tfm_export
from tfm_export.cli import cli
from tfm_export.cli import job as job_module
from tfm_export.cli.files import partial_path
from tfm_export.cli.job import Job, one_line
from tfm_export.cli.resume import record_path
from tfm_export.model import Model
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel

LINES = ["hello", "", "zz", "b4d", "a"]
MANY = ("--beam-size", "3", "--n-best", "2")


def run(*arguments: str | Path, lines: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["run", *map(str, arguments)], input=lines)


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Iterator[Model]:
    with tfm_export.load(tiny_bundle) as loaded:
        yield loaded


def text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_what_cannot_be_decoded_is_an_empty_line_or_none_or_the_end(tiny_bundle: Path) -> None:
    whole = run(tiny_bundle, lines=text(LINES))
    lines = whole.stdout.split("\n")
    assert (whole.exit_code, lines[1], lines[3], len(lines)) == (1, "", "", 6)
    skipped = run(tiny_bundle, "--on-error", "skip", lines=text(LINES))
    assert (skipped.exit_code, skipped.stdout) == (1, text([lines[0], lines[2], lines[4]]))
    assert skipped.stderr == whole.stderr
    stopped = run(tiny_bundle, "--on-error", "stop", lines=text(LINES))
    assert (stopped.exit_code, stopped.stdout) == (1, text(lines[:1]))
    assert stopped.stderr == "Error: line 2: the text is empty\n"
    stream = run(tiny_bundle, "--stream", lines=text(LINES))
    assert (stream.exit_code, stream.stdout) == (1, whole.stdout)
    assert run(tiny_bundle, "--stream", "--on-error", "skip", lines=text(LINES)).stdout == skipped.stdout


def test_every_line_of_several_hypotheses_has_its_number(tiny_bundle: Path) -> None:
    lines = run(tiny_bundle, *MANY, lines=text(LINES)).stdout.split("\n")
    assert [line.split("\t")[0] for line in lines] == ["1", "1", "2", "3", "3", "4", "5", "5", ""]
    assert (lines[2], lines[5]) == ("2\t\t", "4\t\t")


def test_separators_of_unicode_are_part_of_a_line(tiny_bundle: Path) -> None:
    lines = run(tiny_bundle, lines="a\u2028b\r\nhello\x0bzz\nzz\x85\n").stdout.split("\n")
    assert len(lines) == 4


def test_a_line_break_in_a_target_is_a_space(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_line("a\r\nb\u2028c\n") == "a  b\u2028c "
    decode = model.tokenizer.decode_target  # type: ignore[union-attr]
    monkeypatch.setattr(model.tokenizer, "decode_target", lambda ids, *rest: decode(ids, *rest).replace(" ", "\n"))
    monkeypatch.setattr(model.tokenizer, "settled_target", lambda ids: decode(ids).replace(" ", "\n"), raising=False)
    expected = model.generate("hello").text
    assert "\n" in expected
    for as_json in (False, True):
        out = Lines()
        job = Job(model=model, call={}, ids=False, as_json=as_json, numbered=False)
        job.run(iter(["hello"]), out, job_module.ProgressBar(None, enabled=False), window=1)  # type: ignore[arg-type]
        (line,) = out.text.split("\n")[:-1]
        assert (json.loads(line)["text"] if as_json else line) == (expected if as_json else one_line(expected))
    out = Lines()
    Job(model=model, call={}, ids=False, as_json=False, numbered=False).stream(["hello"], out)  # type: ignore[arg-type]
    assert out.text == one_line(expected) + "\n"


class Lines:
    """What is written to it."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def writelines(self, texts: Iterator[str]) -> None:
        for text in texts:
            self.write(text)

    def flush(self) -> None:
        pass


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch takes a while."""
    encode = OnnxModel.encode

    def slowly(*arguments: Any, **fields: Any) -> Any:
        time.sleep(0.2)
        return encode(*arguments, **fields)

    monkeypatch.setattr(OnnxModel, "encode", slowly)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_a_budget_ends_the_output_with_a_whole_line(tiny_bundle: Path, tmp_path: Path, stream: list[str]) -> None:
    (tmp_path / "in.txt").write_text(text(["hello"] * 30))
    output = tmp_path / "out.txt"
    files = ("--inputs", tmp_path / "in.txt", "-o", output, "--workers", "1", *stream)
    result = run(tiny_bundle, *files, "--budget", "1", "--batch-size", "1", "--max-length", "3")
    done = partial_path(output).read_text().split("\n")[: -2 if stream else -1]  # a stream's last line is begun
    assert result.exit_code == 4
    assert f"the budget of 1 s is over: {len(done)} lines are done" in result.stderr
    assert 0 < len(done) < 30
    assert len({*done}) == 1
    assert not output.exists()
    if not stream:
        assert f"what was done is in {partial_path(output)}" in result.stderr
        resumed = run(tiny_bundle, *files, "--resume", "--max-length", "3")
        assert resumed.exit_code == 0
        assert output.read_text() == text(done[:1] * 30)


def test_the_budget_of_a_call(model: Model) -> None:
    answers = model.generate(["hello", "a"], budget=0)
    assert [(answer.reason.value, answer.tokens) for answer in answers] == [("budget", [])] * 2
    assert model.generate("hello", budget=1e6, deadline=0).reason.value == "deadline"
    assert model.generate("hello", budget=float("inf")).reason.value == "end token"
    begin, found = time.perf_counter(), []
    for answer in model.generate_iterable((str(word) for word in ["hello"] * 3), budget=0.3, window=1):
        found.append(answer.reason.value)
        time.sleep(0.4)
    assert found == ["end token", "budget", "budget"]
    assert time.perf_counter() - begin < 60
    with pytest.raises(tfm_export.RequestError, match="budget must be a number of seconds, found '1'"):
        model.generate("hello", budget="1")


def test_lines_that_end_at_their_deadline_are_told(tiny_bundle: Path) -> None:
    result = run(tiny_bundle, "--deadline", "0", "hello", "zz")
    assert (result.exit_code, result.stdout) == (0, "\n\n")
    assert result.stderr == "2 lines ended at their deadline, with what they had by then\n"


@pytest.fixture
def interrupted(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A run that was killed behind line 3, in the middle of a line: the folder of its files."""

    def begin(*options: str) -> Path:
        (tmp_path / "in.txt").write_text(text(LINES))
        run(tiny_bundle, "--inputs", tmp_path / "in.txt", "-o", tmp_path / "whole.txt", *options)
        texts = Job._texts

        def killed(self: Job, decoded: Any) -> Iterator[str]:
            if decoded.number == 5:
                raise KeyboardInterrupt
            yield from texts(self, decoded)

        with monkeypatch.context() as patch:
            patch.setattr(Job, "_texts", killed)
            run(tiny_bundle, "--inputs", tmp_path / "in.txt", "-o", tmp_path / "out.txt", *options)
        partial = partial_path(tmp_path / "out.txt")
        assert record_path(partial).exists()
        lines = partial.read_text().split("\n")
        keep = lines.index(next(line for line in lines if line.startswith("3\t"))) if options == MANY else 2
        partial.write_text("\n".join([*lines[: keep + 1], lines[keep + 1][:4]]))
        return tmp_path

    return begin


@pytest.mark.parametrize("options", [[], ["--json"], [*MANY], ["--json", *MANY]])
def test_a_run_goes_on_where_it_stopped(
    tiny_bundle: Path, interrupted: Callable[..., Path], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, decoded = interrupted(*options), []
    texts = Job._texts
    monkeypatch.setattr(Job, "_texts", lambda self, d: decoded.append(d.number) or texts(self, d))
    files = ("--inputs", folder / "in.txt", "-o", folder / "out.txt")
    result = run(tiny_bundle, *files, *options, "--resume", "--batch-size", "2")
    assert result.exit_code == 1
    assert "line 4: 'b4d' has" in result.stderr
    assert decoded == ([3, 5] if options == [*MANY] else [5])
    assert numberless(folder / "out.txt") == numberless(folder / "whole.txt")
    assert not record_path(partial_path(folder / "out.txt")).exists()
    # There is nothing to go on with now, and the same command begins from the first line.
    again = run(tiny_bundle, *files, *options, "--resume", "--force")
    assert numberless(folder / "out.txt") == numberless(folder / "whole.txt")
    assert "line 2: the text is empty" in again.stderr


def numberless(path: Path) -> list[Any]:
    """The lines of an output without scores, which batches may round otherwise."""
    lines = path.read_text().split("\n")
    if lines[0].startswith("{"):
        return [{k: v for k, v in json.loads(line).items() if k in ("line", "text", "error")} for line in lines[:-1]]
    return [line.split("\t")[::2] for line in lines]


def test_another_input_or_other_options_are_not_gone_on_with(
    tiny_bundle: Path, interrupted: Callable[..., Path]
) -> None:
    folder = interrupted()
    files = ("--inputs", folder / "in.txt", "-o", folder / "out.txt", "--resume")
    other = run(tiny_bundle, *files, "--beam-size", "2", "--long-source", "truncate")
    assert other.exit_code == 1
    assert "out.txt.partial cannot be gone on with: beam_size was 1, and is 2" in other.stderr
    assert "long_source was 'refuse', and is 'truncate'" in other.stderr
    (folder / "in.txt").write_text(text([*LINES, "more"]))
    assert "cannot be gone on with: the input is another one" in run(tiny_bundle, *files).stderr
    (folder / "in.txt").write_text(text(LINES))
    record_path(partial_path(folder / "out.txt")).unlink()
    assert "out.txt.partial.json, which tells what" in run(tiny_bundle, *files).stderr
    begun = run(tiny_bundle, *files[:-1])
    assert "out.txt.partial of an earlier run is begun again; --resume goes on with it" in begun.stderr
    assert (folder / "out.txt").read_text() == (folder / "whole.txt").read_text()


@pytest.mark.parametrize(
    "wrong", [["zz"], ["--inputs", __file__], ["--inputs", __file__, "-o", "x", "--on-error", "skip"]]
)
def test_what_cannot_be_resumed_is_wrong_usage(tiny_bundle: Path, wrong: list[str]) -> None:
    result = run("--bundle", tiny_bundle, *wrong, "--resume")
    assert result.exit_code == 2
    assert "--resume needs --inputs and --output" in result.stderr
