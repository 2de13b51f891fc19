"""Older processors than this machine's, as ONNX Runtime finds them."""
