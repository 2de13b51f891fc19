"""Which tests are the numeric part, and the other arithmetic that they are run in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arithmetic import IN_EFFECT, PLAIN_ARM, PLAIN_X86, compares_numbers, other_arithmetic
from tests.skips import does_not_apply, skip_if
from tfm_export.runtime.cpu.processor import CpuFeatures, cpu_features

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import numpy as np\nnp.testing.assert_allclose(1, 1)", True),
        ("from torch.testing import assert_close\nassert_close(1, 1)", True),
        ("import pytest\nassert 1 == pytest.approx(1)", True),
        ("import tests.numerics", True),
        ("from tests import numerics", True),
        ("from tfm_export.verify import verify_variant", True),
        ("from tests.checkpoints.parity import anything", True),  # which compares
        ("from tests.decoding import fake_model\nimport numpy\nassert 1 == 1", False),
        ("from tfm_export.verifying import nothing\n'approx(1)'", False),
    ],
)
def test_a_module_is_numeric_by_what_it_imports_and_calls(tmp_path: Path, code: str, expected: bool) -> None:
    (tmp_path / "test_it.py").write_text(code, encoding="utf-8")
    assert compares_numbers(tmp_path / "test_it.py") is expected


def test_the_marker_is_set_when_tests_are_collected(request: pytest.FixtureRequest) -> None:
    here = request.node.get_closest_marker("numeric")
    assert here is None
    numeric = {path.name for path in HERE.rglob("test_*.py") if compares_numbers(path)}
    assert {"test_torch_parity.py", "test_graphs.py", "test_step_models.py", "test_retype.py"} <= numeric
    assert not {"test_docs.py", "test_staging.py", "test_architecture.py"} & numeric
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-m",
            "numeric",
            "tests/decoding",
            "tests/test_docs.py",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent,
    )
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    modules = {*(HERE / "decoding").glob("test_*.py"), HERE / "test_docs.py"}
    assert found == {str(path.relative_to(HERE.parent)) for path in modules if compares_numbers(path)} != set()


def test_the_arithmetic_that_differs_most_is_chosen() -> None:
    def processor(*sets: str) -> CpuFeatures:
        return CpuFeatures(name="", machine="", instruction_sets=sets)

    assert other_arithmetic(processor("avx2", "fma", "avx512", "vnni")) == PLAIN_X86
    assert other_arithmetic(processor("avx2")) == PLAIN_X86
    assert other_arithmetic(processor("neon", "dotprod", "sve")) == PLAIN_ARM
    assert other_arithmetic(processor("neon")) == {}
    assert other_arithmetic(processor()) == {}


SUMS = """
import hashlib, torch
torch.manual_seed(0)
x = torch.randn(64, 512)
product, chain = x @ torch.randn(512, 512), torch.softmax(x, -1)
layer = torch.nn.functional.linear(x.bfloat16(), torch.randn(256, 512).bfloat16())
print(*(hashlib.sha256(t.float().numpy().tobytes()).hexdigest() for t in (product, chain, layer)))
"""


@pytest.mark.slow
@skip_if(not other_arithmetic(cpu_features()), "a processor with AVX2 or SVE", "make test", "on such a machine")
@pytest.mark.parametrize(("name", "of"), [("MKL_CBWR", 0), ("ATEN_CPU_CAPABILITY", 1), ("ONEDNN_MAX_CPU_ISA", 2)])
def test_each_variable_changes_the_numbers_that_its_library_computes(name: str, of: int) -> None:
    changed = other_arithmetic(cpu_features())
    if name not in changed:
        does_not_apply(f"{name} is for x86")
    own = {variable: value for variable, value in os.environ.items() if variable not in PLAIN_X86}

    def run(code: str, **variables: str) -> list[str]:
        command = [sys.executable, "-c", code]
        return subprocess.check_output(command, env={**own, **variables}, text=True).split()

    assert run(SUMS)[of] != run(SUMS, **{name: changed[name]})[of]
    assert run(IN_EFFECT, **changed) == ["DEFAULT"]
