"""From a fresh process to the first token, part by part.

    python -m benchmarks.startup NAME FOLDER THREADS STARTED

STARTED is the time of the clock that `time.perf_counter` reads, which on Linux is one for all processes.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

from benchmarks.contenders import CONTENDERS, SOURCES, CTranslate2

LIBRARIES = {"tfm-export": ("tfm_export", "onnxruntime", "tfm_export.model"), "CTranslate2": ("ctranslate2", "numpy")}


def measure(name: str, folder: Path, threads: int, started: float) -> dict[str, float]:
    """Seconds of each part.

    Returns:
        `interpreter` to start Python, `libraries` to import them, `load` the model, `first_token` from the source to
        the target's first token, and `total`.
    """
    begun = time.perf_counter()
    if CONTENDERS[name][0] is CTranslate2 or "CTranslate2" in name:
        sys.modules["torch"] = None  # type: ignore[assignment]
    for library in next(found for prefix, found in LIBRARIES.items() if name.startswith(prefix)):
        importlib.import_module(library)
    imported = time.perf_counter()
    source = json.loads((folder / SOURCES).read_text())[:1]
    contender = CONTENDERS[name][0](folder, threads)
    loaded = time.perf_counter()
    contender.generate(source, 1, 1)  # type: ignore[call-arg]
    end = time.perf_counter()
    return {
        "interpreter": begun - started,
        "libraries": imported - begun,
        "load": loaded - imported,
        "first_token": end - loaded,
        "total": end - started,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
