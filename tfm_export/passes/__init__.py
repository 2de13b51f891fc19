"""ONNX -> ONNX passes over a bundle's fp32 graphs: the same model in other numbers. No PyTorch, no runtime.

A pass changes an `onnx_ir.Model` in place and says what it did. Variants are made by the stage `quantize`; the stage
`trt` derives from them the form that TensorRT wants.
"""
