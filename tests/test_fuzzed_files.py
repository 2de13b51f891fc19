"""Files changed at random are read or refused with a sentence: never a traceback, a hang, or much memory."""

from __future__ import annotations

import io
import json
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.checkpoints.test_frameworks import FIXTURES, marian_arrays
from tests.checkpoints.test_huggingface import build
from tests.checkpoints.test_layouts import IDS, LAYOUTS, SOURCES, TORCH
from tests.mutations import mutate
from tests.once import Once
from tests.tokenizer.test_huggingface import SIZE, bundle_of, byte_pairs, unigram
from tfm_export.bundle import Bundle, file_hash
from tfm_export.checkpoints import read_checkpoint, read_settings
from tfm_export.checkpoints.vocabularies import piece_files
from tfm_export.cli import cli
from tfm_export.errors import TfmExportError
from tfm_export.model import load
from tfm_export.tokenizer import load_tokenizer
from tfm_export.verify.golden import read_golden

pytestmark = pytest.mark.filterwarnings("ignore")  # what libraries say of a file that is then refused

MOST_SECONDS = 10  # of this process's time on a CPU
MOST_BYTES = 10**9
LAYOUT_SETTINGS = {"torch": {**TORCH, "heads": 3}, "tutorial": {**IDS, "heads": 3}}
LAYOUT_SETTINGS["annotated"] = {**IDS, **SOURCES, "heads": 3}
FOLDERS = ("bart", "t5", "eole_gated")
CHECKPOINTS = (
    "reference",
    *LAYOUTS,
    "torch_old",
    "marian.npz",
    "fairseq_learned.pt",
    "opennmt2.pt",
    "opennmt_rms.pt",
    *FOLDERS,
    "shards",
    "dictionaries",
)
BUNDLES = ("vocabulary", "pieces", "codes", "unigram", "byte_pairs")


def make_checkpoint(family: str, folder: Path, tiny_checkpoint: Path) -> None:
    """The files of a whole checkpoint, with the settings that it needs in settings.json."""
    given: dict[str, Any] = {}
    if family == "reference":
        shutil.copy(tiny_checkpoint, folder / "model")
    elif family in LAYOUTS:
        given = LAYOUT_SETTINGS[family]
        torch.save({"model": LAYOUTS[family]().state_dict(), "args": {"a": [1, "b"]}}, folder / "model")
    elif family == "torch_old":
        given = LAYOUT_SETTINGS["torch"]
        torch.save(LAYOUTS["torch"]().state_dict(), folder / "model", _use_new_zipfile_serialization=False)
    elif family == "marian.npz":
        np.savez(folder / "model.npz", **marian_arrays(pre_norm=True, separate=True))
        (folder / "model.npz").rename(folder / "model")
    elif family in {"bart", "t5"}:
        build(family).save_pretrained(folder)
        words = {token: i for i, token in enumerate(("<s>", "<pad>", "</s>", "<unk>", "a", "b"))}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 (a token)
        tokenizer.save(str(folder / "tokenizer.json"))
    elif family == "shards":
        build("bart").save_pretrained(folder, max_shard_size="20KB")
    elif family == "dictionaries":
        given = LAYOUT_SETTINGS["tutorial"]
        torch.save(LAYOUTS["tutorial"]().state_dict(), folder / "model")
        (folder / "source.txt").write_text("".join(f"{letter} 1\n" for letter in "abcdefg"))
        (folder / "target.txt").write_text("".join(f"{letter} 1\n" for letter in "abcdefghi"))
        names = {f"{side}_dictionary": str(folder / f"{side}.txt") for side in ("source", "target")}
        given = {**given, **names, "dictionary_format": "fairseq"}
    elif (FIXTURES / family).is_dir():
        shutil.copytree(FIXTURES / family, folder, dirs_exist_ok=True)
    else:
        shutil.copy(FIXTURES / family, folder / "model")
    (folder / "settings.json").write_text(json.dumps(given))


def make_bundle(kind: str, folder: Path, tiny_bundle: Path) -> None:
    """The tiny bundle, or one with nothing but a tokenizer of another kind."""
    if kind == "vocabulary":
        shutil.copytree(tiny_bundle, folder, dirs_exist_ok=True)
        return
    if kind in {"pieces", "codes"}:
        model = subwords() if kind == "pieces" else b"#version: 0.2\nh e\nhe l</w>\n"
        tokens = [*(f"t{i}" for i in range(SIZE - 26)), *"abcdefghijklmnopqrstuvwxyz"]
        files = piece_files(dict.fromkeys(("source", "target"), model), dict.fromkeys(("source", "target"), tokens))
    else:
        tokenizer = (unigram if kind == "unigram" else byte_pairs)().to_str()
        files = {"tokenizer.json": b'{"kind": "huggingface"}', "huggingface.json": tokenizer.encode()}
    bundle_of(folder, files).save()


def subwords() -> bytes:
    """A SentencePiece model of a few pieces."""
    import sentencepiece

    written = io.BytesIO()
    texts = ["hello world", "he said hello", "a world of words"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, vocab_size=30, hard_vocab_limit=False, minloglevel=2
    )
    return written.getvalue()


