"""Export the shipped checkpoint, verify it, and decode a few words beside PyTorch.

make demo
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

import tfm_export
from reference_model import Checkpoint, load_checkpoint, search
from tfm_export.cli.reports import table

HERE = Path(os.path.relpath(Path(__file__).parent))
WORDS = ("transformer", "production", "checkpoint", "encoder", "knight", "colonel", "through", "kubernetes", "graphene")

T = TypeVar("T")


def export(checkpoint: Path, inputs: Path, bundle: Path) -> None:
    """Run `tfm-export onnx`, as one would by hand."""
    arguments = ["onnx", str(checkpoint), "--inputs", str(inputs), "-o", str(bundle), "--force"]
    print("$ tfm-export", *arguments, flush=True)
    exit_code = subprocess.run([sys.executable, "-m", "tfm_export.cli", *arguments], check=False).returncode
    if exit_code:
        sys.exit(exit_code)


def timed(function: Callable[[str], T], words: tuple[str, ...]) -> list[tuple[T, float]]:
    """What a function gives for each word, and the milliseconds it took, after a first call that does not count."""
    function(words[0])
    results = []
    for word in words:
        start = time.perf_counter()
        result = function(word)
        results.append((result, (time.perf_counter() - start) * 1e3))
    return results


def decode_with_pytorch(checkpoint: Checkpoint, word: str) -> str:
    """Greedy search that runs the whole decoder at every step: slow, and right by inspection."""
    special = checkpoint.special_ids
    assert checkpoint.source_vocabulary is not None
    assert checkpoint.target_vocabulary is not None
    end = [special.eos] * special.source_ends_with_eos
    source = torch.tensor([checkpoint.source_vocabulary.encode(word) + end])
    limit = checkpoint.generation.max_length
    (hypothesis,) = search.greedy(checkpoint.model, source, torch.ones_like(source, dtype=torch.bool), special, limit)
    return checkpoint.target_vocabulary.decode(hypothesis.tokens)


def main(
    checkpoint_path: Path = HERE / "g2p.pt",
    inputs: Path = HERE / "words.txt",
    bundle: Path = Path("build") / "g2p_bundle",
) -> None:
    """Export, decode with both, print the table; exit code 1 if a word came out differently."""
    export(checkpoint_path, inputs, bundle)
    checkpoint = load_checkpoint(checkpoint_path)
    with tfm_export.load(bundle) as model:
        ours = timed(lambda word: model.generate(word, beam_size=1).text, WORDS)
    theirs = timed(lambda word: decode_with_pytorch(checkpoint, word), WORDS)

    rows = [["word", "tfm-export", "PyTorch", "ms a word", "PyTorch, ms"]]
    different = 0
    for word, (text, milliseconds), (expected, pytorch_milliseconds) in zip(WORDS, ours, theirs, strict=True):
        same = text == expected
        different += not same
        verdict = "the same" if same else expected
        rows.append([word, text, verdict, f"{milliseconds:.1f}", f"{pytorch_milliseconds:.1f}"])
    print(f"\n{table(rows, right=(3, 4))}")
    print(
        "\nGreedy, one word at a time, on this machine's CPU. PyTorch keeps no cache here: it is the reference for the"
    )
    print("tokens, not a rival in speed; benchmarks/ has those.")
    print(f'Try your own: .venv/bin/tfm-export run {bundle} "word"')
    if different:
        sys.exit(f"{different} of {len(WORDS)} words came out differently")


if __name__ == "__main__":
    main()
