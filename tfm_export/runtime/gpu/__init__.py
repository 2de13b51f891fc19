"""GPUs: CUDA, TensorRT, and ONNX Runtime's CUDA provider; knows nothing of the CPU's backend."""
