"""Whole files: 10,000 real words, and 2,000 sequences of mixed length; tfm-export against CTranslate2, beam 4.

    python -m benchmarks.files            # measure, write benchmarks/results/files.json, print tables
    python -m benchmarks.files --quick    # a tenth of each file
    python -m benchmarks.files --table    # the tables of the results that are there

See benchmarks/README.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.command import new_parser, write_results
from benchmarks.contenders import BUNDLE, CTRANSLATE2_BY_TYPE, INT8_ENCODER, SOURCES
from benchmarks.generation import say
from benchmarks.report import table
from benchmarks.work import CHAIN, FIRST, SEED, VOCABULARY, build_peers, end_by_chains, prepare
from benchmarks.worker import Worker

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "files.json"
EXAMPLE, DATA = ROOT / "examples" / "g2p", ROOT / "data" / "g2p"
MIXED_FOLDER, WORDS_FOLDER = Path("build/benchmarks_files"), Path("build/benchmarks_g2p")
FILE = "file.json"
WORDS, SEQUENCES = 10_000, 2_000
BEAM = 4
OURS = {"float32": ("tfm-export",), "8 bits": ("tfm-export w8", "tfm-export int8")}
PEERS = {"float32": CTRANSLATE2_BY_TYPE["float32"], "8 bits": CTRANSLATE2_BY_TYPE["int8"]}
# What CTranslate2's documentation says to tune for throughput.
BATCHES = ((32, "examples"), (16, "examples"), (64, "examples"), (512, "tokens"), (1024, "tokens"), (2048, "tokens"))
TUNED_ON = 10  # one in so many sources


@dataclass(frozen=True, kw_only=True)
class Work:
    """A file to decode.

    Attributes:
        name: for people.
        folder: with the models, the sources and their prefixes.
        longest: targets have at most so many tokens.
        references: right targets of each source, as text; None where weights are random.
    """

    name: str
    folder: Path
    longest: int
    references: list[list[str]] | None = None


def prepare_mixed(folder: Path, *, again: bool) -> Work:
    """2,000 random sources of 4 to 64 tokens, short ones more often, each with a target of about its length.

    What a target begins with says how long it gets, as the language does in multilingual models; see
    `benchmarks.work.end_by_chains`.
    """
    if again or not (folder / FILE).is_file():
        prepare(folder, say, ending=end_by_chains, variants=("w8", "int8"))
    draw = np.random.default_rng(SEED)
    lengths = np.clip(np.rint(draw.lognormal(np.log(20), 0.55, SEQUENCES)), 4, 64).astype(int)
    sources = [draw.integers(FIRST, VOCABULARY, length).tolist() for length in lengths]
    targets = np.clip(np.rint(lengths * draw.uniform(0.7, 1.2, SEQUENCES)), 3, CHAIN).astype(int)
    chains = draw.integers(0, (VOCABULARY - FIRST) // CHAIN, SEQUENCES)
    prefixes = [[int(FIRST + CHAIN * chain + CHAIN - target)] for chain, target in zip(chains, targets, strict=True)]
    (folder / FILE).write_text(json.dumps({"sources": sources, "prefixes": prefixes}))
    return Work(name="sequences, base model", folder=folder, longest=2 * CHAIN)


def prepare_words(folder: Path, *, again: bool) -> Work:
    """10,000 real words of the example's test and dev splits."""
    from reference_model.checkpoint import load_checkpoint
    from tfm_export.bundle import Bundle
    from tfm_export.export import export_bundle
    from tfm_export.quantize import QuantizeOptions, quantize_bundle, read_development
    from tfm_export.tokenizer import load_tokenizer

    if not (DATA / "test.tsv").is_file():
        subprocess.run([sys.executable, str(EXAMPLE / "prepare_data.py"), str(DATA)], check=True)
    words: dict[str, list[str]] = {}
    for split in ("test", "dev"):
        found = read_development(DATA / f"{split}.tsv")
        words |= dict(zip(found.sources, found.references, strict=True))
    words = dict(list(words.items())[:WORDS])
    if again or not (folder / FILE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        say("exporting the example")
        bundle, _ = export_bundle(EXAMPLE / "g2p.pt", folder / BUNDLE, inputs=[*words][:100], verify=False, force=True)
        calibration = read_development(DATA / "train.tsv").sources[::200][:500]
        for name in ("w8", "int8"):
            say(f"making {name}")
            made = QuantizeOptions(
                calibration=calibration, keep=True, min_agreement=0, int8_encoder=name in INT8_ENCODER
            )
            quantize_bundle(bundle, name, made)
        build_peers(load_checkpoint(EXAMPLE / "g2p.pt"), folder, say)
    bundle = Bundle.open(folder / BUNDLE)
    tokenizer = load_tokenizer(bundle)
    assert tokenizer is not None
    sources = [tokenizer.encode_source(word) for word in words]
    (folder / SOURCES).write_text(json.dumps(sources[:32]))
    (folder / FILE).write_text(json.dumps({"sources": sources}))
    longest = bundle.manifest.generation.max_length
    return Work(name="words, g2p", folder=folder, longest=longest, references=[*words.values()])


def measure(works: Sequence[Work], rounds: Sequence[int], threads: int, share: int) -> dict[str, Any]:
    """Decode every file with every contender.

    Args:
        works: the files.
        rounds: how often each contender decodes each file, in turns; medians count.
        threads: of each contender.
        share: decode one in so many sources of each file.
    """
    files = []
    for work, times in zip(works, rounds, strict=True):
        total = len(json.loads((work.folder / FILE).read_text())["sources"]) // share
        for precision, ours in OURS.items():
            say(f"{work.name}: tuning CTranslate2 in {precision}")
            peer, replicas, peer_options, tried = tune(work, PEERS[precision], threads, total // TUNED_ON)
            say(f"{work.name}: decoding in {precision}")
            options: dict[str, dict[str, Any]] = {name: {} for name in ours} | {peer: peer_options}
            seconds: dict[str, list[float]] = {name: [] for name in options}
            last: dict[str, dict[str, Any]] = {}
            with ExitStack() as stack:
                workers = [
                    stack.enter_context(
                        Worker(name, work.folder, threads, replicas=replicas if name == peer else threads)
                    )
                    for name in options
                ]
                for _ in range(times):
                    for worker in workers:
                        last[worker.name] = answer = decode(worker, work, options[worker.name], total)
                        seconds[worker.name].append(answer["seconds"])
            truth = last[peer]["tokens"]
            files += [
                {
                    "file": work.name,
                    "precision": precision,
                    "contender": name,
                    "options": {
                        **options[name],
                        **({"inter_threads": replicas, "tried": tried} if name == peer else {}),
                    },
                    "sentences": total,
                    "seconds": seconds[name],
                    "tokens": sum(map(len, answer["tokens"])),
                    "as_peer": sum(a == b for a, b in zip(answer["tokens"], truth, strict=True)),
                    "word_error_rate": word_error_rate(work, answer["tokens"]),
                    "peak_megabytes": answer["peak_megabytes"],
                }
                for name, answer in last.items()
            ]
    return {"machine": machine.describe(), "threads": threads, "beam": BEAM, "files": files}


def decode(worker: Worker, work: Work, options: dict[str, Any], limit: int) -> dict[str, Any]:
    """Have a contender decode a file."""
    every = {"beam_size": BEAM, "max_decoding_length": work.longest, **options}
    return worker.ask(do="file", path=str(work.folder / FILE), options=every, limit=limit)


def tune(
    work: Work, names: Sequence[str], threads: int, limit: int
) -> tuple[str, int, dict[str, Any], dict[str, float]]:
    """The matrix library, batches at once, batch size and type with which CTranslate2 is fastest on part of the file.

    Batch sizes are tried with the best library and the best number of batches at once.

    Returns:
        The contender, batches at once, options, and the seconds of everything that was tried.
    """
    tried: dict[tuple[str, int, int, str], float] = {}
    replicas = sorted({1, threads})

    def attempt(name: str, at_once: int, batches: Sequence[tuple[int, str]]) -> None:
        with Worker(name, work.folder, threads, replicas=at_once) as worker:
            for size, kind in batches:
                answer = decode(worker, work, {"max_batch_size": size, "batch_type": kind}, limit)
                tried[name, at_once, size, kind] = answer["seconds"]

    for name in names:
        for at_once in replicas:
            attempt(name, at_once, BATCHES[:1])
    name, at_once, _, _ = min(tried, key=lambda one: tried[one])
    attempt(name, at_once, BATCHES[1:])
    name, at_once, size, kind = min(tried, key=lambda one: tried[one])
    names_tried = {f"{n}, {a} at once, {s} {k}": seconds for (n, a, s, k), seconds in tried.items()}
    return name, at_once, {"max_batch_size": size, "batch_type": kind}, names_tried


def word_error_rate(work: Work, tokens: Sequence[Sequence[int]]) -> float | None:
    """Percent of words that equal no reference; None where there are none."""
    if work.references is None:
        return None
    from tfm_export.bundle import Bundle
    from tfm_export.quantize import METRICS
    from tfm_export.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Bundle.open(work.folder / BUNDLE, check_hashes=False))
    assert tokenizer is not None
    texts = [tokenizer.decode_target(ids) for ids in tokens]
    return 100 - METRICS["exact"].score(texts, work.references[: len(texts)])


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    files = results["files"]
    rows = []
    for one in files:
        peer = next(
            p
            for p in files
            if (p["file"], p["precision"]) == (one["file"], one["precision"])
            and p["contender"].startswith("CTranslate2")
        )
        middle, theirs = np.median(one["seconds"]), np.median(peer["seconds"])
        wer = "" if one["word_error_rate"] is None else f"{one['word_error_rate']:.2f}"
        same = f"{100 * one['as_peer'] / one['sentences']:.1f} %"
        ratio = "" if one is peer else f"**{theirs / middle:.2f}**"
        rows.append(
            [
                f"{one['sentences']:,} {one['file']}",
                one["precision"],
                one["contender"],
                f"{one['sentences'] / middle:,.1f}",
                ratio,
                f"{one['tokens']:,}",
                same,
                wer,
                f"{one['peak_megabytes']:,.0f}",
            ]
        )
    names = ["file", "in", "", "sentences/s", "times CTranslate2's", "tokens", "as CTranslate2", "WER %", "peak MB"]
    return table(names, rows)


def main() -> None:
    """The command."""
    parser = new_parser(__doc__, RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tenth of each file")
    arguments = parser.parse_args()
    if not arguments.table:
        again = not arguments.reuse
        works = [prepare_words(WORDS_FOLDER, again=again), prepare_mixed(MIXED_FOLDER, again=again)]
        results = measure(works, (3, 1), arguments.threads, 10 if arguments.quick else 1)
        write_results(results, arguments.output)
    print(tables(json.loads(arguments.output.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
