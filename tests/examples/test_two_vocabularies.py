"""Sources with special ids of their own: Python, the command line and Node give what the model itself gives."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

import tfm_export
from tests.examples.javascript import ROOT, needs_node, needs_packages
from tests.examples.two_vocabularies import SETTINGS, SOURCE, TARGET, TwoVocabularies, greedy, make_model, save
from tests.once import Once
from tfm_export.bundle import Bundle, SourceIds, SpecialIds
from tfm_export.cli import cli
from tfm_export.errors import RequestError
from tfm_export.export import export_bundle
from tfm_export.generate_graph import add_generate_graph

ONES = Random(0)
WORDS = [" ".join(ONES.choices(SOURCE[4:], k=ONES.randrange(1, 8))) for _ in range(24)]
SPELLED = ["a <s> b", "<pad> c", "d </s>", "<unk> e", "e z f", "z", " a\u2028b  ", " ", "a " * 30]
TEXTS = [*WORDS, *SPELLED]


@pytest.fixture(scope="session")
def exported(once: Once) -> Path:
    """A folder with the model's bundle, verified, and with generate.onnx. Do not change it."""

    def make(folder: Path) -> None:
        path = save(make_model(), folder / "model.pt")
        bundle, _ = export_bundle(path, folder / "bundle", settings=SETTINGS, inputs=[text for text in WORDS if text])
        add_generate_graph(bundle)

    return once("two_vocabularies", make)


@pytest.fixture(scope="session")
def model() -> TwoVocabularies:
    return make_model()


def expected_text(model: TwoVocabularies, text: str, special: SpecialIds) -> str | None:
    """What the model itself gives for a text; None for one that it cannot take."""
    ids = special.source or special
    found = []
    for word in text.split():
        i = SOURCE.index(word) if word in SOURCE else ids.unk
        found.append(ids.unk if i in (ids.pad, ids.bos, ids.eos) else i)
    found = [*[ids.bos] * special.source_starts_with_bos, *found, *[ids.eos] * special.source_ends_with_eos]
    if None in found or not text.split() or len(found) > 24:
        return None
    target = greedy(model, tuple(found), special.bos, special.eos)
    return "".join(TARGET[i] for i in target if i not in (special.pad, special.bos, special.eos))


def test_dictionaries_tell_both_sets_and_python_gives_what_the_model_gives(
    exported: Path, model: TwoVocabularies
) -> None:
    special = Bundle.open(exported / "bundle").manifest.special_ids
    source = SourceIds(pad=0, bos=2, eos=3, unk=1)
    assert special == SpecialIds(
        pad=0, bos=1, eos=2, source_starts_with_bos=True, source_ends_with_eos=True, source=source
    )
    wanted = [expected_text(model, text, special) for text in WORDS]
    assert len({*wanted}) > 12, "targets that differ"
    with tfm_export.load(exported / "bundle", device="cpu") as loaded:
        assert [g.text for g in loaded.generate(WORDS)] == wanted
        ids = [[2, *map(SOURCE.index, text.split()), 3] for text in WORDS]
        assert [loaded.encode_text(text).ids for text in WORDS] == ids
        tokens = [h.hypotheses[0].tokens for h in loaded.generate_ids(ids)]
        assert ["".join(TARGET[i] for i in row) for row in tokens] == wanted
        forced = loaded.generate(WORDS[0], target_prefix="zn")
        assert forced.text.startswith("zn")
        assert sum(loaded.score([WORDS[0]], [wanted[0] or ""])[0]) < 0
        assert loaded.encode_text("a " * 30, long_source="truncate").ids == [2, *[4] * 22, 3]


