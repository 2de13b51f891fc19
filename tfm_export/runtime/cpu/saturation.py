"""Sums of products of 8-bit numbers on processors that would cut them off.

On x86 without VNNI and AMX, ONNX Runtime multiplies unsigned activations with signed weights by `vpmaddubsw`, which
adds two products in 16 bits and keeps the largest number that fits. Weights of 7 bits always fit. Where weights have 8,
a session can be told to store them unsigned, for which ONNX Runtime has instructions that add in 32 bits: the same
numbers as everywhere else, but slower. So a variant gives the same numbers wherever it runs, whoever made it.
"""

from __future__ import annotations

import shlex

from tfm_export.bundle import Bundle
from tfm_export.graph import GENERATE
from tfm_export.runtime.cpu.processor import cpu_features

# The operator that rounds activations to 8 bits. w8 and w4 have none in their files; "DequantizeLinear" has a small q.
_QUANTIZES_ACTIVATIONS = b"QuantizeLinear"


def needs_wide_sums(graph: bytes) -> bool:
    """Whether this processor would cut off sums of a graph's products, were they not computed in 32 bits.

    The graph itself decides, not the manifest: bundles of old do not record the range of weights. ONNX Runtime looks
    at the weights and leaves those of 7 bits to the faster instructions.

    Args:
        graph: the contents of its file.
    """
    return cpu_features().saturates and _QUANTIZES_ACTIVATIONS in graph


def multiplies_8_bits(bundle: Bundle, variant: str) -> bool:
    """Whether some graph of a variant multiplies 8-bit activations with 8-bit weights at fixed scales.

    Args:
        bundle: an open bundle.
        variant: one that it has.
    """
    return variant == "int8" or bool(bundle.manifest.variants[variant].get("int8_encoder"))


def saturation_note(bundle: Bundle, variant: str) -> str | None:
    """Why a variant is slower on this processor than it could be, and what to do; None if there is nothing to say.

    Args:
        bundle: an open bundle.
        variant: one that it has.
    """
    facts = bundle.manifest.variants[variant]
    if not multiplies_8_bits(bundle, variant) or facts.get("reduced_range"):
        return None
    processor = cpu_features()
    if not processor.saturates:
        return None
    if "reduced_range" in facts:
        weights = "weights have 8 bits"
    else:
        weights = "the bundle does not say whether weights have 7 bits or 8, and 8 are assumed"
    return (
        f"{weights}, and {processor.name} has neither VNNI nor AMX: sums are exact, by slower instructions; weights of "
        f"7 bits are faster here: {_requantize(bundle, variant)}"
    )


def generate_graph_problem(bundle: Bundle, variant: str) -> str | None:
    """Why a variant's generate.onnx would not give its numbers on this processor; None if it does.

    A session computes sums in 32 bits everywhere or nowhere, and where it does, ONNX Runtime cannot run the layers of
    w8 and w4. The encoder and the decoder step have a session each; generate.onnx has both in one.

    Args:
        bundle: an open bundle.
        variant: one that it has.
    """
    if not one_session_has_both(bundle, variant) or saturation_note(bundle, variant) is None:
        return None
    return (
        f"{GENERATE} of {variant} with an int8 encoder may need weights of 7 bits on {cpu_features().name}, which has "
        f"neither VNNI nor AMX: {_requantize(bundle, variant)}"
    )


def one_session_has_both(bundle: Bundle, variant: str) -> bool:
    """Whether a variant's generate.onnx multiplies by the kernels of int8 and by those of w8 or w4."""
    return variant != "int8" and multiplies_8_bits(bundle, variant)


def _requantize(bundle: Bundle, variant: str) -> str:
    options = "--int8" if variant == "int8" else f"--{variant} --int8-encoder"
    return f"tfm-export quantize {shlex.quote(str(bundle.path))} {options} --reduced-range --force"
