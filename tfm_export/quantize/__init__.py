"""ONNX -> ONNX with other numbers: precision variants that are calibrated, judged and kept only if they are good."""

from tfm_export.quantize.metrics import METRICS, Development, read_development
from tfm_export.quantize.options import METHODS, QuantizeOptions
from tfm_export.quantize.report import QuantizeReport
from tfm_export.quantize.stage import quantize_bundle

__all__ = [
    "METHODS",
    "METRICS",
    "Development",
    "QuantizeOptions",
    "QuantizeReport",
    "quantize_bundle",
    "read_development",
]
