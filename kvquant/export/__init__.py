"""Scales in the form that serving engines load, and a check that they would."""
