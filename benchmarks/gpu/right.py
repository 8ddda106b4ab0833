"""Whether kernels find what the reference does."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvquant.attention import triton_kernels
from kvquant.attention.reference import attend_reference

from .held import codecs, random, stored
from .rows import MISSED, Row, verdict

FORMATS = ("int4", "int4, 16 pairs turn", "int4-kivi", "int8", "fp8", "fp8_e5m2", "none")
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
"""Norm of the difference, as a share of the reference's."""


def checks(device: str) -> Iterator[Row]:
    """Attention against the reference in float64, and codes against those of a CPU.

    Few shapes, since a kernel is compiled for each: the tests have many, in the interpreter.
    """
    half = torch.bfloat16
    for name in FORMATS:
        yield check(device, name, half, 128, 1500)
        yield check(device, name, half, 64, 700, new=5, window=300)
    yield check(device, "int4", half, 80, 400, group=71, softcap=5.0)
    for name in ("int4", "int4-kivi", "fp8"):
        yield check(device, name, torch.float32, 128, 1500)
    for name in FORMATS[:-1]:
        yield check_append(device, name)


def check(
    device: str,
    name: str,
    dtype: torch.dtype,
    dim: int,
    tokens: int,
    group: int = 4,
    new: int = 1,
    window: int | None = None,
    softcap: float | None = None,
) -> Row:
    """Attention of two rows with two KV heads."""
    states = random(device, dtype, 2, 2, dim)
    rows = stored(name, states, tokens, codecs(name, dim, 2, dtype, device), new, window)
    query = random(device, dtype, 2, 2 * group, dim)(new)
    what = f"{name}, {str(dtype)[6:]}, {dim} channels, {group} heads share"
    refusal = triton_kernels.refusal(query, rows)
    if refusal is not None:
        return Row("right", what, 2, tokens, refusal, verdict=MISSED)
    found = triton_kernels.attend(query, rows, dim**-0.5, softcap=softcap)
    wanted = attend_reference(query, rows, dim**-0.5, softcap=softcap)
    error = float((found.double() - wanted).norm() / wanted.norm())
    return Row("right", what, 2, tokens, f"{error:.1e}", verdict=verdict(error, ERRORS[dtype]))


def check_append(device: str, name: str) -> Row:
    """Codes of the kernel and of the reference on the CPU, which may not differ."""
    different = 0
    on_gpu, on_cpu = (codecs(name, 128, 2, torch.bfloat16, it) for it in (device, "cpu"))
    for own, reference in zip(on_gpu, on_cpu, strict=True):
        states = random("cpu", torch.bfloat16, 2, 2, 128)(512)
        where = torch.arange(512)[None].expand(2, 512)
        coded = reference.encode_reference(states, where, 512)
        targets = tuple(torch.zeros_like(it, device=device) for it in coded)
        if not triton_kernels.append(own, states.to(device), targets, 0, where.to(device), 512):
            return Row("right", f"{name}, codes", 2, 512, "no kernel", verdict=MISSED)
        pairs = zip(targets, coded, strict=True)
        different += sum(int((target.cpu() != it).sum()) for target, it in pairs)
    figure = f"{different} differ"
    return Row("right", f"{name}, codes", 2, 512, figure, verdict=verdict(different, 0))
