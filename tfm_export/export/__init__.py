"""PyTorch to ONNX: `export_bundle` makes a bundle of a checkpoint, or of a model of your own with an `Adapter`."""

from tfm_export.checkpoints import Adapter, AdapterConfig, Cache, attend, read_weights, slot_positions
from tfm_export.export.stage import export_bundle

__all__ = ["Adapter", "AdapterConfig", "Cache", "attend", "export_bundle", "read_weights", "slot_positions"]
