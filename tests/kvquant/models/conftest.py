"""Adapters on disk, trained by a random number generator."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def make_adapter() -> Callable[..., Path]:
    """``make_adapter(base, directory, vocabulary=None, **lora_options)``: saves it, spoils `base`.

    Both LoRA matrices are random, so that it changes k_proj and v_proj unless told otherwise.
    """

    def make(base: Any, directory: Path, vocabulary: int | None = None, **options: Any) -> Path:
        import torch
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        if vocabulary is not None:
            base.resize_token_embeddings(vocabulary, mean_resizing=False)
        config = {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["k_proj", "v_proj"],
            "init_lora_weights": False,
            "task_type": "CAUSAL_LM",
            **options,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(base, LoraConfig(**config))
            with torch.no_grad():
                for name, value in model.named_parameters():
                    if ".modules_to_save." in name:
                        value.normal_(std=0.02)
                    if "lora_magnitude_vector" in name:
                        value *= torch.rand_like(value) + 0.5
            model.save_pretrained(directory)
        return directory

    return make


@pytest.fixture
def weights_hash() -> Callable[[Any], str]:
    """SHA-256 over all the tensors of a model, adapters included."""

    def digest(model: Any) -> str:
        result = hashlib.sha256()
        for name, value in sorted(model.state_dict().items()):
            result.update(name.encode())
            result.update(value.contiguous().numpy().tobytes())
        return result.hexdigest()

    return digest


@pytest.fixture
def logits() -> Callable[[Any], Any]:
    """Logits for a fixed line of tokens."""

    def compute(model: Any) -> Any:
        import torch

        tokens = (torch.arange(24) * 7 % 120 + 4)[None]
        with torch.inference_mode():
            return model(tokens, use_cache=False).logits

    return compute
