"""The quality of every precision on a trained model: the example's word error rate on its whole test split, beam 4.

    python -m benchmarks.quality            # make the variants, decode, write benchmarks/results/quality.json, a table
    python -m benchmarks.quality --table    # the table of the results that are there

Variants are calibrated on words of the train split and judged on the test split. Those of 16 bits are decoded by their
float32 twins, which round as 16-bit kernels do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.contenders import INT8_ENCODER
from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.export import export_bundle
from tfm_export.precision import PRECISIONS
from tfm_export.quantize import METRICS, QuantizeOptions, quantize_bundle, read_development
from tfm_export.tokenizer import load_tokenizer
from tfm_export.verify import cpu_model

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "quality.json"
EXAMPLE, DATA = ROOT / "examples" / "g2p", ROOT / "data" / "g2p"
CALIBRATED_ON = 500
BATCH = 32
ALONE = 300  # sentences that are decoded one by one too, to see whether company changes them


def measure(precisions: list[str], limit: int | None) -> dict[str, Any]:
    """Score every precision.

    Args:
        precisions: names.
        limit: how many words of the test split; None for all.
    """
    if not (DATA / "test.tsv").is_file():
        subprocess.run([sys.executable, str(EXAMPLE / "prepare_data.py"), str(DATA)], check=True)
    test = read_development(DATA / "test.tsv", limit=limit)
    calibration = read_development(DATA / "train.tsv").sources[:: max(1, 100_000 // CALIBRATED_ON)][:CALIBRATED_ON]
    words = (EXAMPLE / "words.txt").read_text(encoding="utf-8").split()
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        bundle, _ = export_bundle(EXAMPLE / "g2p.pt", Path(folder) / "b", inputs=words, verify=False)
        tokenizer = load_tokenizer(bundle)
        assert tokenizer is not None
        sources = [tokenizer.encode_source(word) for word in test.sources]
        special = bundle.manifest.special_ids
        options = DecodeOptions(
            beam_size=4, max_decoding_length=bundle.manifest.generation.max_length, max_batch_size=BATCH
        )
        truth: list[list[int]] = []
        for name, int8_encoder in [("fp32", False), *_forms(precisions)]:
            title = INT8_ENCODER[name] if int8_encoder else name
            if name != "fp32":
                print(f"... making {title}", file=sys.stderr, flush=True)
                # No gates: what is measured here is what they would have to judge.
                made = QuantizeOptions(
                    calibration=calibration, keep=True, min_agreement=0, target="tensorrt", int8_encoder=int8_encoder
                )
                quantize_bundle(bundle, name, made, force=True)
            start = time.perf_counter()
            print(f"... decoding {len(sources):,} words with {title}", file=sys.stderr, flush=True)
            with cpu_model(bundle, name) as model:
                found = [r.hypotheses[0].tokens for r in generate(model, sources, options, special)]
                alone = generate(model, sources[:ALONE], replace(options, max_batch_size=1), special)
            truth = truth or found
            texts = [tokenizer.decode_target(tokens) for tokens in found]
            entries.append(
                {
                    "precision": title,
                    "word_error_rate": 100 - METRICS["exact"].score(texts, test.references),
                    "phone_error_rate": METRICS["per"].score(texts, test.references),
                    "as_fp32": 100 * sum(a == b for a, b in zip(found, truth, strict=True)) / len(truth),
                    "alone_as_batched": 100
                    * sum(a.hypotheses[0].tokens == b for a, b in zip(alone, found, strict=False))
                    / len(alone),
                    "bytes": _bytes(bundle, name),
                    "seconds": time.perf_counter() - start,
                }
            )
    return {
        "machine": machine.describe(),
        "work": {"model": "examples/g2p", "words": len(sources), "beam": 4, "calibrated_on": len(calibration)},
        "precisions": entries,
    }


def _forms(precisions: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Each precision, and whether the encoder is that of int8."""
    for name in precisions:
        yield name, False
        if name in INT8_ENCODER:
            yield name, True


def _bytes(bundle: Bundle, name: str) -> int:
    return sum(file.stat().st_size for file in bundle.variant_path(name).iterdir())


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    fp32 = results["precisions"][0]
    rows = [
        "| precision | WER % | against fp32 | PER % | words as fp32's | alone as batched | MB |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {entry['precision']} | {entry['word_error_rate']:.2f} "
        f"| {entry['word_error_rate'] - fp32['word_error_rate']:+.2f} | {entry['phone_error_rate']:.2f} "
        f"| {entry['as_fp32']:.2f} % | {entry['alone_as_batched']:.2f} % | {entry['bytes'] / 1e6:.1f} |"
        for entry in results["precisions"]
    ]
    work = results["work"]
    return "\n".join(rows) + f"\n\n{work['words']:,} words of the test split, beam {work['beam']}."


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the results file and stop")
    parser.add_argument("--limit", type=int, help="words of the test split  [all]")
    parser.add_argument("--precisions", nargs="+", default=[name for name in PRECISIONS if name != "fp32"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.table:
        results = measure(arguments.precisions, arguments.limit)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(json.loads(arguments.output.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
