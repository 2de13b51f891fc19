"""ONNX Runtime on the CPU; knows nothing of GPUs."""
