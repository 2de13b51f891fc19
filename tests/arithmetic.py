"""The numeric part of the tests, and other arithmetic than this processor's to run it in: make test-numeric.

    python -m tests.arithmetic [PYTEST'S ARGUMENTS]

A tolerance that was measured on one processor may be too tight on another, whose instructions add up in another order.
PyTorch and its libraries can be told to leave instructions alone, so one machine can have two kinds of arithmetic.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tfm_export.runtime.cpu.processor import CpuFeatures, cpu_features

ROOT = Path(__file__).parents[1]

# Whoever imports or calls one of these compares computed numbers, or may; so does whoever imports tests that do.
MODULES = ("tests.numerics", "tfm_export.verify")
FUNCTIONS = {"abs", "approx", "allclose", "isclose", "assert_close", "assert_allclose", "assert_array_max_ulp"}

# What is set, where a processor has any of these instruction sets: without them, it makes no difference.
PLAIN_X86 = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
PLAIN_ARM = {"ATEN_CPU_CAPABILITY": "default"}

# Of the numeric part, what takes seconds and no more, and depends on PyTorch. These folders decode with scripted models
# and emulated GPUs, or run whole commands, whose numbers are compared in the others.
SELECTION = "numeric and not slow and not full"
LEFT_OUT = (
    "bench",
    "benchmarks",
    "cli",
    "decoding",
    "emulation",
    "examples",
    "gpu",
    "model",
    "quantize",
    "tokenizer",
    "trt",
)
IN_EFFECT = "import torch; print(torch.backends.cpu.get_cpu_capability())"


@cache
def compares_numbers(path: Path) -> bool:
    """Whether a module of tests belongs to the numeric part: by what it imports and calls, not by a list of names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node.func) in FUNCTIONS:
            return True
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    if any(name == module or name.startswith(f"{module}.") for name in imported for module in MODULES):
        return True
    files = (ROOT / f"{name.replace('.', '/')}.py" for name in imported if name.startswith("tests."))
    return any(compares_numbers(file) for file in files if file.is_file() and file.name != "conftest.py")


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def other_arithmetic(processor: CpuFeatures) -> dict[str, str]:
    """The environment in which PyTorch's arithmetic differs most from a processor's own; {} if it has but one."""
    if {"avx2", "avx512"} & set(processor.instruction_sets):
        return PLAIN_X86
    return PLAIN_ARM if "sve" in processor.instruction_sets else {}


def main(arguments: list[str]) -> int:
    """Run the numeric part once in the other arithmetic; pytest's exit code."""
    changed = other_arithmetic(cpu_features())
    if not changed:
        print("This processor has but one arithmetic: make test has run the numeric part in it.")
        return 0
    environment = {**os.environ, **changed}
    done = subprocess.run(
        [sys.executable, "-c", IN_EFFECT], env=environment, capture_output=True, text=True, check=True
    )
    if done.stdout.strip() != "DEFAULT":
        print(f"expected PyTorch to compute with DEFAULT, found {done.stdout.strip()}", file=sys.stderr)
        return 1
    print(" ".join(f"{name}={value}" for name, value in changed.items()), flush=True)
    left_out = [f"--ignore=tests/{folder}" for folder in LEFT_OUT]
    pytest = [sys.executable, "-m", "pytest", "-m", SELECTION, *left_out, *arguments]
    return subprocess.run(pytest, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
