"""ONNX Runtime as a lazytensor backend."""

from lazytensor_onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
