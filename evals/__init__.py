"""Evaluation: judges a quantized cache against the unquantized one."""
