"""The shared fixtures give what the other tests count on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reference_model import SpecialIds, Transformer, load_checkpoint, search
from tests import conftest
from tests.conftest import gpu_problem
from tests.skips import WITHOUT_GPU, skip

WORDS = ["a", "tea", "hello", "production", "don't", "zebra", "transformer", "ox"]


def greedy_targets(model: Transformer) -> list[tuple[int, ...]]:
    special, generator = SpecialIds(), torch.Generator().manual_seed(3)
    sources = torch.zeros(16, 18, dtype=torch.long)
    for row in range(16):
        sources[row, : row + 2] = torch.randint(4, 31, (row + 2,), generator=generator)
        sources[row, row + 2] = special.eos
    return [tuple(h.tokens) for h in search.greedy(model, sources, sources != special.pad, special, 30)]


@pytest.mark.parametrize("fields", [{}, {"norm_first": True, "final_norm": True}], ids=["post-norm", "pre-norm"])
def test_the_tiny_model_gives_varied_targets_of_varied_lengths(
    tiny_model: Callable[..., Transformer], fields: dict[str, bool]
) -> None:
    targets = greedy_targets(tiny_model(**fields))
    assert len(set(targets)) >= 12
    assert len({len(target) for target in targets}) >= 4
    assert not {0, 1, 3} & {token for target in targets for token in target}


def test_the_tiny_model_follows_its_seed_and_leaves_the_global_generator_alone(
    tiny_model: Callable[..., Transformer],
) -> None:
    before = torch.random.get_rng_state()
    first, same, other = (tiny_model(seed).projection.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_tiny_checkpoint_reads_letters_and_writes_words(tiny_checkpoint: Path) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint)
    assert checkpoint.source_vocabulary is not None
    assert checkpoint.target_vocabulary is not None
    for word in WORDS:
        assert len(checkpoint.source_vocabulary.encode(word)) == len(word)
    assert checkpoint.target_vocabulary.decode([4, 5]) == "p0 p1"
    assert checkpoint.model.config.source_vocabulary_size == len(checkpoint.source_vocabulary.tokens)
    assert checkpoint.model.config.target_vocabulary_size == len(checkpoint.target_vocabulary.tokens)


def test_gpu_tests_are_skipped_by_name_with_the_reason(tmp_path: Path) -> None:
    if gpu_problem() is None:
        skip("no NVIDIA GPU", WITHOUT_GPU)
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n\n@pytest.mark.gpu\ndef test_on_gpu():\n    raise AssertionError\n\n\n"
        "def test_elsewhere():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "-W", "ignore", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}  # conftest.py imports from tests
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert "1 passed, 1 skipped" in done.stdout
    assert re.search(r"test_on_gpu SKIPPED", done.stdout)
    assert re.search(r"needs an NVIDIA GPU \((no|the) NVIDIA driver .*\): run `make gpu-check` on", done.stdout)


WARNS = """
import os, warnings
import pytest
from tfm_export.runtime.threads import usable_cpus


def test_a_warning():
    warnings.warn("about something")


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="without workers")
def test_threads():
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, usable_cpus() // 2)
"""


@pytest.mark.parametrize(("workers", "outcome"), [([], "1 failed, 1 skipped"), (["-n", "2"], "1 failed, 1 passed")])
def test_warnings_are_errors_and_workers_share_the_cpus(tmp_path: Path, workers: list[str], outcome: str) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(WARNS, encoding="utf-8")
    root = Path(__file__).parents[1]
    ours = ("PYTEST_XDIST", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml")]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", *workers, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(root)},
    )
    assert outcome in done.stdout, done.stdout + done.stderr
    assert "UserWarning: about something" in done.stdout


@pytest.mark.parametrize(("cpus", "workers"), [(1, 1), (2, 2), (64, 8)])
def test_there_is_a_worker_for_each_usable_cpu_up_to_eight(
    monkeypatch: pytest.MonkeyPatch, cpus: int, workers: int
) -> None:
    monkeypatch.setattr(conftest, "usable_cpus", lambda: cpus)
    assert conftest.pytest_xdist_auto_num_workers() == workers
