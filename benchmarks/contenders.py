"""The ways to run the base model that are compared, each in a process of its own.

    python -m benchmarks.contenders NAME FOLDER THREADS [REPLICAS]

The process loads its model from the folder that `benchmarks.work` filled, then serves: a line of JSON comes in
(`{"batch": 8, "beam": 1}`), a line of JSON goes out. Sources are the same for all, whole generations are timed from
ids to ids. Requests with "do" ask for something else: see `Service`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

SOURCE_LENGTH = 32
TARGET_LENGTH = 32
BUNDLE, CHECKPOINT, SOURCES = "tfm_bundle", "base.pt", "sources.json"
CTRANSLATE2, CTRANSLATE2_INT8 = "ctranslate2_float32", "ctranslate2_int8"

VARIANTS = ("w8", "w4", "int8")  # of the bundle, beside fp32
# Those of them that are made with --int8-encoder, and what the tables of quality call them then.
INT8_ENCODER = {name: f"{name}, encoder in int8" for name in ("w8", "w4")}

Sources = list[list[int]]


class Contender(Protocol):
    """A loaded model."""

    def generate(self, sources: Sources, beam: int) -> list[list[int]]:
        """Decode exactly TARGET_LENGTH tokens of every source; the best hypothesis of each."""
        ...


class TfmExport:
    """tfm_export on ONNX Runtime, in one of the bundle's precisions."""

    def __init__(
        self, folder: Path, threads: int, replicas: int = 1, variant: str = "fp32", draft: str | None = None
    ) -> None:
        import tfm_export

        self.workers = replicas
        self.model = tfm_export.load(folder / BUNDLE, threads=max(1, threads // replicas), variant=variant, draft=draft)

    def generate(self, sources: Sources, beam: int, length: int = TARGET_LENGTH) -> list[list[int]]:
        results = self.model.generate_ids(
            sources, beam_size=beam, max_decoding_length=length, max_batch_size=len(sources)
        )
        return [result.hypotheses[0].tokens for result in results]

    def step_ends(self, sources: Sources, length: int) -> list[float]:
        """The time at the end of every step of a greedy generation, in seconds."""
        from tfm_export.bench.worker import TimedModel
        from tfm_export.decoding import DecodeOptions, generate

        timed = TimedModel(self.model.step_model)
        options = DecodeOptions(max_decoding_length=length, max_batch_size=len(sources))
        generate(timed, sources, options, self.model.bundle.manifest.special_ids)
        return timed.ends

    def decode_file(self, sources: Sources, prefixes: Sources | None, **options: Any) -> list[list[int]]:
        """What `tfm-export run` does with a file."""
        from tfm_export.cli.run import BATCHES_AT_ONCE
        from tfm_export.decoding import Request

        window = BATCHES_AT_ONCE * self.model.decode_options().max_batch_size * self.workers
        requests: list[Any] = sources
        if prefixes is not None:
            requests = [Request(source=s, target_prefix=p) for s, p in zip(sources, prefixes, strict=True)]
        results = self.model.generate_ids_iterable(requests, window=window, workers=self.workers, **options)
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

    def __init__(
        self, folder: Path, threads: int, replicas: int = 1, stored: str = CTRANSLATE2, most_threads: int | None = None
    ) -> None:
        threads = min(threads, most_threads or threads)
        # CTranslate2 imports PyTorch if it is there, for its converters: a service would not have it.
        sys.modules["torch"] = None  # type: ignore[assignment]
        from benchmarks.peers.ctranslate2 import Peer

        compute_type = "int8" if stored == CTRANSLATE2_INT8 else "default"
        self.peer = Peer(
            folder / stored, threads=max(1, threads // replicas), replicas=replicas, compute_type=compute_type
        )

    def generate(self, sources: Sources, beam: int, length: int = TARGET_LENGTH) -> list[list[int]]:
        results = self.peer.translate(sources, beam_size=beam, max_decoding_length=length, max_batch_size=0)
        return [hypotheses[0].tokens for hypotheses in results]

    def step_ends(self, sources: Sources, length: int) -> list[float]:
        """The time at the end of every step of a greedy generation, in seconds."""
        return self.peer.step_ends(sources, length)

    def decode_file(self, sources: Sources, prefixes: Sources | None, **options: Any) -> list[list[int]]:
        """What its documentation recommends for a file."""
        return [*self.peer.translate_iterable(sources, prefixes, **options)]


# CTranslate2 takes MKL on Intel's processors and oneDNN on others, unless it is told; both are measured.
CONTENDERS: dict[str, tuple[Callable[..., Contender], dict[str, str]]] = {
    "tfm-export": (TfmExport, {}),
    "tfm-export fp32+w8": (partial(TfmExport, draft="w8"), {}),
    **{f"tfm-export {variant}": (partial(TfmExport, variant=variant), {}) for variant in VARIANTS},
    "torch eager": (TorchEager, {}),
    "CTranslate2 MKL": (CTranslate2, {"CT2_USE_MKL": "1"}),
    "CTranslate2 oneDNN": (CTranslate2, {"CT2_USE_MKL": "0"}),
    "CTranslate2 MKL int8": (partial(CTranslate2, stored=CTRANSLATE2_INT8), {"CT2_USE_MKL": "1"}),
    "CTranslate2 oneDNN int8": (partial(CTranslate2, stored=CTRANSLATE2_INT8), {"CT2_USE_MKL": "0"}),
    # Its threads sleep between products, and waking them can cost more than they save.
    "CTranslate2 MKL int8, 1 thread": (
        partial(CTranslate2, stored=CTRANSLATE2_INT8, most_threads=1),
        {"CT2_USE_MKL": "1"},
    ),
    "CTranslate2 oneDNN int8, 1 thread": (
        partial(CTranslate2, stored=CTRANSLATE2_INT8, most_threads=1),
        {"CT2_USE_MKL": "0"},
    ),
}

CTRANSLATE2_BY_TYPE = {
    "float32": ("CTranslate2 MKL", "CTranslate2 oneDNN"),
    "int8": ("CTranslate2 MKL int8", "CTranslate2 oneDNN int8"),
}


def resident_megabytes(kind: Literal["VmHWM", "VmRSS"] = "VmHWM") -> float:
    """The resident set of this process, in MB of 2^20 bytes: the largest so far, or with VmRSS the present one.

    Not getrusage's: that one begins with the parent's, which may have exported a model.
    """
    with open("/proc/self/status", encoding="utf-8") as file:
        (size,) = (int(line.split()[1]) for line in file if line.startswith(kind))
    return size / 1024


class Service:
    """Answers requests; each public method is one.

    Args:
        contender: a loaded model.
        sources: of the work; a request decodes the first ones.
    """

    def __init__(self, contender: Any, sources: Sources) -> None:
        self._contender, self._sources = contender, sources

    def generate(self, batch: int, beam: int) -> dict[str, Any]:
        """Time a whole generation."""
        some = self._some(batch)
        start = time.perf_counter()
        tokens = self._contender.generate(some, beam)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": tokens, "peak_megabytes": resident_megabytes()}

    def python_share(self, batch: int) -> dict[str, Any]:
        """See `TfmExport.python_share`."""
        share: dict[str, Any] = self._contender.python_share(self._some(batch))
        return share

    def steps(self, batch: int, length: int) -> dict[str, Any]:
        """Time each step of a greedy generation; the first, which comes after the encoder, is not among them."""
        ends = self._contender.step_ends(self._some(batch), length)
        return {"seconds": [after - before for before, after in pairwise(ends)]}

    def file(self, path: str, options: dict[str, Any], limit: int | None = None) -> dict[str, Any]:
        """Time the decoding of a file's worth of sources, of which there are `limit` at most."""
        work = json.loads(Path(path).read_text())
        sources, prefixes = (work.get(name) and work[name][:limit] for name in ("sources", "prefixes"))
        self._contender.decode_file(sources[:8], prefixes and prefixes[:8], **options)  # warms up
        start = time.perf_counter()
        tokens = self._contender.decode_file(sources, prefixes, **options)
        return {"seconds": time.perf_counter() - start, "tokens": tokens, "peak_megabytes": resident_megabytes()}

    def growth(self, decodes: int, every: int, largest_batch: int, longest: int) -> dict[str, Any]:
        """The resident set after every so many decodes of random batches, source and target lengths."""
        draw, sizes = random.Random(0), []
        for number in range(1, decodes + 1):
            batch, length = draw.randint(1, largest_batch), draw.randint(1, longest)
            self._contender.generate(
                [source[: draw.randint(1, SOURCE_LENGTH)] for source in self._some(batch)], 1, length
            )
            if number % every == 0:
                sizes.append(resident_megabytes("VmRSS"))
        return {"megabytes": sizes}

    def _some(self, batch: int) -> Sources:
        return [self._sources[i % len(self._sources)] for i in range(batch)]


def serve(name: str, folder: Path, threads: int, replicas: int) -> None:
    """Load, say so, and answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    sources: Sources = json.loads((folder / SOURCES).read_text())
    start = time.perf_counter()
    contender = CONTENDERS[name][0](folder, threads, **({"replicas": replicas} if replicas > 1 else {}))
    answer(load_seconds=time.perf_counter() - start, peak_megabytes=resident_megabytes())
    service = Service(contender, sources)
    for line in sys.stdin:
        request = json.loads(line)
        answer(**getattr(service, request.pop("do", "generate"))(**request))


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 1)
