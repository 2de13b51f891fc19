"""What ONNX Runtime makes of a variant's graphs when it loads them: its optimiser decides how fast they are."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx

from tfm_export.errors import BundleError, ExportError
from tfm_export.graph import DECODER_STEP, DECODER_STEP_ATTENTION, ENCODER
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.cpu.onnx_runtime import onnxruntime
from tfm_export.runtime.onnx_sessions import session_options

_EXTERNAL_FROM_BYTES = 1024


def fused_operators(folder: Path) -> dict[str, Counter[str]]:
    """Count the operators of a variant's graphs as ONNX Runtime runs them.

    Args:
        folder: of the variant.

    Returns:
        For "encoder", "decoder_step" and, if there is one, "decoder_step_attention": how often each operator occurs.

    Raises:
        BundleError: a graph does not load.
    """
    return {name: Counter(node.op_type for node in graph.node) for name, graph in optimized_graphs(folder).items()}


def check_fused(folder: Path, layers: Mapping[str, str]) -> None:
    """Make sure that ONNX Runtime made the operator that is fast of every quantised layer.

    Args:
        folder: of the variant.
        layers: the precision of each quantised layer, by its name, such as
            "encoder/layers.0.feed_forward.expand"; those of "decoder_step" are looked for in "decoder_step_attention"
            too.

    Raises:
        ExportError: naming every layer that was not fused.
        BundleError: a graph does not load.
    """
    problems = []
    for name, graph in optimized_graphs(folder).items():
        owner = "decoder_step" if name == "decoder_step_attention" else name
        own = {layer: PRECISIONS[p].fused_operator for layer, p in layers.items() if layer.startswith(f"{owner}/")}
        for operator in dict.fromkeys(filter(None, own.values())):
            expected = [layer.removeprefix(f"{owner}/") for layer in own if own[layer] == operator]
            found = _fused_layers(graph, operator)
            if missing := [layer for layer in expected if layer not in found]:
                problems.append(
                    f"ONNX Runtime {onnxruntime.__version__} made {operator} of {len(expected) - len(missing)} of "
                    f"the {len(expected)} quantised layers of {name}; not of {', '.join(missing)}"
                )
    if problems:
        raise ExportError(problems, "--skip these layers, or another version of ONNX Runtime")


def _fused_layers(graph: onnx.GraphProto, operator: str) -> set[str]:
    """The layers that an operator was made of: it reads their integers, whatever else its inputs are called."""
    return {
        value.partition(".weight_int")[0]
        for node in graph.node
        if node.op_type == operator
        for value in node.input
        if ".weight_int" in value
    }


def optimized_graphs(folder: Path) -> dict[str, onnx.GraphProto]:
    """A variant's graphs as ONNX Runtime runs them, without their weights.

    Args:
        folder: of the variant.

    Returns:
        Them, by "encoder", "decoder_step" and, if there is one, "decoder_step_attention".

    Raises:
        BundleError: a graph does not load.
    """
    files = [folder / file for file in (ENCODER, DECODER_STEP, DECODER_STEP_ATTENTION) if (folder / file).is_file()]
    return {path.stem: _optimized_graph(path) for path in files}


def _optimized_graph(path: Path) -> onnx.GraphProto:
    with tempfile.TemporaryDirectory() as temporary:
        written = Path(temporary) / path.name
        options = session_options(1)
        options.optimized_model_filepath = str(written)
        # Beside the graph, which can hold no more than 2 GB.
        for key, value in (("file_name", "weights.bin"), ("min_size_in_bytes", str(_EXTERNAL_FROM_BYTES))):
            options.add_session_config_entry(f"session.optimized_model_external_initializers_{key}", value)
        try:
            onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as problem:  # its exceptions have no base class of their own
            raise BundleError(
                f"{path} cannot be loaded by ONNX Runtime {onnxruntime.__version__}: {problem}"
            ) from problem
        return onnx.load(written, load_external_data=False).graph
