"""The ways to run the base model that are compared, each in a process of its own.

    python -m benchmarks.contenders NAME FOLDER THREADS

The process loads its model from the folder that `benchmarks.work` filled, then serves: a line of JSON comes in
(`{"batch": 8, "beam": 1}`), a line of JSON goes out. Sources are the same for all, whole generations are timed from
ids to ids.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

SOURCE_LENGTH = 32
TARGET_LENGTH = 32
BUNDLE, CHECKPOINT, CTRANSLATE2, SOURCES = "tfm_bundle", "base.pt", "ctranslate2_float32", "sources.json"

VARIANTS = ("w8", "w4", "int8")  # of the bundle, beside fp32

Sources = list[list[int]]


class Contender(Protocol):
    """A loaded model."""

    def generate(self, sources: Sources, beam: int) -> list[list[int]]:
        """Decode exactly TARGET_LENGTH tokens of every source; the best hypothesis of each."""
        ...


class TfmExport:
    """tfm_export on ONNX Runtime, in one of the bundle's precisions."""

    def __init__(self, folder: Path, threads: int, variant: str = "fp32") -> None:
        import tfm_export

        self.model = tfm_export.load(folder / BUNDLE, threads=threads, variant=variant)

    def generate(self, sources: Sources, beam: int) -> list[list[int]]:
        results = self.model.generate_ids(
            sources, beam_size=beam, max_decoding_length=TARGET_LENGTH, max_batch_size=len(sources)
        )
        return [result.hypotheses[0].tokens for result in results]

    def python_share(self, sources: Sources) -> dict[str, float]:
        """How much of a greedy generation is spent outside ONNX Runtime; the encoder's share is left out."""
        import onnxruntime

        run, inside, calls = onnxruntime.InferenceSession.run_with_iobinding, 0.0, 0

        def timed(*args: Any, **options: Any) -> None:
            nonlocal inside, calls
            start = time.perf_counter()
            run(*args, **options)
            seconds = time.perf_counter() - start
            calls += 1
            if calls == 1:  # the encoder
                encoder.append(seconds)
            else:
                inside += seconds

        encoder: list[float] = []
        onnxruntime.InferenceSession.run_with_iobinding = timed
        try:
            start = time.perf_counter()
            self.generate(sources, 1)
            whole = time.perf_counter() - start
        finally:
            onnxruntime.InferenceSession.run_with_iobinding = run
        steps = whole - encoder[0]
        return {"encoder": encoder[0], "steps": steps, "session_run": inside, "python_share": 1 - inside / steps}


class TorchEager:
    """PyTorch eager with a growing cache."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch

        from benchmarks.peers import torch_eager
        from reference_model.checkpoint import load_checkpoint

        torch.set_num_threads(threads)
        checkpoint = load_checkpoint(folder / CHECKPOINT)
        self.model, self.special, self.peer = checkpoint.model, checkpoint.special_ids, torch_eager

    def generate(self, sources: Sources, beam: int) -> list[list[int]]:
        if beam == 1:
            return self.peer.greedy(self.model, sources, self.special, TARGET_LENGTH)
        return self.peer.beam(self.model, sources, self.special, TARGET_LENGTH, beam)


class CTranslate2:
    """CTranslate2 with the matrix library that the environment names."""

    def __init__(self, folder: Path, threads: int, compute_type: str = "default") -> None:
        # CTranslate2 imports PyTorch if it is there, for its converters: a service would not have it.
        sys.modules["torch"] = None  # type: ignore[assignment]
        from benchmarks.peers.ctranslate2 import Peer

        self.peer = Peer(folder / CTRANSLATE2, threads=threads, compute_type=compute_type)

    def generate(self, sources: Sources, beam: int) -> list[list[int]]:
        results = self.peer.translate(sources, beam_size=beam, max_decoding_length=TARGET_LENGTH, max_batch_size=0)
        return [hypotheses[0].tokens for hypotheses in results]


# CTranslate2 takes MKL on Intel's processors and oneDNN on others, unless it is told; both are measured.
CONTENDERS: dict[str, tuple[Callable[[Path, int], Contender], dict[str, str]]] = {
    "tfm-export": (TfmExport, {}),
    **{f"tfm-export {variant}": (partial(TfmExport, variant=variant), {}) for variant in VARIANTS},
    "torch eager": (TorchEager, {}),
    "CTranslate2 MKL": (CTranslate2, {"CT2_USE_MKL": "1"}),
    "CTranslate2 oneDNN": (CTranslate2, {"CT2_USE_MKL": "0"}),
    "CTranslate2 MKL int8": (partial(CTranslate2, compute_type="int8"), {"CT2_USE_MKL": "1"}),
    "CTranslate2 oneDNN int8": (partial(CTranslate2, compute_type="int8"), {"CT2_USE_MKL": "0"}),
}


def peak_megabytes() -> float:
    """The largest resident set of this process so far, in MB of 2^20 bytes.

    Not getrusage's: that one begins with the parent's, which may have exported a model.
    """
    with open("/proc/self/status", encoding="utf-8") as file:
        (peak,) = (int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return peak / 1024


def serve(name: str, folder: Path, threads: int) -> None:
    """Load, say so, and answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    sources: Sources = json.loads((folder / SOURCES).read_text())
    start = time.perf_counter()
    contender = CONTENDERS[name][0](folder, threads)
    answer(load_seconds=time.perf_counter() - start, peak_megabytes=peak_megabytes())
    for line in sys.stdin:
        request = json.loads(line)
        batch = sources[: request["batch"]]
        if request.get("python_share"):
            answer(**contender.python_share(batch))  # type: ignore[attr-defined]
            continue
        start = time.perf_counter()
        tokens = contender.generate(batch, request["beam"])
        seconds = time.perf_counter() - start
        answer(seconds=seconds, tokens=tokens, peak_megabytes=peak_megabytes())


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
