"""ONNX to TensorRT engines: the only place that imports a TensorRT builder."""