@contextmanager
def held_to_limits(size: int) -> Iterator[None]:
    """Fail if what is done inside takes more time or memory than it may for a file of so many bytes."""

    def too_long(_signal: int, _frame: object) -> None:
        pytest.fail(f"it takes more than {MOST_SECONDS} s")

    usual = signal.signal(signal.SIGPROF, too_long)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, usual)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert more < MOST_BYTES + size, f"it takes {more:,} bytes"
    assert time.process_time() - began < MOST_SECONDS


def checked(*arguments: str) -> None:
    """Run a command: whatever it says, it says it itself."""
    result = CliRunner().invoke(cli, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


def read_whole(folder: Path) -> None:
    """All that is done with a checkpoint before it is exported; all of it may be refused."""
    path = folder / "model" if (folder / "model").exists() else folder
    checked("inspect", str(path), "--config", str(folder / "settings.json"), "--json")
    checked("inspect", str(path), "--config", str(folder / "settings.json"))
    try:
        source = read_checkpoint(path, read_settings(folder / "settings.json"))
    except TfmExportError:
        return
    facts = {"notes": source.notes, "training": source.training, "options": source.generation.options}
    json.dumps(facts, ensure_ascii=False).encode()


def use_whole(folder: Path) -> None:
    """All that is done with a bundle's files; all of it may be refused."""
    if (folder / "onnx").exists():
        checked("inspect", str(folder))
    try:
        bundle = Bundle.open(folder)
        if (folder / "golden.jsonl").exists():
            read_golden(bundle, "golden.jsonl")
            with load(folder) as model:
                model.generate("hello")
        elif (tokenizer := load_tokenizer(bundle)) is not None:
            ids = tokenizer.encode_source("hello he a don't")
            tokenizer.decode_target(tokenizer.encode_target("hello he"))
            tokenizer.source_tokens(ids)
    except TfmExportError:
        return


def fit_hash(folder: Path, name: str) -> None:
    """Put a file's hash and size in the manifest, as whoever changed the file could do."""
    manifest = folder / "bundle.json"
    state = json.loads(manifest.read_text())
    if name in state["files"]:
        state["files"][name] |= {"sha256": file_hash(folder / name), "bytes": (folder / name).stat().st_size}
        manifest.write_text(json.dumps(state))


def try_once(seed: int, seeds: Path, work: Path, use: Callable[[Path], None]) -> None:
    """Change one of the files of a folder and use all of them."""
    random = Random(seed)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(seeds, work)
    inside = [path.relative_to(work) for path in work.rglob("*") if path.is_file()]
    fuzzed = [path for path in inside if path.parts[0] not in {"onnx", "reports", "expected.safetensors"}]
    name = str(random.choice(sorted(fuzzed)))
    mutated = mutate(random, name, (work / name).read_bytes())
    (work / name).write_bytes(mutated)
    if (seeds / "bundle.json").exists() and name != "bundle.json":
        fit_hash(work, name)
    with held_to_limits(len(mutated)):
        use(work)


def fuzz(examples: int, seeds: Path, work: Path, use: Callable[[Path], None], *, known: bool) -> None:
    """Try seeds of random numbers: always the same ones, or others each time."""

    @settings(
        max_examples=examples,
        derandomize=known,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate],  # a seed is not made simpler
    )
    @given(st.integers(0, 2**32))
    def attempt(seed: int) -> None:
        try_once(seed, seeds, work, use)

    attempt()


@pytest.fixture(scope="module")
def whole(once: Once, tiny_checkpoint: Path, tiny_bundle: Path) -> Callable[[str], Path]:
    """The folder of a whole checkpoint or bundle, by its kind."""

    def make(kind: str, folder: Path) -> None:
        if kind in BUNDLES:
            make_bundle(kind, folder, tiny_bundle)
        else:
            make_checkpoint(kind, folder, tiny_checkpoint)

    return lambda kind: once(f"whole_{kind}", partial(make, kind))


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_whole_checkpoints_are_read(whole: Callable[[str], Path], family: str) -> None:
    folder = whole(family)
    path = folder / "model" if (folder / "model").exists() else folder
    read_checkpoint(path, read_settings(folder / "settings.json"))


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_changed_checkpoints_are_read_or_refused(whole: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    fuzz(20, whole(family), tmp_path / "work", read_whole, known=True)


@pytest.mark.parametrize("kind", BUNDLES)
def test_changed_bundles_are_read_or_refused(whole: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    fuzz(40, whole(kind), tmp_path / "work", use_whole, known=True)


@pytest.mark.full
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_many_changed_checkpoints(whole: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    fuzz(350, whole(family), tmp_path / "work", read_whole, known=False)


@pytest.mark.full
@pytest.mark.parametrize("kind", BUNDLES)
def test_many_changed_bundles(whole: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    fuzz(800, whole(kind), tmp_path / "work", use_whole, known=False)
