"""PyTorch to ONNX: `export_bundle` makes a bundle of a checkpoint."""

from tfm_export.export.stage import export_bundle

__all__ = ["export_bundle"]
