"""kvquant calibrates quantized KV caches and proves that they work.

Names resolve on first use, so that ``kvquant --help`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "CacheGeometry": "geometry",
    "KVQuantError": "errors",
    "KVScales": "scales",
    "QuantScheme": "scheme",
    "QuantizedCache": "cache.cache",
    "load_scales": "storage",
    "save_scales": "storage",
}
__all__ = ["__version__", *_PUBLIC]


def __dir__() -> list[str]:
    """The public names, for completion."""
    return __all__


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvquant' has no attribute {name!r}")
    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
