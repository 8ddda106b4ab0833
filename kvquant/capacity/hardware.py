"""GPUs: how much memory they have, how fast they read it, and who says so.

Figures are those of the vendors' data sheets; `source` names the sheet and where its figure was
read. A GB is 10^9 bytes, as the sheets print it. Boards report somewhat more (an RTX 5090 32,607
MiB, which are 34.2 GB): plan with your own figure through ``--memory-gb``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvquant.errors import InputError

from .wording import nearest


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: As users type it.
        memory_gb: Memory in units of 10^9 bytes.
        bandwidth_tbs: Memory bandwidth in units of 10^12 bytes a second; None if it is not known.
        source: Who says so.
    """

    name: str
    memory_gb: float
    bandwidth_tbs: float | None
    source: str


_GPUS = (
    Gpu(
        "a100-40gb",
        40,
        1.555,
        "NVIDIA A100 data sheet, SXM4; in glennklockwood.com/garden/processors/A100",
    ),
    Gpu(
        "a100-80gb",
        80,
        2.039,
        "NVIDIA A100 data sheet, SXM4 (1758950-r4); in glennklockwood.com/garden/processors/A100",
    ),
    Gpu(
        "h100-80gb",
        80,
        3.35,
        "NVIDIA H100 data sheet, SXM5; in glennklockwood.com/garden/processors/h100",
    ),
    Gpu(
        "h100-nvl",
        94,
        3.9,
        "NVIDIA H100 data sheet, NVL; in jarvislabs.ai/ai-faqs/nvidia-h100-vs-h200-gpu-comparison",
    ),
    Gpu(
        "h200",
        141,
        4.8,
        "NVIDIA H200 data sheet; in jarvislabs.ai/ai-faqs/nvidia-h100-vs-h200-gpu-comparison",
    ),
    Gpu(
        "b200",
        180,
        8.0,
        "8 TB/s as vLLM reports it, 7.67 in pytorch/ao#4002; secondary pages say 179 to 192 GB",
    ),
    Gpu("l4", 24, 0.3, "NVIDIA L4 data sheet; in grokipedia.com/page/NVIDIA_L4_vs_L40S"),
    Gpu(
        "l40s",
        48,
        0.864,
        "NVIDIA L40S data sheet; in ai-dynamo/aiconfigurator systems/l40s.yaml",
    ),
    Gpu(
        "rtx-4090",
        24,
        1.008,
        "384 bit x 21 Gb/s GDDR6X; in pcgamesn.com/nvidia/geforce-rtx-5090-memory-bandwidth-leak",
    ),
    Gpu(
        "rtx-5090",
        32,
        1.792,
        "512 bit x 28 Gb/s GDDR7; in ai-dynamo/aiconfigurator systems/rtx_5090.yaml",
    ),
    Gpu(
        "mi300x",
        192,
        5.3,
        "AMD Instinct MI300X data sheet; in emergentmind.com/topics/amd-instinct-mi300x-gpus",
    ),
)
_ALIASES = {"a100": "a100-80gb", "h100": "h100-80gb", "4090": "rtx-4090", "5090": "rtx-5090"}


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of the table."""
    return _GPUS


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`, in any case, with or without its dashes.

    Raises:
        InputError: No such GPU; the nearest names are offered.
    """
    table = {gpu.name: gpu for gpu in _GPUS}
    plain = _plain(name)
    known = {
        _plain(key): value for key, value in (*_ALIASES.items(), *zip(table, table, strict=True))
    }
    if plain in known:
        return table[known[plain]]
    raise InputError(
        f"unknown GPU {name!r}{nearest(name, list(table))}; --list-gpus shows all, and "
        "--memory-gb with --bandwidth-tbs plans for any other"
    )


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
