"""Everything that needs a GPU, on whatever NVIDIA machine this is: does it work, and how fast is it?

    make gpu-check                             # test and measure; write build/gpu_check.json, print tables
    python -m benchmarks.gpu_check --minutes 4 --output result.json

It runs the tests marked `gpu`, builds engines of the base model for this GPU, and measures whole generations beside
PyTorch and CTranslate2. What was left out is told by name and reason. Without a GPU it says so and ends with 0; it ends
with 1 if something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks import machine
from benchmarks.contenders import BUNDLE, TARGET_LENGTH
from benchmarks.gpu_contenders import CONTENDERS, SLOTS
from benchmarks.work import prepare

ROOT = Path(__file__).parents[1]
OUTPUT = Path("build") / "gpu_check.json"
WORK = Path("build") / "gpu_check"
MINUTES = 10.0
TESTS_SHARE = 0.6  # of the time; the rest is for the benchmark
LONGEST_CONTENDER = 60.0  # seconds
FLAVORS = ("tensorrt", "rtx")


class Clock:
    """How much time is left.

    Args:
        seconds: all there is.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def check(minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Test and measure.

    Args:
        minutes: to do so.
        say: told what begins.

    Returns:
        `machine`, `doctor` (what `tfm-export doctor --json` found), `checks`, each with name, outcome ("passed",
        "failed" or "skipped"), reason, seconds and figures, and `benchmark`: see `benchmark`.
    """
    clock = Clock(60 * minutes)
    say("looking at the machine")
    found: dict[str, Any] = {"machine": machine.describe(), "doctor": doctor()}
    found["gpu"] = next(iter(found["doctor"]["gpus"].get("devices", [])), None)
    found["problem"] = found["doctor"]["gpus"].get("problem")
    if found["gpu"] is None:
        return found
    say("running the tests marked gpu")
    found["checks"] = run_tests(clock.left * TESTS_SHARE)
    found["benchmark"] = benchmark(WORK, clock, say)
    found["seconds"] = 60 * minutes - clock.left
    return found


def doctor() -> dict[str, Any]:
    """What `tfm-export doctor` finds."""
    command = [sys.executable, "-m", "tfm_export.cli", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    state: dict[str, Any] = json.loads(done.stdout)
    return state


def run_tests(seconds: float) -> list[dict[str, Any]]:
    """The tests marked gpu; those that there is no time for are skipped.

    Args:
        seconds: after which no test begins.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
        environment = {**os.environ, "TFM_EXPORT_GPU_SECONDS": str(seconds)}
        done = subprocess.run(
            [*command, f"--junitxml={report}"], cwd=ROOT, env=environment, stdout=sys.stderr, check=False
        )
        if not report.is_file():
            return [_check("pytest", "failed", f"it ended with exit code {done.returncode} and no report")]
        return read_report(report.read_text(encoding="utf-8"))


def read_report(text: str) -> list[dict[str, Any]]:
    """The outcomes in a report of pytest's, in JUnit's format."""
    checks = []
    for case in ET.fromstring(text).iter("testcase"):  # noqa: S314 (our own tests wrote it)
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome, reason = "passed", ""
        for kind, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            if (child := case.find(kind)) is not None:
                outcome, reason = word, (child.get("message") or "").strip()
        figures = {p.get("name", ""): p.get("value") for p in case.iter("property")}
        checks.append(_check(name, outcome, reason, float(case.get("time", 0)), figures))
    return checks


def _check(
    name: str, outcome: str, reason: str = "", seconds: float = 0.0, figures: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"name": name, "outcome": outcome, "reason": reason, "seconds": seconds, "figures": figures or {}}


def benchmark(folder: Path, clock: Clock, say: Callable[[str], None]) -> dict[str, Any]:
    """Whole generations of the base model on every backend here, beside PyTorch and CTranslate2.

    Args:
        folder: for the models.
        clock: when it must be over.
        say: told what begins.

    Returns:
        `engines`, the seconds that each took to build; `contenders`, what each measured; `skipped`, those that did
        not, and why.
    """
    say("preparing the base model")
    prepare(folder, say, variants=("fp16",))
    skipped: dict[str, str] = {}
    engines: dict[str, float] = {}
    for flavor in FLAVORS:
        for variant in ("fp32", "fp16"):
            say(f"building an engine: {flavor}, {variant}")
            start = time.monotonic()
            if problem := build_engine(folder / BUNDLE, flavor, variant):
                skipped[f"the engine {flavor}_{variant}"] = problem
            else:
                engines[f"{flavor}_{variant}"] = time.monotonic() - start
    measured: dict[str, Any] = {}
    for name in CONTENDERS:
        say(f"measuring {name}")
        result = run_contender(name, folder, min(clock.left, LONGEST_CONTENDER))
        if reason := result.get("skipped"):
            skipped[name] = reason
        else:
            measured[name] = result
    return {"target_tokens": TARGET_LENGTH, "engines": engines, "contenders": measured, "skipped": skipped}


def build_engine(bundle: Path, flavor: str, variant: str) -> str:
    """Build an engine for this GPU; the reason why there is none, or nothing."""
    sizes = ["--max-batch-size", "32", "--max-beam-size", "4", "--max-source-length", "32"]
    sizes += ["--max-target-length", str(TARGET_LENGTH), "--capacity", str(SLOTS)]
    return run_command(
        "trt", bundle, f"--{variant}", "--flavor", flavor, "--name", f"{flavor}_{variant}", *sizes, "--no-verify"
    )


def run_command(*arguments: object) -> str:
    """Run tfm-export; what it complains of, or nothing."""
    command = [sys.executable, "-m", "tfm_export.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    errors = done.stderr[max(done.stderr.find("Error:"), 0) :]
    return " ".join(errors.split()) if done.returncode else ""


def run_contender(name: str, folder: Path, seconds: float, device: str = "0") -> dict[str, Any]:
    """What a contender measured in a process of its own, or {"skipped": why not}."""
    if seconds <= 0:
        return {"skipped": "no time left"}
    command = [sys.executable, "-m", "benchmarks.gpu_contenders", name, str(folder), device]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"skipped": f"not done within {seconds:.0f} seconds"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"skipped": f"failed with exit code {done.returncode}: {last}"}
    state: dict[str, Any] = json.loads(done.stdout)
    return state


def failures(found: dict[str, Any]) -> list[str]:
    """What failed, by name: tests, and contenders of ours that broke down."""
    checks = [check["name"] for check in found.get("checks", []) if check["outcome"] == "failed"]
    skipped = found.get("benchmark", {}).get("skipped", {})
    broken = [name for name, why in skipped.items() if name.startswith("tfm-export") and why.startswith("failed")]
    return checks + broken


def tables(found: dict[str, Any]) -> str:
    """Everything, as Markdown."""
    gpu, cpu = found["gpu"], found["machine"]["cpu"]
    where = f"{gpu['name']}, compute capability {gpu['compute_capability']}, driver {found['doctor']['gpus']['driver']}"
    checks = [
        [check["name"], check["outcome"], f"{check['seconds']:.1f}", _figures(check)] for check in found["checks"]
    ]
    parts = [f"{where}; {cpu}", _table(["check", "outcome", "seconds", ""], checks)]
    result = found["benchmark"]
    parts.append(_table(["engine of the base model", "build, seconds"], _rows(result["engines"], "{:.1f}")))
    parts.append(_speed_table(result))
    parts.append(_table(["not measured", "why"], _rows(result["skipped"], "{}")))
    return "\n\n".join(parts)


def _speed_table(result: dict[str, Any]) -> str:
    """Milliseconds a step, medians, and how many sentences are the first contender's."""
    cells = list(dict.fromkeys((c["batch"], c["beam"]) for r in result["contenders"].values() for c in r["cells"]))
    first: dict[tuple[int, int], list[list[int]]] = {}
    rows = []
    for name, measured in result["contenders"].items():
        row = [name]
        by_cell = {(cell["batch"], cell["beam"]): cell for cell in measured["cells"]}
        for key in cells:
            if (cell := by_cell.get(key)) is None:
                row.append("")
                continue
            expected = first.setdefault(key, cell["tokens"])
            same = sum(a == b for a, b in zip(cell["tokens"], expected, strict=True))
            row.append(f"{median(cell['seconds']) / result['target_tokens'] * 1e3:.3f} ({same} of {key[0]})")
        rows.append(row)
    head = [f"batch {batch}, beam {beam}" for batch, beam in cells]
    return _table(["ms a step (sentences as the first's)", *head], rows)


def _figures(check: dict[str, Any]) -> str:
    return check["reason"] or ", ".join(f"{name}: {value}" for name, value in check["figures"].items())


def _rows(values: dict[str, Any], form: str) -> list[list[str]]:
    return [[name, form.format(value)] for name, value in values.items()]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*head], *([cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which nothing new is begun")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the file of results, JSON")
    parser.add_argument("--table", action="store_true", help="print the tables of the file that is there and stop")
    arguments = parser.parse_args()
    if arguments.table:
        print(tables(json.loads(arguments.output.read_text(encoding="utf-8"))))
        return
    found = check(arguments.minutes, lambda what: print(f"... {what}", file=sys.stderr, flush=True))
    if found["gpu"] is None:
        print(f"There is no GPU here, so nothing was checked: {found['problem']}")
        return
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(tables(found))
    print(f"\nwritten to {arguments.output}")
    if failed := failures(found):
        sys.exit(f"{len(failed)} failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