def test_the_command_line_gives_what_the_model_gives(exported: Path, model: TwoVocabularies, tmp_path: Path) -> None:
    special = Bundle.open(exported / "bundle").manifest.special_ids
    (tmp_path / "in.txt").write_text("\n".join(WORDS) + "\n")
    path = str(exported / "bundle")
    done = CliRunner().invoke(cli, ["run", path, "--inputs", str(tmp_path / "in.txt"), "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [expected_text(model, text, special) for text in WORDS]
    shown = CliRunner().invoke(cli, ["inspect", path])
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    for row in ("pad 0 '<pad>' 0 '<blank>'", "bos 2 '<s>', added 1 '<go>'", "eos 3 '</s>', added 2 '<stop>'"):
        assert row in lines
    assert "unk 1 '<unk>' none" in lines
    assert "warning" not in shown.output


@dataclass(frozen=True)
class Case:
    """A bundle whose manifest says otherwise what its special ids are."""

    path: Path
    special: SpecialIds


@pytest.fixture(scope="session")
def cases(exported: Path, once: Once) -> list[Case]:
    """Bundles of every combination: start token, end token, source ids of their own, pad = eos, unknown token."""

    def sets() -> Iterator[tuple[str, SpecialIds]]:
        for starts, ends, own, pad_is_eos, unk in product([False, True], repeat=5):
            pad, known = (2 if pad_is_eos else 0), (3 if unk else None)
            source = SourceIds(pad=3 if pad_is_eos else 0, bos=2, eos=3, unk=1 if unk else None) if own else None
            special = SpecialIds(
                pad=pad,
                bos=1,
                eos=2,
                unk=known,
                source_starts_with_bos=starts,
                source_ends_with_eos=ends,
                source=source,
            )
            yield f"{starts:d}{ends:d}{own:d}{pad_is_eos:d}{unk:d}", special
        none = SourceIds(pad=0, bos=None, eos=None, unk=None)
        yield "none", SpecialIds(pad=2, bos=1, eos=2, unk=3, source_ends_with_eos=False, source=none)

    def make(folder: Path) -> None:
        for name, special in sets():
            path = shutil.copytree(exported / "bundle", folder / name)
            bundle = Bundle.open(path, check_hashes=False)
            bundle.manifest = replace(bundle.manifest, special_ids=special)
            bundle.save()
            add_generate_graph(bundle, verify=False, force=True)

    folder = once("two_vocabularies_cases", make)
    return [Case(folder / name, special) for name, special in sets()]


def test_python_gives_what_the_model_gives_for_every_combination(cases: list[Case], model: TwoVocabularies) -> None:
    for case in cases:
        with tfm_export.load(case.path, device="cpu", threads=1) as loaded:
            wanted = [expected_text(model, text, case.special) for text in TEXTS]
            assert loaded.bundle.manifest.special_ids == case.special
            found = [*loaded.generate_iterable(TEXTS, on_error="yield")]
            texts = [None if isinstance(answer, RequestError) else answer.text for answer in found]
            assert texts == wanted, case


GENERATE = """
import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-node";
import { Generator, TextError, Vocabulary } from "GENERATOR";
const { folders, texts } = JSON.parse(readFileSync(0, "utf8"));
const found = [];
for (const folder of folders) {
  const json = (name) => JSON.parse(readFileSync(`${folder}/${name}`, "utf8"));
  const manifest = json("bundle.json");
  const session = await ort.InferenceSession.create(`${folder}/onnx/fp32/generate.onnx`);
  const vocabulary = new Vocabulary(json("tokenizer/tokenizer.json"), manifest.special_ids);
  const generator = new Generator(ort, session, manifest, vocabulary);
  const taken = texts.filter((text) => {
    try {
      return generator.encode(text);
    } catch (problem) {
      if (problem instanceof TextError) return false;
      throw problem;
    }
  });
  const answers = await generator.generate(taken);
  found.push(texts.map((text) => (taken.includes(text) ? answers[taken.indexOf(text)].text : null)));
}
console.log(JSON.stringify(found));
""".replace("GENERATOR", str(ROOT / "examples/web/generator.mjs"))


@needs_node
@needs_packages("node")
def test_node_gives_what_the_model_gives_for_every_combination(
    cases: list[Case], model: TwoVocabularies, tmp_path: Path
) -> None:
    (tmp_path / "node_modules").symlink_to(ROOT / "examples/node/node_modules")
    (tmp_path / "generate.mjs").write_text(GENERATE, encoding="utf-8")
    task = json.dumps({"folders": [str(case.path) for case in cases], "texts": TEXTS})
    command = ["node", tmp_path / "generate.mjs"]
    done = subprocess.run(command, input=task, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    for case, found in zip(cases, json.loads(done.stdout), strict=True):
        assert found == [expected_text(model, text, case.special) for text in TEXTS], case


@needs_node
@needs_packages("node")
def test_line_n_of_nodes_output_belongs_to_line_n_of_its_input(exported: Path, model: TwoVocabularies) -> None:
    special = Bundle.open(exported / "bundle").manifest.special_ids
    lines = ["\ufeffa b", "a\u2028b c\r", "", *WORDS * 2, "a\x0bb\x85c", "a " * 30, "h i j"]
    command = ["node", ROOT / "examples/node/generate.mjs", exported / "bundle"]
    text = "\n".join(lines).encode()  # the last line has no line feed
    done = subprocess.run(command, input=text, capture_output=True, check=False, timeout=120)
    assert done.returncode == 1
    read = [line.removeprefix("\ufeff").removesuffix("\r") for line in lines]
    answers = [expected_text(model, line, special) or "" for line in read]
    assert done.stdout.decode().split("\n") == [*(f"{line}\t{a}" for line, a in zip(read, answers, strict=True)), ""]
    told = [line.split(":")[0] for line in done.stderr.decode().splitlines()]
    assert told == ["line 3", f"line {len(lines) - 1}"]


def test_the_document_names_every_part_of_the_special_ids() -> None:
    section = (ROOT / "docs/any_language.md").read_text(encoding="utf-8").split("\n## Text\n")[1].split("\n## ")[0]
    names = asdict(SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True))
    assert [name for name in names if f"`{name}`" not in section] == []
