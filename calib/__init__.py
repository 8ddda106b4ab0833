"""Calibration: from a model and token blocks to statistics, scales and a drift verdict."""
