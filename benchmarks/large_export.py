"""Export a random model of more than 2 GB of weights, verify it, and say how much memory that took.

python -m benchmarks.large_export FOLDER     # 2.4 GB twice on disk; some minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from reference_model import Checkpoint, SpecialIds, Transformer, TransformerConfig, save_checkpoint
from reference_model.checkpoint import GenerationDefaults

# Wide where a token costs little: a large source vocabulary, and a deep encoder, which runs once a sentence.
SIZES = {
    "source_vocabulary_size": 200_001,
    "target_vocabulary_size": 32_000,
    "d_model": 1024,
    "heads": 16,
    "d_ff": 4096,
    "encoder_layers": 24,
    "decoder_layers": 2,
    "max_length": 128,
}


def make_checkpoint(path: Path) -> int:
    """Write a checkpoint of random weights; how many bytes they have."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**SIZES)).eval()
    checkpoint = Checkpoint(
        model=model,
        source_vocabulary=None,
        target_vocabulary=None,
        special_ids=SpecialIds(),
        generation=GenerationDefaults(max_length=64),
    )
    save_checkpoint(checkpoint, path)
    return sum(weight.numel() * weight.element_size() for weight in model.state_dict().values())


def main() -> None:
    """Make, export, verify, load; print figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    script = "import sys; from pathlib import Path; from benchmarks.large_export import make_checkpoint as make;"
    made = subprocess.run(
        [sys.executable, "-c", f"{script} print(make(Path(sys.argv[1])))", folder / "large.pt"],
        check=True,
        capture_output=True,
        text=True,
    )
    weights, start = int(made.stdout), time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    command = [sys.executable, "-m", "tfm_export.cli", "onnx", folder / "large.pt", "-o", folder / "bundle", "--force"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peaks = watch(process)
    if process.returncode:
        sys.exit(process.returncode)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    figures = {
        "weights_gb": weights / 1e9,
        "seconds": time.perf_counter() - start,
        "peak_rss_times_weights": peaks["VmRSS"] / weights,
        "peak_anonymous_times_weights": peaks["RssAnon"] / weights,
        "largest_child_gb": max(before, largest) * 1024 / 1e9,
    }
    print(json.dumps(figures, indent=2))


def watch(process: subprocess.Popen[bytes]) -> dict[str, int]:
    """The largest resident set of a process and the largest share of it that no file backs, in bytes."""
    peaks = {"VmRSS": 0, "RssAnon": 0}
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            break
        for line in lines:
            name, _, value = line.partition(":")
            if name in peaks:
                peaks[name] = max(peaks[name], 1024 * int(value.split()[0]))
        time.sleep(0.05)
    process.wait()
    return peaks


if __name__ == "__main__":
    main()
