"""`tfm-export run`: what is printed where, in which order, and with which exit code."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import tfm_export
from tests.numerics import bundle_log_prob_limit
from tests.once import Once
from tfm_export.bundle import MANIFEST
from tfm_export.cli import cli
from tfm_export.cli import job as job_module
from tfm_export.cli.decoding_options import ENTRIES, decoding_fields
from tfm_export.cli.files import output_file, partial_path
from tfm_export.cli.heat_map import draw_attention
from tfm_export.cli.progress import ProgressBar
from tfm_export.cli.run import command, split_arguments
from tfm_export.decoding import DecodeOptions
from tfm_export.errors import NumericError, RequestError
from tfm_export.model import runner


def run(*arguments: str | Path, lines: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["run", *map(str, arguments)], input=lines)


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> dict[str, str]:
    words = ["hello", "a", "don't", "zz"]
    with tfm_export.load(tiny_bundle) as model:
        return {w: g.text for w, g in zip(words, model.generate(words), strict=True)}


def test_texts_on_the_command_line(tiny_bundle: Path, expected: dict[str, str]) -> None:
    result = run(tiny_bundle, "hello", "don't")
    assert result.stdout.splitlines() == [expected["hello"], expected["don't"]]
    assert (result.stderr, result.exit_code) == ("", 0)


def test_the_first_argument_is_the_bundle_only_if_it_is_one(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert split_arguments([str(tiny_bundle), "a"], None) == (tiny_bundle, ["a"])
    assert split_arguments(["a"], None) == (Path("tfm_bundle"), ["a"])
    assert split_arguments([], None) == (Path("tfm_bundle"), [])
    assert split_arguments([str(tiny_bundle)], tmp_path) == (tmp_path, [str(tiny_bundle)])


def test_what_is_on_the_disk_is_not_decoded_as_a_text(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("hello\n")
    (tmp_path / "data").mkdir()
    for argument, found in (
        (tmp_path / "words.txt", "words.txt is a file"),
        (tmp_path / "data", "data is a folder without bundle.json"),
        (tiny_bundle, "tfm_bundle is a bundle too"),
    ):
        result = run(tiny_bundle, "hello", argument)
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"{found}: it is not decoded as a text" in result.stderr
        assert f'--inputs FILE for the lines of a file; --bundle {tiny_bundle} "TEXT"' in result.stderr
        with pytest.raises(RequestError, match=found):
            split_arguments([str(argument)] if argument != tiny_bundle else [str(argument)] * 2, None)
        assert split_arguments([str(argument)], tiny_bundle) == (tiny_bundle, [str(argument)])


def test_what_looks_like_a_path_is_not_decoded_as_a_text(
    tiny_bundle: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no bundle nosuch, and tfm_bundle is not a bundle" in run("nosuch").stderr
    shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    for argument in ("./nosuch", "my_bundle", "lines.txt", "~user", "models/de"):
        result = run(argument, "hello")
        assert (result.exit_code, result.stdout) == (1, "")
        assert f'there is no bundle {argument}\nTry: the path of a bundle; --bundle tfm_bundle "TEXT"' in result.stderr
    for texts in (["zz"], ["a", "and/or"], ["his / her"], ["3.14"]):
        assert split_arguments(texts, None) == (Path("tfm_bundle"), texts)
    assert run("zz").stdout == expected["zz"] + "\n"


def test_the_bundle_in_the_current_folder(
    tiny_bundle: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("zz")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "tfm_bundle is not a bundle" in result.stderr
    shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    assert run("zz").stdout == expected["zz"] + "\n"
    assert run(lines="zz\n").stdout == expected["zz"] + "\n"


def test_lines_come_out_in_order_whatever_the_batches(tiny_bundle: Path) -> None:
    words = [letter * length for letter, length in zip("abcdefghijk", [1, 9, 2, 30, 3, 5, 1, 7, 8, 2, 4], strict=True)]
    with tfm_export.load(tiny_bundle) as model:
        texts = [model.generate(word).text for word in words]
    for size in ("1", "2", "32"):
        result = run(tiny_bundle, "--batch-size", size, lines="\r\n".join(words))
        assert result.stdout.splitlines() == texts


def test_a_bad_line_is_told_and_the_others_are_written(tiny_bundle: Path, expected: dict[str, str]) -> None:
    result = run("--bundle", tiny_bundle, lines=b"hello\n\nb4d\n\xff\xfe\nzz\n")
    assert result.stdout.splitlines() == [expected["hello"], "", "", "", expected["zz"]]
    assert result.stderr.splitlines() == [
        "line 2: the text is empty",
        "line 3: 'b4d' has characters that the model does not know: '4'",
        "Try: write it with what the model was trained on: <unk> a b c d e f g h i j k l m n o p q r s t u v w x y z '",
        "line 4: the text is not UTF-8: byte 0xff at place 0",
        "3 of 5 lines could not be decoded",
    ]
    assert result.exit_code == 1


def test_one_sentences_bad_numbers_do_not_lose_the_others(
    tiny_bundle: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = runner.generate_each

    def overflowing(model: object, requests: Sequence[Any], *rest: Any, **settings: Any) -> Any:
        if any(request.source[0] == 4 for request in requests):  # "a"
            raise NumericError("not finite")
        return generate(model, requests, *rest, **settings)

    monkeypatch.setattr(runner, "generate_each", overflowing)
    result = run(tiny_bundle, "hello", "a", "zz")
    assert result.stdout.splitlines() == [expected["hello"], "", expected["zz"]]
    assert result.stderr.splitlines() == ["line 2: not finite", "1 of 3 lines could not be decoded"]
    assert result.exit_code == 1


def test_json_has_an_object_a_line(tiny_bundle: Path, expected: dict[str, str]) -> None:
    result = run(tiny_bundle, "--json", lines="hello\n1\nzz\n")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    refused = objects.pop(1)
    assert (refused["line"], refused["source"], refused.keys()) == (2, "1", {"line", "source", "error"})
    assert refused["error"].startswith("'1' has characters that the model does not know")
    assert [(o["line"], o["source"], o["text"]) for o in objects] == [
        (1, "hello", expected["hello"]),
        (3, "zz", expected["zz"]),
    ]
    with tfm_export.load(tiny_bundle) as model:
        generation = model.generate("hello")
        limit = 2 * bundle_log_prob_limit(model.bundle.manifest)
    assert objects[0]["tokens"] == generation.tokens
    assert objects[0]["score"] == pytest.approx(generation.score, rel=0, abs=limit)
    assert objects[0]["source_truncated"] is False
    assert objects[0]["reason"] == "end token"
    assert objects[0]["log_probs"] == pytest.approx(generation.hypotheses[0].log_probs, rel=0, abs=limit)
    assert "hypotheses" not in objects[0]


def test_ids_in_and_out(tiny_bundle: Path) -> None:
    with tfm_export.load(tiny_bundle) as model:
        generation = model.generate("ab")
    result = run(tiny_bundle, "--ids", lines="4 5 2\n4 x\n99\n")
    assert result.stdout == " ".join(map(str, generation.tokens)) + "\n\n\n"
    assert "line 2: ids must be integers" in result.stderr
    assert "line 3: the source has ids that the vocabulary of 31 lacks: 99" in result.stderr
    state = json.loads(run(tiny_bundle, "--ids", "--json", "4 5 2").stdout)
    assert state["source_ids"] == [4, 5, 2]
    assert state["tokens"] == generation.tokens
    assert "text" not in state


def test_lengths(tiny_bundle: Path) -> None:
    assert len(run(tiny_bundle, "--max-length", "3", "hello").stdout.split()) <= 3
    result = run(tiny_bundle, "--max-length", "65", "hello", "zz")
    assert result.exit_code == 1
    assert result.stderr == "Error: max_decoding_length is 65; the model's targets have at most 64 tokens\n"


def test_long_sources(tiny_bundle: Path) -> None:
    refused = run(tiny_bundle, "a" * 70)
    assert (refused.exit_code, refused.stdout) == (1, "\n")
    assert "line 1: the source has 71 tokens; the model takes at most 64" in refused.stderr
    cut = run(tiny_bundle, "--long-source", "truncate", "a" * 70)
    assert cut.exit_code == 0
    assert cut.stdout == run(tiny_bundle, "a" * 63).stdout
    assert cut.stderr == "line 1: the source was cut to the 64 tokens that the model takes\n"
    assert json.loads(run(tiny_bundle, "--json", "--long-source", "truncate", "a" * 70).stdout)["source_truncated"]


def test_a_bundle_without_tokenizer_wants_ids(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    state = json.loads((copy / MANIFEST).read_text())
    state["files"] = {k: v for k, v in state["files"].items() if not k.startswith("tokenizer/")}
    (copy / MANIFEST).write_text(json.dumps(state))
    result = run(copy, "hello")
    assert result.exit_code == 1
    assert "has no tokenizer: it takes ids, not text\nTry: --ids" in result.stderr
    assert run(copy, "--ids", "4 2").exit_code == 0


def test_no_input_is_no_output(tiny_bundle: Path) -> None:
    result = run(tiny_bundle, lines="")
    assert (result.output, result.exit_code) == ("", 0)


def test_arguments_need_not_be_text(tiny_bundle: Path) -> None:
    result = run(tiny_bundle, os.fsdecode(b"caf\xe9"))
    assert result.stderr.startswith("line 1: the text is not UTF-8: byte 0xe9 at place 3")


def test_every_option_of_decoding_is_there_under_its_name() -> None:
    names = {field.name for field in fields(DecodeOptions)} - {"constraint"}  # a function
    assert ENTRIES.keys() == names
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--" + name.replace("_", "-") for name in names} <= options


def test_options_reach_decoding_as_they_are() -> None:
    words = ["--beam-size", "3", "--length-penalty", "0.5", "--end-token", "2 5", "--disable-unk", "--n-best", "2"]
    words += ["--early-stopping", "true", "--compatibility", "huggingface", "--no-start-token-repeats"]
    words += ["--suppress", "p1 p2", "--suppress", "p3", "--batch-type", "tokens", "--no-return-scores"]
    words += ["--begin-suppress-tokens", "4 5", "--sequence-bias", "4 5=-2.5", "--sequence-bias", "6=1"]
    words += ["--exponential-decay-length-penalty", "5 1.1", "--encoder-no-repeat-ngram-size", "3"]
    parsed = command.make_context("run", words).params
    values = {name: parsed[name] for name in ENTRIES}
    assert decoding_fields(values, targets_are_ids=False) == {
        "beam_size": 3,
        "length_penalty": 0.5,
        "end_token": [2, 5],
        "disable_unk": True,
        "num_hypotheses": 2,
        "early_stopping": True,
        "compatibility": "huggingface",
        "start_token_repeats": False,
        "suppress_sequences": ("p1 p2", "p3"),
        "begin_suppress_tokens": [4, 5],
        "sequence_bias": (([4, 5], -2.5), ([6], 1.0)),
        "exponential_decay_length_penalty": (5, 1.1),
        "encoder_no_repeat_ngram_size": 3,
        "batch_type": "tokens",
        "return_scores": False,
    }
    assert decoding_fields({"suppress_sequences": ("4 5", "6")}, targets_are_ids=True) == {
        "suppress_sequences": [[4, 5], [6]]
    }


def test_several_hypotheses(tiny_bundle: Path) -> None:
    with tfm_export.load(tiny_bundle) as model:
        generations = model.generate(["hello", "zz"], beam_size=3, num_hypotheses=2)
    options = ("--beam-size", "3", "--n-best", "2")
    lines = run(tiny_bundle, "hello", "zz", *options).stdout.splitlines()
    expected = [(n, g, i) for n, g in enumerate(generations, 1) for i in range(2)]
    assert lines == [f"{n}\t{g.hypotheses[i].score:.4f}\t{g.texts[i]}" for n, g, i in expected]
    state = json.loads(run(tiny_bundle, "hello", *options, "--json").stdout)
    assert [h["text"] for h in state["hypotheses"]] == generations[0].texts
    assert state["text"] == generations[0].text
    branches = json.loads(run(tiny_bundle, "hello", "--return-alternatives", "--n-best", "4", "--json").stdout)
    assert len({h["tokens"][0] for h in branches["hypotheses"]}) == 4


def test_prefixes_are_text_or_ids(tiny_bundle: Path) -> None:
    assert run(tiny_bundle, "hello", "--target-prefix", "p20 p21").stdout.startswith("p20 p21 ")
    assert run(tiny_bundle, "--ids", "11 8 2", "--target-prefix", "24 25").stdout.startswith("24 25 ")
    wrong = run(tiny_bundle, "--ids", "11 8 2", "--target-prefix", "p20")
    assert wrong.exit_code == 2
    assert "--target-prefix takes ids with --ids" in wrong.stderr


def test_tokens_as_they_come(tiny_bundle: Path, expected: dict[str, str]) -> None:
    result = run(tiny_bundle, "--stream", lines="hello\n\nzz\n")
    assert result.stdout.splitlines() == [expected["hello"], "", expected["zz"]]
    assert result.stderr.splitlines() == ["line 2: the text is empty", "1 of 3 lines could not be decoded"]
    ids = run(tiny_bundle, "--ids", "4 5 2")
    assert run(tiny_bundle, "--ids", "--stream", "4 5 2").stdout == ids.stdout
    cut = run(tiny_bundle, "--stream", "--long-source", "truncate", "a" * 70)
    assert cut.stderr == "line 1: the source was cut to the 64 tokens that the model takes\n"


def test_a_draft_changes_no_token(tiny_variants: Path) -> None:
    plain = run("--bundle", str(tiny_variants), "hello", "parity", "--json", "--beam-size", "1")
    for draft in ("w8", "int8"):
        found = run("--bundle", str(tiny_variants), "hello", "parity", "--json", "--beam-size", "1", "--draft", draft)
        for ours, theirs in zip(found.stdout.splitlines(), plain.stdout.splitlines(), strict=True):
            assert json.loads(ours)["tokens"] == json.loads(theirs)["tokens"]
    refused = run("--bundle", str(tiny_variants), "hello", "--beam-size", "3", "--draft", "w8")
    assert refused.exit_code == 2
    assert "--draft guesses for one beam, and there are 3: --beam-size 1" in refused.stderr


def test_a_deadline(tiny_bundle: Path) -> None:
    state = json.loads(run(tiny_bundle, "hello", "--deadline", "0", "--json").stdout)
    assert (state["tokens"], state["reason"]) == ([], "deadline")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hello", "--stream", "--json"], "--stream prints text as it comes"),
        (["hello", "--stream", "--n-best", "2"], "--stream prints one hypothesis"),
        (["hello", "--return-attention"], "--return-attention shows in the output of --json only"),
        (["hello", "zz", "--attention", "a.png"], "--attention draws one sentence"),
        (["hello", "--attention", "a.txt"], "--attention draws .png, .svg, .pdf, found a.txt"),
        (["hello", "--end-token", "x"], "--end-token"),
        (["hello", "--inputs", __file__], "give TEXTs or --inputs, not both"),
    ],
)
def test_what_contradicts_itself_is_wrong_usage(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_files(tiny_bundle: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    (tmp_path / "in.txt").write_bytes(b"hello\r\n\xff\nzz")
    files = ("--inputs", tmp_path / "in.txt", "--output", tmp_path / "out.txt")
    result = run(tiny_bundle, *files)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert (tmp_path / "out.txt").read_text() == f"{expected['hello']}\n\n{expected['zz']}\n"
    assert not partial_path(tmp_path / "out.txt").exists()
    again = run(tiny_bundle, *files)
    assert again.exit_code == 1
    assert again.stderr == f"Error: {tmp_path / 'out.txt'} exists already\nTry: --force to replace it\n"
    (tmp_path / "in.txt").write_text("a\n")
    assert run(tiny_bundle, *files, "--force").exit_code == 0
    assert (tmp_path / "out.txt").read_text() == f"{expected['a']}\n"


def test_what_is_done_is_kept_when_the_work_is_cut_short(
    tiny_bundle: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_module.Job, "_fail", interrupt)
    path = tmp_path / "out.txt"
    result = CliRunner().invoke(cli, ["run", str(tiny_bundle), "-o", str(path)], input="zz\n\nhello\n")
    assert result.exit_code == 130
    assert f"what was done is in {partial_path(path)}" in result.stderr
    assert partial_path(path).read_text() == expected["zz"] + "\n"
    assert not path.exists()
    again = run(tiny_bundle, "-o", path, "zz")
    assert again.exit_code == 0
    assert f"{partial_path(path)} of an earlier run is begun again" in again.stderr
    assert path.read_text() == expected["zz"] + "\n"
    assert [*tmp_path.iterdir()] == [path]
    path.unlink()
    with pytest.raises(ZeroDivisionError), output_file(path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []  # nothing was done


def test_an_output_that_is_no_file_is_written_to_as_it_stands(tiny_bundle: Path, tmp_path: Path) -> None:
    null = tmp_path / "null"
    os.mkfifo(null)
    reader = os.open(null, os.O_RDONLY | os.O_NONBLOCK)
    for force in ([], ["--force"]):
        assert run(tiny_bundle, "zz", "-o", null, *force).exit_code == 0
    assert len(os.read(reader, 10_000).splitlines()) == 2
    os.close(reader)
    assert stat.S_ISFIFO(null.stat().st_mode)
    assert not partial_path(null).exists()


def test_an_output_that_is_a_link_stays_one(tiny_bundle: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "out.txt").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "data" / "out.txt")
    assert run(tiny_bundle, "zz", "-o", tmp_path / "link", "--force").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "data" / "out.txt").read_text() == expected["zz"] + "\n"


def test_an_input_is_not_written_over(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    partial_path(path).write_text("hello\n")
    result = run(tiny_bundle, "--inputs", partial_path(path), "-o", path, "--force")
    assert result.exit_code == 1
    assert "is read, and would be written to" in result.stderr
    assert partial_path(path).read_text() == "hello\n"


def test_texts_and_numbers_of_any_length(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_bundle, "tfm_bundle")
    long = run("a" * 5000)  # too long for a file's name
    assert long.exit_code == 1
    assert "the source has 5001 tokens" in long.stderr
    result = run("--ids", lines="1" * 5000 + "\n-" + "1" * 5000 + "\n1 2\n")
    assert (result.exit_code, [bool(line) for line in result.stdout.splitlines()]) == (1, [False, False, True])
    assert "2 of 3 lines could not be decoded" in result.stderr
    result = run("zz", "-o", tmp_path / ("x" * 250))
    assert result.exit_code == 1
    assert "cannot be written: File name too long" in result.stderr


def test_streams_that_the_shell_closed_are_told(tiny_bundle: Path) -> None:
    for closed, message in (("<&-", "standard input is closed"), (">&- </dev/null", "standard output is closed")):
        command = f"{sys.executable} -m tfm_export.cli run {tiny_bundle} {closed}"
        result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
        assert result.returncode == 1
        assert result.stderr.startswith(f"Error: {message}")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal() -> None:
    terminal, now = Terminal(), 0.0
    progress = ProgressBar(24, stream=terminal, clock=lambda: now)
    now = 2.0
    progress.advance("hello", 3)  # 6 of 24 bytes
    assert terminal.getvalue() == "\r██████░░░░░░░░░░░░░░░░░░  25%  1 lines, 0.5 lines/s, 2 tokens/s, 0:06 left"
    progress.advance("a", 1)
    assert "2 lines" not in terminal.getvalue()  # too soon
    progress.advance("a", 1, pause=True)
    assert "42%  3 lines" in terminal.getvalue()
    progress.clear()
    assert terminal.getvalue().rstrip(" \r").endswith("left")
    progress.finish()
    assert terminal.getvalue().endswith(" tokens/s\n")


def test_no_progress_elsewhere() -> None:
    for stream, enabled in ((io.StringIO(), True), (Terminal(), False)):
        progress = ProgressBar(None, stream=stream, enabled=enabled)
        progress.advance("hello", 3)
        progress.finish()
        assert stream.getvalue() == ""


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


@pytest.fixture(scope="module")
def attention_bundle(tiny_checkpoint: Path, once: Once) -> Path:
    def make(folder: Path) -> None:
        from tfm_export.export import export_bundle

        export_bundle(tiny_checkpoint, folder / "tfm_bundle", attention_layer=-1, verify=False)

    return once("attention_bundle", make) / "tfm_bundle"


def test_the_alignment_of_a_sentence(attention_bundle: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    picture = tmp_path / "alignment.svg"
    result = run(attention_bundle, "hello", "--attention", picture)
    assert result.stdout == expected["hello"] + "\n"
    labels = [
        label for label in [*"helo", "&lt;/s&gt;", *expected["hello"].split()] if f">{label}<" in picture.read_text()
    ]
    assert labels == [*"helo", "&lt;/s&gt;", *expected["hello"].split()]
    assert "exists already" in run(attention_bundle, "hello", "--attention", picture).stderr
    state = json.loads(run(attention_bundle, "hello", "--return-attention", "--json").stdout)
    assert np.shape(state["attention"]) == (len(state["tokens"]), 6)
    # Each of the six weights is printed with six digits, so off by half a unit of the last.
    assert np.sum(state["attention"], axis=1) == pytest.approx(1, rel=0, abs=6 * 0.5e-6 + 1e-6)


def test_a_heat_map_has_a_cell_for_each_weight(tmp_path: Path) -> None:
    small, large = tmp_path / "small.png", tmp_path / "large.png"
    draw_attention(small, np.eye(3, 4, dtype=np.float32), list("abcd"), ["x", " ", "$z$"])
    draw_attention(large, np.eye(3, 8, dtype=np.float32), list("abcdefgh"), ["x", " ", "$z$"])
    (width, height), (wider, same) = png_size(small), png_size(large)
    assert wider - width == pytest.approx(4 * 0.32 * 160, abs=4)
    assert same == pytest.approx(height, abs=2)
