"""`tfm-export run`: what is printed where, in which order, and with which exit code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tfm_export
from tfm_export.bundle import MANIFEST
from tfm_export.cli import cli
from tfm_export.cli.run import split_arguments
from tfm_export.errors import NumericError
from tfm_export.model import Model


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
    assert split_arguments([str(tmp_path / "data"), "a"], None)[1] == [str(tmp_path / "data"), "a"]
    assert split_arguments(["a"], None) == (Path("tfm_bundle"), ["a"])
    assert split_arguments([], None) == (Path("tfm_bundle"), [])
    assert split_arguments([str(tiny_bundle)], tmp_path) == (tmp_path, [str(tiny_bundle)])


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
    assert result.stdout.splitlines() == [expected["hello"], expected["zz"]]
    assert result.stderr.splitlines() == [
        "line 2: the text is empty",
        "line 3: 'b4d' has characters that the model does not know: '4'",
        "line 4: it is not text in UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        "3 of 5 lines could not be decoded",
    ]
    assert result.exit_code == 1


def test_one_sentences_bad_numbers_do_not_lose_the_others(
    tiny_bundle: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate_ids = Model.generate_ids

    def overflowing(self: Model, sources: list[list[int]], **fields: object) -> object:
        if any(ids[0] == 4 for ids in sources):  # "a"
            raise NumericError("not finite")
        return generate_ids(self, sources, **fields)

    monkeypatch.setattr(Model, "generate_ids", overflowing)
    result = run(tiny_bundle, "hello", "a", "zz")
    assert result.stdout.splitlines() == [expected["hello"], expected["zz"]]
    assert result.stderr.splitlines() == ["line 2: not finite", "1 of 3 lines could not be decoded"]
    assert result.exit_code == 1


def test_json_has_an_object_a_line(tiny_bundle: Path, expected: dict[str, str]) -> None:
    result = run(tiny_bundle, "--json", lines="hello\n1\nzz\n")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(o["line"], o["source"], o["text"]) for o in objects] == [
        (1, "hello", expected["hello"]),
        (3, "zz", expected["zz"]),
    ]
    with tfm_export.load(tiny_bundle) as model:
        generation = model.generate("hello")
    assert objects[0]["tokens"] == generation.tokens
    assert objects[0]["score"] == pytest.approx(generation.score)
    assert objects[0]["source_truncated"] is False


def test_ids_in_and_out(tiny_bundle: Path) -> None:
    with tfm_export.load(tiny_bundle) as model:
        generation = model.generate("ab")
    result = run(tiny_bundle, "--ids", lines="4 5 2\n4 x\n99\n")
    assert result.stdout == " ".join(map(str, generation.tokens)) + "\n"
    assert "line 2: ids must be integers" in result.stderr
    assert "line 3: ids must be from 0 to 30, found 99" in result.stderr
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
    assert (refused.exit_code, refused.stdout) == (1, "")
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
    assert "line 1: it is not text in UTF-8" in result.stderr
