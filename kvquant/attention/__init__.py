"""Attention over a quantized cache, read as it is stored."""
