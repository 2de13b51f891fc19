"""What ONNX Runtime's sessions have in common on all processors: options, and graphs that are of the expected form.

Importing this raises BackendUnavailable without ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm_export.errors import BundleError, RequestError
from tfm_export.extras import require_onnxruntime
from tfm_export.graph import TensorSpec

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding, SessionOptions

onnxruntime = require_onnxruntime()
_ONNX_TYPES = {"float32": "float"}  # where ONNX Runtime's word for a type is another


def session_options(threads: int, *, exact: bool = False, wide_sums: bool = False) -> SessionOptions:
    """How the graphs of a bundle are run.

    Args:
        threads: threads an operator may use on the CPU.
        exact: compute with the numbers that the files of a quantised variant hold, in float32. Otherwise ONNX Runtime
            also rounds the activations of w8 and w4 to 8 bits.
        wide_sums: add up products of 8-bit numbers in 32 bits; see `runtime.cpu.saturation`.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; warnings are about the optimiser's own doings
    # A plan of the memory is kept for every combination of shapes, and batches have new ones all the time.
    options.enable_mem_pattern = False
    # Two sessions have two thread pools: idle threads of one would spin on the CPUs that the other needs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # What MatMulNBits, made of DequantizeLinear and Gemm, multiplies weights of 8 and 4 bits with: activations rounded
    # to 8 bits, a scale a block. Its level 1 takes them as they are, but dequantises all 8-bit weights at each call.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    if exact:  # nothing is made of DequantizeLinear, so that of constants is computed once, when the graph loads
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    # Not by default: ONNX Runtime heeds it on processors with VNNI, too, where it costs speed and gains nothing. And it
    # gives the DequantizeLinear of w8 a zero point of a form that it does not take.
    elif wide_sums:
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def check_form(session: InferenceSession, path: Path, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> None:
    """Compare a graph's inputs and outputs with the table.

    Raises:
        BundleError: naming all that differ.
    """
    problems = []
    for what, expected, found in (
        ("input", inputs, session.get_inputs()),
        ("output", outputs, session.get_outputs()),
    ):
        types = {value.name: f"{value.type} {value.shape}" for value in found}
        wanted = {spec.name: f"tensor({_ONNX_TYPES.get(spec.dtype, spec.dtype)}) {[*spec.axes]}" for spec in expected}
        problems += [f"{path}: {what} {name} is missing" for name in wanted.keys() - types.keys()]
        problems += [f"{path}: {what} {name} is not one of the expected" for name in types.keys() - wanted.keys()]
        problems += [
            f"{path}: {what} {name} must be {wanted[name]}, found {types[name]}"
            for name in wanted.keys() & types.keys()
            if wanted[name] != types[name]
        ]
    if problems:
        raise BundleError(sorted(problems), "export the bundle again")


def run_bound(session: InferenceSession, binding: IOBinding, name: str) -> None:
    """Run a graph whose inputs and outputs are bound.

    Raises:
        RequestError: it cannot compute them.
    """
    try:
        session.run_with_iobinding(binding)
    except Exception as problem:  # its exceptions have no base class of their own
        raise _refused(name, problem) from problem


def run_feeds(session: InferenceSession, names: Sequence[str] | None, feeds: Mapping[str, Any], name: str) -> list[Any]:
    """The same with arrays; gives the outputs of these names."""
    try:
        outputs: list[Any] = session.run(names, feeds)
    except Exception as problem:
        raise _refused(name, problem) from problem
    return outputs


def _refused(name: str, problem: Exception) -> RequestError:
    said = " ".join(str(problem).split())
    return RequestError(
        f"ONNX Runtime {onnxruntime.__version__} could not compute {name}: {said}",
        "tfm-export verify, which compares the longest sequences that the bundle promises too; or a smaller batch",
    )
