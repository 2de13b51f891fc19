"""What the commands of the benchmarks have in common."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def new_parser(description: str | None, results: Path) -> argparse.ArgumentParser:
    """A parser with the options that all of them take.

    Args:
        description: of the command.
        results: where what was measured goes by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables of the results file and stop")
    parser.add_argument("--output", type=Path, default=results, help="the results file")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--reuse", action="store_true", help="use the models that are in build/ already")
    return parser


def write_results(results: dict[str, Any], path: Path, *, indent: int | None = 1) -> None:
    """Write what was measured as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=indent) + "\n", encoding="utf-8")
