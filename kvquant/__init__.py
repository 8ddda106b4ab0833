"""kvquant calibrates quantized KV caches and proves that they work."""

__version__ = "0.1.0"
