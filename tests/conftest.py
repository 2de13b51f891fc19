"""What all tests share: small models and checkpoints, a fresh seed for each test, the skipping of GPU tests."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.arithmetic import compares_numbers
from tests.once import Once, make_once, shared_folder
from tests.skips import ON_A_GPU, pytest_terminal_summary, reason
from tfm_export.runtime.threads import usable_cpus

__all__ = ["pytest_terminal_summary"]

# torch is imported in the fixtures that need it: tests that do not run in a second or two.
if TYPE_CHECKING:
    from reference_model import Checkpoint, Transformer

# Threads that wait for work sleep instead of spinning: on a busy machine small models run several times faster.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Several workers share the CPUs. Each, and each process that its tests start, computes with its part of them.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // int(workers))))
MOST_WORKERS = 8  # each has PyTorch in memory, and imports it first

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
SOURCE_TOKENS = (*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz'")
TARGET_TOKENS = (*SPECIAL_TOKENS, *(f"p{i}" for i in range(30)))


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so; they, and the processes that tests start, would never hear of Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def gpu_problem() -> str | None:
    """Why there is no NVIDIA GPU to test on; None if there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1) found"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver found no GPU"
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The workers of `pytest -n auto`: one for each CPU that this process may use."""
    return min(usable_cpus(), MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu, each by name and with the reason, on a machine without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (problem := gpu_problem()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason("an NVIDIA GPU", *ON_A_GPU, found=problem)))


@pytest.fixture(scope="session")
def once(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes a folder once for all workers, by name; see `make_once`."""
    return partial(make_once, shared_folder(pytestconfig, tmp_path_factory))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the numeric part: see `tests.arithmetic`."""
    if compares_numbers(item.path):
        item.add_marker("numeric")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (libraries under test use the global generator)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def build_tiny_model(seed: int = 0, **fields: Any) -> Transformer:
    """A Transformer of random weights whose greedy targets differ between sources and end at different lengths.

    Freshly initialised weights repeat one token for ever. Here attention is sharper, no bias is zero, and the
    projection favours the token three ids after the last one; only with `tie_projection` is that not to be had.

    Args:
        seed: of the weights.
        **fields: fields of `TransformerConfig` to set differently from the preset "tiny".
    """
    import torch

    from reference_model import SpecialIds, Transformer, TransformerConfig

    sizes = {"source_vocabulary_size": len(SOURCE_TOKENS), "target_vocabulary_size": len(TARGET_TOKENS)}
    if fields.get("share_embeddings"):
        sizes = dict.fromkeys(sizes, len(TARGET_TOKENS))
    config = TransformerConfig.preset("tiny", **{**sizes, "max_length": 64, **fields})
    special = SpecialIds()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Transformer(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith(("W_q.weight", "W_k.weight")):
                parameter.mul_(3)
                if name.endswith("W_q.weight") and not config.scale_attention:
                    parameter.div_(config.head_size**0.5)  # as training would do it
        if not config.tie_projection:
            model.projection.weight.add_(3 * model.target_embedding.weight.roll(3, 0))
        model.projection.bias[special.eos] += 3
        model.projection.bias[[special.pad, special.bos, 3]] -= 20  # a trained model gives no pad, start or <unk>
    return model


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """For models so small a second one only waits for the first, and results are the same each time."""
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Transformer]:
    """The function `build_tiny_model`: `tiny_model(seed=1, norm_first=True)`."""
    return build_tiny_model


@pytest.fixture(scope="session")
def tiny_checkpoint(once: Once) -> Path:
    """The file of a tiny pre-norm model that reads letters and writes words. Do not change it: all tests share it."""
    from reference_model import save_checkpoint

    def make(folder: Path) -> None:
        save_checkpoint(build_tiny_checkpoint(), folder / "tiny.pt")

    return once("tiny_checkpoint", make) / "tiny.pt"


def build_tiny_checkpoint(seed: int = 0, **fields: Any) -> Checkpoint:
    """A tiny model with its vocabularies: characters of lower-case text in, words out.

    Args:
        seed: of the weights.
        **fields: fields of `TransformerConfig`; the vocabulary sizes stay as they are.
    """
    from reference_model import Checkpoint, GenerationDefaults, SpecialIds, Vocabulary

    return Checkpoint(
        model=build_tiny_model(seed, **{"norm_first": True, "final_norm": True, **fields}),
        source_vocabulary=Vocabulary(SOURCE_TOKENS, "characters", lowercase=True),
        target_vocabulary=Vocabulary(TARGET_TOKENS, "words"),
        special_ids=SpecialIds(),
        generation=GenerationDefaults(max_length=30),
        training={"command": "none: random weights"},
    )


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path, once: Once) -> Path:
    """The bundle of tiny_checkpoint, verified. Do not change it: copy it, all tests share it."""

    def make(folder: Path) -> None:
        from tfm_export.export import export_bundle

        words = ["hello", "parity", "a", "don't", "transformer"]
        export_bundle(tiny_checkpoint, folder / "tfm_bundle", inputs=words)

    return once("tiny_bundle", make) / "tfm_bundle"


@pytest.fixture(scope="session")
def tiny_variants(tiny_bundle: Path, once: Once) -> Path:
    """The tiny bundle with a variant of every precision. Do not change it: copy it."""

    def make(folder: Path) -> None:
        from tests.trt.variants import add_variant
        from tfm_export.bundle import Bundle
        from tfm_export.precision import PRECISIONS

        bundle = Bundle.open(shutil.copytree(tiny_bundle, folder / "tfm_bundle"))
        for name in PRECISIONS:
            if name != "fp32":
                add_variant(bundle, name)

    return once("tiny_variants", make) / "tfm_bundle"


@pytest.fixture(scope="session")
def g2p_bundle(once: Once) -> Path:
    """The trained example's bundle, unverified and without golden inputs. Do not change it: all tests share it."""
    return once("g2p_bundle", lambda folder: _write_g2p_bundle(folder / "tfm_bundle")) / "tfm_bundle"


def _write_g2p_bundle(path: Path) -> None:
    from tfm_export.bundle import TOKENIZER, Bundle, Limits, Manifest
    from tfm_export.checkpoints import read_checkpoint
    from tfm_export.export.variant import write_fp32_variant

    source = read_checkpoint(Path(__file__).parents[1] / "examples" / "g2p" / "g2p.pt")
    length = source.model.config.max_length
    manifest = Manifest(
        dimensions=write_fp32_variant(source.model, path / "onnx" / "fp32"),
        limits=Limits(max_source_length=length, max_target_length=length),
        special_ids=source.special_ids,
        generation=source.generation,
        variants={"fp32": {}},
    )
    (path / TOKENIZER).mkdir()
    for name, content in source.tokenizer.items():
        (path / TOKENIZER / name).write_bytes(content)
    bundle = Bundle(path, manifest)
    bundle.add_files({str(file.relative_to(path)): "a test's" for file in path.rglob("*") if file.is_file()})
    bundle.save()
