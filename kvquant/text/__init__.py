"""Calibration text: from files to blocks of tokens."""
