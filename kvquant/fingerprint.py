"""What a set of scales belongs to: weights, adapters, tokenizer and chat template.

A model's identity is a SHA-256 over the name, the shape and a fixed sample of values of each of
its tensors. Values are hashed as float32, which holds float16 and bfloat16 exactly, so that
neither the container nor loading in a wider dtype matters. Where a model was loaded in a *narrower*
dtype than its checkpoint holds, the sample is taken from the checkpoint's safetensors files, after
making sure that the model still is what was loaded: a training step in memory changes the identity.
Reading takes a few hundred values per tensor, not the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FingerprintError

if TYPE_CHECKING:
    import numpy as np
    import torch

SAMPLES_PER_TENSOR = 256
LINEAGE_KEY = "kvquant_lineage"
"""Config entry of a merged model: what it was merged from."""

_NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a model as served.

    Attributes:
        weights: SHA-256 of the base weights' sample; "" where unknown.
        adapters: SHA-256 of each active adapter, sorted. A merged model that records its lineage
            has the base's `weights` and its `adapters`.
        tokenizer: SHA-256 of vocabulary and special tokens; "" where unknown.
        chat_template: SHA-256 of the chat template; "" where there is none.
    """

    weights: str = ""
    adapters: tuple[str, ...] = ()
    tokenizer: str = ""
    chat_template: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Fingerprint:
        """Inverse of `to_dict`."""
        return cls(**{**values, "adapters": tuple(values["adapters"])})

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs in a way that changes keys and values: weights, adapters."""
        return [name for name in ("weights", "adapters") if getattr(self, name) != getattr(other, name)]

    def check(self, other: Fingerprint, mine: str = "the scales", theirs: str = "the model") -> None:
        """Makes sure that both are of one model and adapter set.

        Raises:
            FingerprintError: They are not; the message shows both and what differs.
        """
        different = self.differences(other)
        if different:
            raise FingerprintError(
                f"{mine} belong to {self}, {theirs} to {other}: {' and '.join(different)} differ"
            )

    def __str__(self) -> str:
        """Short form for tables and messages: ``3f9a12bc04de + adapter 77aa01c2d3e4``."""
        names = [self.weights[:12] or "unknown weights"]
        names += [f"adapter {adapter[:12]}" for adapter in self.adapters]
        return " + ".join(names)


def fingerprint(model: Any, tokenizer: Any = None) -> Fingerprint:
    """Identity of a model in memory, PEFT adapters included.

    Args:
        model: A Transformers model or a PeftModel around one.
        tokenizer: Its tokenizer, if it is to be part of the identity.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    weights = _hash_samples(_model_samples(base))
    adapters = _active_adapters(model)
    lineage = getattr(base.config, LINEAGE_KEY, None)
    if lineage and lineage["merged"] == weights:
        weights = lineage["weights"]
        adapters = sorted([*adapters, *lineage["adapters"]])
    template = getattr(tokenizer, "chat_template", None)
    return Fingerprint(
        weights=weights,
        adapters=tuple(adapters),
        tokenizer="" if tokenizer is None else _hash_json(_vocabulary(tokenizer)),
        chat_template=_hash_json(template) if template else "",
    )


def record_lineage(merged: Any, origin: Fingerprint) -> None:
    """Notes in a merged model's config what it was merged from.

    From then on `fingerprint` of that model, saved and loaded again in the dtype it has now, gives
    `origin`'s weights and adapters, until the weights change.
    """
    setattr(
        merged.config,
        LINEAGE_KEY,
        {
            "merged": _hash_samples(_model_samples(merged)),
            "weights": origin.weights,
            "adapters": list(origin.adapters),
        },
    )


def _model_samples(base: Any) -> list[tuple[str, list[int], np.ndarray[Any, Any]]]:
    """Name, shape and sampled float32 values of each distinct base tensor, sorted by name."""
    on_disk = _CheckpointSamples(Path(str(getattr(base, "name_or_path", "") or "")))
    samples = []
    for name, shape, sample in _base_samples(base):
        values = sample.float().numpy()
        wider = on_disk.read(name) if sample.element_size() < 4 else None
        if wider is not None and _is_rounding(wider, sample):
            values = wider
        samples.append((name, shape, values))
    return sorted(samples, key=lambda entry: entry[0])


