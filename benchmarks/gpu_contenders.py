"""The ways to run the base model on a GPU that are compared, each in a process of its own.

    python -m benchmarks.gpu_contenders NAME FOLDER [DEVICE]

The process loads its model from the folder that `benchmarks.work` filled, decodes every cell a few times, and prints
one line of JSON: what it measured, or `skipped` with the reason. Sources are the same for all; whole generations are
timed, from ids to ids.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import BUNDLE, CHECKPOINT, CTRANSLATE2, SOURCES, TARGET_LENGTH, Contender, Sources

CELLS = [(1, 1), (8, 1), (32, 1), (1, 4), (8, 4)]  # sentences, beams
ROUNDS = 7
SLOTS = 40  # of the smaller plan: a greedy target of 32 tokens


class Skipped(Exception):
    """This contender cannot run here."""


class TfmExport:
    """tfm_export on one of its backends."""

    def __init__(self, folder: Path, device: str, *, variant: str, flavor: str | None) -> None:
        import tfm_export
        from tfm_export.bundle import Bundle
        from tfm_export.runtime.backends import BackendChoice

        bundle = Bundle.open(folder / BUNDLE)
        engine = flavor and f"{flavor}_{variant}"
        way = BackendChoice(variant=variant, gpu=None if device == "cpu" else int(device), engine=engine)
        try:
            way.check(bundle)
            self.model = tfm_export.Model(bundle, way.open(bundle), None)
        except (tfm_export.BackendUnavailable, tfm_export.BundleError) as problem:
            raise Skipped(" ".join(problem.problems)) from problem

    def generate(self, sources: Sources, beam: int) -> list[list[int]]:
        results = self.model.generate_ids(
            sources, beam_size=beam, max_decoding_length=TARGET_LENGTH, max_batch_size=len(sources)
        )
        return [result.hypotheses[0].tokens for result in results]


class TorchEager:
    """PyTorch eager with a growing cache."""

    def __init__(self, folder: Path, device: str, *, dtype: str) -> None:
        self.model, self.special = load_torch(folder, device, dtype)

    def generate(self, sources: Sources, beam: int) -> list[list[int]]:
        from benchmarks.peers import torch_eager

        if beam == 1:
            return torch_eager.greedy(self.model, sources, self.special, TARGET_LENGTH)
        return torch_eager.beam(self.model, sources, self.special, TARGET_LENGTH, beam)


class TorchStatic:
    """PyTorch with caches of a fixed size: compiled, or as a CUDA graph. Greedy search only."""

    def __init__(self, folder: Path, device: str, *, dtype: str, mode: str) -> None:
        self.model, self.special = load_torch(folder, device, dtype)
        self.mode: Any = mode
        self.searches: dict[tuple[int, int], Any] = {}

    def generate(self, sources: Sources, beam: int) -> list[list[int]]:
        from benchmarks.peers.torch_static import StaticGreedy

        if beam != 1:
            raise Skipped("greedy search only")
        shape = len(sources), max(map(len, sources))
        if shape not in self.searches:
            self.searches[shape] = StaticGreedy(self.model, *shape, TARGET_LENGTH, self.special, self.mode)
        tokens: list[list[int]] = self.searches[shape].generate(sources)
        return tokens


class CTranslate2:
    """CTranslate2."""

    def __init__(self, folder: Path, device: str, *, compute_type: str) -> None:
        sys.modules["torch"] = None  # type: ignore[assignment]  # a service would not have it
        try:
            import ctranslate2
        except ImportError as problem:
            raise Skipped(f"ctranslate2 cannot be imported: {problem}") from problem
        if device != "cpu" and not ctranslate2.get_cuda_device_count():
            raise Skipped("this ctranslate2 finds no GPU")
        from benchmarks.peers.ctranslate2 import Peer

        kind = "cpu" if device == "cpu" else "cuda"
        self.peer = Peer(folder / CTRANSLATE2, compute_type=compute_type, device=kind)

    def generate(self, sources: Sources, beam: int) -> list[list[int]]:
        results = self.peer.translate(sources, beam_size=beam, max_decoding_length=TARGET_LENGTH, max_batch_size=0)
        return [hypotheses[0].tokens for hypotheses in results]


def load_torch(folder: Path, device: str, dtype: str) -> tuple[Any, Any]:
    """The model and its special ids, on a device in a float type."""
    try:
        import torch
    except ImportError as problem:
        raise Skipped(f"torch cannot be imported: {problem}") from problem
    from reference_model.checkpoint import load_checkpoint

    if device != "cpu" and not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} finds no GPU")
    checkpoint = load_checkpoint(folder / CHECKPOINT)
    torch.set_default_device("cpu" if device == "cpu" else f"cuda:{device}")
    model = checkpoint.model.to(torch.get_default_device(), getattr(torch, dtype))
    return model, checkpoint.special_ids


CONTENDERS: dict[str, Callable[[Path, str], Contender]] = {
    **{
        f"tfm-export, {flavor}, {variant}": partial(TfmExport, variant=variant, flavor=flavor)
        for flavor in ("tensorrt", "rtx")
        for variant in ("fp32", "fp16")
    },
    **{
        f"tfm-export, ONNX Runtime, {variant}": partial(TfmExport, variant=variant, flavor=None)
        for variant in ("fp32", "fp16")
    },
    **{f"torch eager, {dtype}": partial(TorchEager, dtype=dtype) for dtype in ("float32", "float16")},
    "torch compiled, float16": partial(TorchStatic, dtype="float16", mode="compiled"),
    "torch CUDA graph, float16": partial(TorchStatic, dtype="float16", mode="graph"),
    **{f"CTranslate2, {kind}": partial(CTranslate2, compute_type=kind) for kind in ("float32", "float16")},
}


def measure(contender: Contender, sources: Sources, cells: list[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """Decode every cell, once for nothing and then `rounds` times.

    Returns:
        `cells`, each with batch, beam, `seconds` of every round and the `tokens` of the last; `skipped_cells`, why
        others are not there.
    """
    measured, skipped = [], {}
    for batch, beam in cells:
        seconds, tokens = [], []
        try:
            for number in range(rounds + 1):
                start = time.perf_counter()
                tokens = contender.generate(sources[:batch], beam)
                if number:
                    seconds.append(time.perf_counter() - start)
        except Skipped as reason:
            skipped[f"batch {batch}, beam {beam}"] = str(reason)
            continue
        if {len(target) for target in tokens} != {TARGET_LENGTH}:
            raise RuntimeError(f"every target should have {TARGET_LENGTH} tokens")
        measured.append({"batch": batch, "beam": beam, "seconds": seconds, "tokens": tokens})
    return {"cells": measured, "skipped_cells": skipped}


def main(name: str, folder: Path, device: str = "0") -> None:
    """The command."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answer
    sources: Sources = json.loads((folder / SOURCES).read_text())
    start = time.perf_counter()
    try:
        contender = CONTENDERS[name](folder, device)
        found = {"load_seconds": time.perf_counter() - start, **measure(contender, sources, CELLS, ROUNDS)}
    except Skipped as reason:
        found = {"skipped": str(reason)}
    print(json.dumps(found), file=answer, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4])
