"""Quantization arithmetic: reference, packing, rotation."""