def _base_samples(base: Any) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    """Name, shape and sample of the model's own tensors, tied ones once, adapters left out."""
    from accelerate.utils import align_module_device

    seen: set[int] = set()
    for prefix, module in base.named_modules():
        if ".lora_" in prefix or ".modules_to_save." in prefix:
            continue
        names = _persistent_tensors(module)
        fresh = [name for name in names if id(getattr(module, name)) not in seen]
        # Offloaded weights get new tensor objects each time they are brought in.
        seen |= {id(getattr(module, name)) for name in fresh if not getattr(module, name).is_meta}
        if not fresh:
            continue
        with align_module_device(module):
            for name in fresh:
                tensor = getattr(module, name)
                yield _plain_name(prefix, name), list(tensor.shape), _sample(tensor).cpu()


def _persistent_tensors(module: torch.nn.Module) -> list[str]:
    """Names of the tensors that a checkpoint of `module` holds, its children's left out."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    buffers = [name for name, _ in module.named_buffers(recurse=False)]
    return names + [name for name in buffers if name not in module._non_persistent_buffers_set]


def _plain_name(prefix: str, name: str) -> str:
    """The tensor's name as if PEFT had not wrapped its module."""
    path = f"{prefix}.{name}" if prefix else name
    return path.replace("base_layer.", "").replace("original_module.", "")


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """`SAMPLES_PER_TENSOR` values spread evenly over the flattened tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[_positions(flat.numel(), flat.device)]


def _positions(numel: int, device: Any = "cpu") -> torch.Tensor:
    """Evenly spread indices into `numel` values, first and last included."""
    import torch

    count = min(SAMPLES_PER_TENSOR, numel)
    steps = torch.arange(count, device=device, dtype=torch.int64)
    return steps * (numel - 1) // max(count - 1, 1)


def _is_rounding(wider: np.ndarray[Any, Any], sample: torch.Tensor) -> bool:
    """Whether `sample` is what loading `wider` in its dtype gives."""
    import torch

    return torch.equal(torch.from_numpy(wider).to(sample.dtype), sample)


class _CheckpointSamples:
    """Samples of the tensors in a directory of safetensors files, read on demand."""

    def __init__(self, directory: Path) -> None:
        self._tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in sorted(directory.glob("*.safetensors")) if directory.is_dir() else ():
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    self._tensors[name] = (file, 8 + length, entry)

    def read(self, name: str) -> np.ndarray[Any, Any] | None:
        """float32 samples of `name`, or None if the directory does not hold it as floats."""
        import numpy as np

        file, start, entry = self._tensors.get(name, (None, 0, {}))
        numpy_type = _NUMPY_TYPES.get(entry.get("dtype", ""))
        if file is None or numpy_type is None:
            return None
        begin, end = entry["data_offsets"]
        if begin == end:
            return None
        count = (end - begin) // np.dtype(numpy_type).itemsize
        values = np.memmap(file, numpy_type, "r", start + begin, (count,))[_positions(count).numpy()]
        if entry["dtype"] == "BF16":
            return (values.astype("<u4") << 16).view("<f4")
        return values.astype("<f4")


def _active_adapters(model: Any) -> list[str]:
    """Hash of each adapter that takes part in the forward pass right now."""
    if not hasattr(model, "peft_config"):
        return []
    from peft import get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if not layers or any(layer.disable_adapters for layer in layers):
        return []
    active = {name for layer in layers for name in layer.active_adapters if not layer.merged}
    hashes = []
    for name in sorted(active):
        state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        samples = (
            (key, list(state[key].shape), _sample(state[key]).float().cpu().numpy())
            for key in sorted(state)
        )
        scaling = sorted(
            {
                str(layer.scaling[name])
                for layer in layers
                if isinstance(getattr(layer, "scaling", None), dict) and name in layer.scaling
            }
        )
        hashes.append(_hash_samples(samples, extra=[str(model.peft_config[name].peft_type), *scaling]))
    return sorted(hashes)


def _hash_samples(
    samples: Iterable[tuple[str, list[int], np.ndarray[Any, Any]]], extra: list[str] | None = None
) -> str:
    digest = hashlib.sha256(json.dumps(extra or []).encode())
    for name, shape, values in samples:
        digest.update(json.dumps([name, shape]).encode())
        digest.update(values.astype("<f4").tobytes())
    return digest.hexdigest()


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _vocabulary(tokenizer: Any) -> Any:
    return [tokenizer.get_vocab(), {k: str(v) for k, v in tokenizer.special_tokens_map.items()}]
