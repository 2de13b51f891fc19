"""The Node example gives what Python gives, from the vocabulary to the words."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from tests.examples.conftest import Example
from tests.examples.javascript import ROOT, needs_node, needs_packages
from tfm_export import generate_graph as stage
from tfm_export.bundle import Bundle, SpecialIds
from tfm_export.errors import RequestError
from tfm_export.tokenizer.vocabulary import Side, VocabularyTokenizer

pytestmark = needs_node
installed = needs_packages("node")

EXAMPLE = ROOT / "examples/node"


def run(*arguments: str | Path, lines: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = ["node", EXAMPLE / "generate.mjs", *arguments]
    text = None if lines is None else "".join(f"{line}\n" for line in lines)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)


@installed
def test_fifty_words_are_pythons(g2p: Example) -> None:
    done = run(g2p.bundle, lines=[*g2p.phones])
    assert (done.returncode, done.stderr) == (0, "")
    assert dict(line.split("\t") for line in done.stdout.splitlines()) == g2p.phones


@installed
def test_words_may_be_arguments_in_any_case_and_among_spaces(g2p: Example) -> None:
    word, phones = next(iter(g2p.phones.items()))
    done = run(g2p.bundle, word.upper(), f"  {word}\u3000")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("\t")[1] for line in done.stdout.splitlines()] == [phones, phones]


@installed
def test_a_bundle_whose_weights_are_in_a_file_of_their_own(
    g2p: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(g2p.bundle, tmp_path / "b")
    monkeypatch.setattr(stage, "MOST_BYTES_INSIDE", 0)
    stage.add_generate_graph(Bundle.open(tmp_path / "b"), verify=False, force=True)
    assert (tmp_path / "b/onnx/fp32/generate.onnx").stat().st_size < 200_000
    words = [*g2p.phones][:5]
    done = run(tmp_path / "b", *words)
    assert [line.split("\t")[1] for line in done.stdout.splitlines()] == [g2p.phones[word] for word in words]


@installed
def test_lines_that_cannot_be_decoded_are_told_and_the_others_are(g2p: Example) -> None:
    words = [*g2p.phones][:2]
    done = run(g2p.bundle, lines=[words[0], "x1y2", "", "a" * 64, words[1]])
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"{words[0]}\t{g2p.phones[words[0]]}",
        "x1y2\t",
        "\t",
        f"{'a' * 64}\t",
        f"{words[1]}\t{g2p.phones[words[1]]}",
    ]
    assert done.stderr.splitlines() == [
        'line 2: "x1y2": the model does not know "1" "2"',
        'line 3: "": the text is empty',
        f'line 4: "{"a" * 64}": the text has 65 tokens with those around it; the model takes 64',
    ]


@installed
def test_what_cannot_be_done_is_told(g2p: Example, tmp_path: Path) -> None:
    done = run(g2p.bundle, "--variant", "w8", "word")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the bundle has no onnx/w8/generate.onnx: tfm-export generate-graph" in done.stderr
    done = run(tmp_path / "nowhere", "word")
    assert (done.returncode, done.stdout) == (1, "")
    assert "bundle.json" in done.stderr
    assert run().returncode == 2
    assert run("--help").stdout.startswith("Usage: node generate.mjs")


TOKENS = ("<pad>", "<s>", "</s>", "<unk>", *"abcdé'ßi̇σ", "ab", "cd", " ")
ENCODE = """
import { readFileSync } from "node:fs";
import { Vocabulary } from "GENERATOR";
const { cases, state, special } = JSON.parse(readFileSync(0, "utf8"));
const encode = ({ split, lowercase, unk, text }) => {
  const vocabulary = new Vocabulary({ ...state, source: { ...state.source, split, lowercase } }, { ...special, unk });
  try { return vocabulary.encode(text); } catch (problem) { return problem.constructor.name; }
};
console.log(JSON.stringify(cases.map(encode)));
""".replace("GENERATOR", str(ROOT / "examples/web/generator.mjs"))
LETTERS = [*"abcdéABCDÉ'ßİΣσ \t\n\x1c\x85\xa0\u2028\u3000\ufeff<>s/", "ab", "cd", " ab ", "<s>", "é", "\U0001f600"]


def python_ids(split: str, lowercase: bool, unk: int | None, text: str) -> list[int] | str:
    side = Side(tokens=TOKENS, split=split, lowercase=lowercase)
    special = SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True, unk=unk)
    try:
        return VocabularyTokenizer(side, side, special).encode_source(text)
    except RequestError:
        return "TextError"


def test_the_vocabulary_reads_texts_as_python_does() -> None:
    random = Random(0)
    cases = [
        {
            "split": random.choice(["characters", "words"]),
            "lowercase": random.random() < 0.5,
            "unk": random.choice([None, 3]),
            "text": "".join(random.choices(LETTERS[: random.choice([5, len(LETTERS)])], k=random.randrange(8))),
        }
        for _ in range(3000)
    ]
    side = {"tokens": TOKENS, "split": "words", "lowercase": False}
    special = asdict(SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True))
    task = {"cases": cases, "state": {"kind": "vocabulary", "source": side, "target": side}, "special": special}
    command = ["node", "--input-type=module", "--eval", ENCODE]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = [python_ids(**case) for case in cases]
    assert 1000 < sum(isinstance(ids, list) for ids in expected) < 2900, "texts that can be read, and others"
    assert [
        (case, ids, found)
        for case, ids, found in zip(cases, expected, json.loads(done.stdout), strict=True)
        if ids != found
    ] == []
