"""The cache that plugs into Transformers."""
