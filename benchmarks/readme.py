"""README's figures: written from the results, never by hand.

python -m benchmarks.readme     # rewrite what lies between the two comments
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import files, memory
from benchmarks.contenders import INT8_ENCODER
from benchmarks.report import table

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- what benchmarks/readme.py writes begins here -->", "<!-- and ends here -->"
COLUMNS = {
    "fp32": "tfm-export",
    "fp32+w8": "tfm-export fp32+w8",
    "w8": "tfm-export w8",
    "int8": "tfm-export int8",
    "w4": "tfm-export w4",
}
FLOAT32, EIGHT_BITS = ("fp32", "fp32+w8"), ("w8", "int8")
PEERS = {
    "CTranslate2 float32": ("MKL", "oneDNN"),
    "CTranslate2 int8": ("MKL int8", "oneDNN int8", "MKL int8, 1 thread", "oneDNN int8, 1 thread"),
}


def section(folder: Path = RESULTS) -> str:
    """What the results say, as Markdown; results that are not there are left out.

    Args:
        folder: of the results files.
    """
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    parts = {"generation": _generation, "quality": _quality, "files": _files, "scaling": _scaling, "memory": _memory}
    return "\n\n".join(write(found[name]) for name, write in parts.items() if name in found)


def _generation(results: dict[str, Any]) -> str:
    ms = {
        (c["batch"], c["beam"], c["contender"]): float(np.median(c["seconds"])) * 1e3 / results["work"]["target_tokens"]
        for c in results["cells"]
    }
    kinds = list(dict.fromkeys((batch, beam) for batch, beam, _ in ms))
    columns = {title: name for title, name in COLUMNS.items() if name in results["contenders"]}
    rows = []
    for batch, beam in kinds:
        ours = {title: ms[batch, beam, name] for title, name in columns.items()}
        peers = {
            title: min(found)
            for title, names in PEERS.items()
            if (found := [v for n in names if (v := ms.get((batch, beam, f"CTranslate2 {n}"))) is not None])
        }
        ratios = _ratios(ours, peers)
        eager = [f"{v:.1f}" if (v := ms.get((batch, beam, "torch eager"))) else ""]
        cells = [*(f"{v:.1f}" for v in ours.values()), *eager, *(f"{v:.1f}" for v in peers.values()), *ratios]
        rows.append([f"{batch}, {'greedy' if beam == 1 else f'beam {beam}'}", *cells])
    ratio_names = ["fp32 against float32", "8 bits against int8"][: len(ratios)]
    names = ["sentences, beam", *columns, "PyTorch eager, cached", *peers, *ratio_names]
    machine = results["machine"]
    about = (
        "Whole generations of the base model (6+6 layers, d_model 512, 32,000 tokens): 32 tokens in, 32 out, the "
        f"encoder included. Milliseconds a step, medians of {count(results['rounds'], 'round')} of one run; "
        f"{machine['cpu']}, {results['threads']} threads, {', '.join(machine['flags'])}; all contenders on the same "
        "weights, CTranslate2 with the faster of its two matrix libraries, in int8 also with one thread if that is "
        "faster. fp32+w8 is fp32 with a draft: w8 guesses the next tokens of few sentences, greedy, and what comes out "
        "is fp32's. The last columns tell how many times faster the better of these two is than its float32, and the "
        "better of w8 and int8 than its int8. w8 and w4 have the encoder of int8 (`--int8-encoder`)."
    )
    return f"{fill(about)}\n\n{table(names, rows)}"


def _ratios(ours: dict[str, float], peers: dict[str, float]) -> list[str]:
    """How many times faster than CTranslate2: in float32, and in 8 bits."""
    pairs = [(FLOAT32, peers.get("CTranslate2 float32")), (EIGHT_BITS, peers.get("CTranslate2 int8"))]
    best = [(min((ours[name] for name in names if name in ours), default=None), theirs) for names, theirs in pairs]
    return [f"**{theirs / time:.2f} x**" for time, theirs in best if time is not None and theirs is not None]


def _quality(results: dict[str, Any]) -> str:
    rates = {one["precision"]: one["word_error_rate"] for one in results["precisions"]}
    forms = {name: INT8_ENCODER.get(name, name) for name in COLUMNS if name not in FLOAT32}
    changes = ", ".join(f"{name} {rates[form] - rates['fp32']:+.2f}" for name, form in forms.items() if form in rates)
    return fill(
        f"What that costs in quality, on the trained example's {results['work']['words']:,} test words: "
        f"{rates['fp32']:.2f} % of words wrong in fp32; {changes}."
    )


def _files(results: dict[str, Any]) -> str:
    about = (
        "Whole files, beam 4, as `tfm-export run` decodes them, against CTranslate2's `translate_iterable`, which was "
        "tuned for each:"
    )
    return f"{fill(about)}\n\n{files.tables(results)}"


def _scaling(results: dict[str, Any]) -> str:
    lines = [one for one in results["steps"] if one["contender"] == "tfm-export w8"]
    grows = "; ".join(
        f"with {count(one['batch'], 'sentence')} {one['start'] * 1e3:.1f} ms and "
        f"{one['slope'] * 1e8:.0f} µs more for every 100 tokens before (R² {one['r2']:.2f})"
        for one in lines
    )
    text = f"Cost grows with the target's length along a straight line. A step in w8 takes, {grows}."
    picture = "![Step time against past length, and throughput against batch](benchmarks/results/scaling.png)"
    return f"{picture}\n\n{fill(text)}"


def _memory(results: dict[str, Any]) -> str:
    starts = {one["contender"]: float(np.median(one["total"])) for one in results["starts"]}
    growth = {one["contender"]: memory.grown(one)[2] for one in results["growth"]}
    decodes = len(results["growth"][0]["megabytes"]) * memory.EVERY
    peaks = {(o["contender"], o["batch"], o["beam"]): (o["megabytes"], o["peer"]) for o in results["peaks"]}
    batch, beam = max((batch, beam) for _, batch, beam in peaks)
    beside = []
    for title, name in (("fp32", "tfm-export"), ("w8", "tfm-export w8")):
        megabytes, peer = peaks[name, batch, beam]
        theirs = peaks[peer, batch, beam][0]
        beside.append(f"{megabytes:,.0f} MB in {title} beside CTranslate2's {theirs:,.0f}")
    return fill(
        f"Peak memory of a process that decodes {count(batch, 'sentence')} with beam {beam}: "
        f"{'; '.join(beside)}. Over {decodes:,} decodes of random shapes it changes by "
        f"{growth['tfm-export w8']:+.1f} % (w8). From a fresh process to the first "
        f"token: {starts['tfm-export w8']:.2f} s (w8)."
    )


def count(number: int, thing: str) -> str:
    """A number of things."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def fill(text: str) -> str:
    """A paragraph in lines as long as those of the other documents."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def with_section(text: str, content: str) -> str:
    """A document with other content between the comments.

    Raises:
        ValueError: it has not both of them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"expected {BEGIN} and {END}")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    README.write_text(with_section(README.read_text(encoding="utf-8"), section()), encoding="utf-8")
