"""Texts of files: a byte order mark is no part of them, wherever they are read."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from reference_model import TransformerConfig
from reference_model.data import read_pairs
from tests.test_architecture import FILES, module_of
from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.checkpoints.settings import read_settings
from tfm_export.checkpoints.vocabularies import folder_tokenizer, given_vocabulary
from tfm_export.cli import cli
from tfm_export.errors import RequestError
from tfm_export.quantize.metrics import Development, read_development
from tfm_export.text_files import MARK, read_lines, read_text, read_texts, split_lines
from tfm_export.tokenizer.pieces import BytePairs
from tfm_export.verify.golden import read_golden

LINE = "a\u2028b\x0bc\x85d\re\x1cf"  # none of these ends a line
SYSTEM = {"runtime.threads", "runtime.cpu.processor", "runtime.gpu.cuda", "bench.worker", "runtime.probes"}


def test_a_mark_at_the_beginning_is_no_text_and_only_a_line_feed_ends_a_line() -> None:
    content = MARK + f"{LINE}\r\n\n{LINE}\n\ufeffx\r\n\r\r\n".encode()
    expected = [LINE, "", LINE, "\ufeffx", "\r"]
    assert list(read_lines(io.BytesIO(content))) == expected
    assert read_texts(io.BytesIO(content)) == expected
    assert split_lines("") == []
    assert split_lines("a") == ["a"]
    assert split_lines("\n") == [""]
    assert list(read_lines(io.BytesIO(b"\xff\n"))) == ["\udcff"]


def test_what_is_not_utf_8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"a\n\xfe")
    with path.open("rb") as file, pytest.raises(RequestError, match=r"lines\.txt is not text in UTF-8"):
        read_texts(file)


def with_mark(path: Path, text: str) -> Path:
    path.write_bytes(MARK + text.encode())
    return path


def test_files_of_users_may_begin_with_a_mark(tmp_path: Path) -> None:
    assert read_settings(with_mark(tmp_path / "config.json", '{"heads": 8}')) == {"heads": 8}
    assert read_development(with_mark(tmp_path / "references.tsv", f"x\t{LINE}\r\ny\tz\n")) == Development(
        ["x", "y"], [[LINE], ["z"]]
    )
    assert read_pairs(with_mark(tmp_path / "pairs.tsv", f"x\t{LINE}\r\n")) == [("x", LINE)]


def test_dictionaries_codes_and_tokenizers_may_begin_with_a_mark(tmp_path: Path) -> None:
    config = TransformerConfig(source_vocabulary_size=6, target_vocabulary_size=6, d_model=4, heads=1)
    files = {}
    for begin in ("", "\ufeff"):
        dictionary, codes = (str(tmp_path / name) for name in ("dict.txt", "codes.bpe"))
        Path(dictionary).write_text(f"{begin}hello 9\nworld 3\n", encoding="utf-8")
        Path(codes).write_text(f"{begin}#version: 0.2\nh e\n", encoding="utf-8")
        sides = [(f"{side}_dictionary", dictionary) for side in ("source", "target")]
        sides += [(f"{side}_subwords", codes) for side in ("source", "target")]
        found, _ = given_vocabulary(tmp_path, dict(sides), config, "fairseq")
        files[begin] = json.loads(found["tokenizer.json"])
    assert files["\ufeff"] == files[""]
    assert files[""]["source"]["tokens"][4:] == ["hello", "world"]
    assert files[""]["source"]["splitter"] == "bpe"
    assert BytePairs(MARK + b"#version: 0.2\nh e\n").split("he") == BytePairs(b"#version: 0.2\nh e\n").split("he")
    state = {"model": {"vocab": {"a": 0}}, "added_tokens": []}
    theirs = folder_tokenizer({"tokenizer.json": with_mark(tmp_path / "tokenizer.json", json.dumps(state))}, config)
    assert json.loads(theirs[0]["huggingface.json"]) == state


@pytest.mark.parametrize("given", ["stdin", "inputs"])
@pytest.mark.parametrize("ids", [True, False])
def test_lines_to_decode_may_begin_with_a_mark(tiny_bundle: Path, tmp_path: Path, given: str, ids: bool) -> None:
    content, arguments = (b"4 5 2\n", ["--ids"]) if ids else (b"ab\n", [])
    found = []
    for begin in (b"", MARK):
        (tmp_path / "lines.txt").write_bytes(begin + content)
        files = ["--inputs", str(tmp_path / "lines.txt")] if given == "inputs" else []
        lines = None if files else begin + content
        found.append(CliRunner().invoke(cli, ["run", str(tiny_bundle), *arguments, *files], input=lines))
    assert found[0].exit_code == found[1].exit_code == 0
    assert found[0].stdout == found[1].stdout != ""


def test_a_golden_file_that_an_editor_wrote(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, Bundle.open(tiny_bundle).manifest)
    text = read_text(tiny_bundle / "golden.jsonl")
    with_mark(tmp_path / "golden.jsonl", text)
    assert [golden.source_ids for golden in read_golden(bundle, GOLDEN)] == [
        json.loads(line)["source_ids"] for line in text.split("\n") if line
    ]


def test_texts_are_read_in_one_way() -> None:
    """What reads /proc and the like, or another process, has no marks to fear."""
    for path in FILES:
        if module_of(path) in {*SYSTEM, "text_files"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called, keywords = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
                modes = {a.value for a in node.args if isinstance(a, ast.Constant)}
                opens = (
                    called.rpartition(".")[2] in {"open", "File"}
                    and "encoding" in keywords
                    and "newline" not in keywords
                    and not modes & {*"wa"}
                )
                assert not opens, f"{path}, line {node.lineno}: {called}"
                assert not called.endswith(".read_text"), f"{path}, line {node.lineno}: {called}"
