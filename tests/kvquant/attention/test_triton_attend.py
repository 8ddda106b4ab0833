"""Kernels compiled for GPUs that need not be there: registers, spills, and that they compile."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquant.attention.stored import Run, StoredRows

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvquant.attention import triton_append, triton_kernels, triton_plan  # noqa: E402
from kvquant.attention.triton_launch import Launch  # noqa: E402

# In the interpreter nothing can be compiled.
__test__ = os.environ.get("TRITON_INTERPRET") != "1"

MULTIPROCESSORS = 132
THREADS = 128
REGISTERS = 65536
# Bytes of a multiprocessor, less 1 KB that each program takes.
SHARED = {80: 161 * 1024, 89: 98 * 1024, 90: 225 * 1024, 100: 225 * 1024}
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Compiled:
    """What was made of a kernel.

    Attributes:
        registers: Of a thread.
        spills: Instructions that move registers to memory.
        copies: Instructions that copy from global to shared memory while others go on.
        shared: Bytes of shared memory.
    """

    registers: int
    spills: int
    copies: int
    shared: int


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Launch, int], Compiled]:
    """``compiled(launch, capability)``: what a launch would run."""
    path = tmp_path_factory.mktemp("cubins") / "kernel.cubin"

    def compile_for(launch: Launch, capability: int) -> Compiled:
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(source_of(launch), target=target, options=launch.options)
        path.write_bytes(made.asm["cubin"])
        usage = tool("cuobjdump", "-res-usage", path)
        code = tool("nvdisasm", "-c", path)
        return Compiled(
            registers=int(re.findall(r"REG:(\d+)", usage)[-1]),
            spills=len(re.findall(r"\bSTL\b", code)),
            copies=len(re.findall(r"\bLDGSTS\b", code)),
            shared=made.metadata.shared,
        )

    return compile_for


def tool(name: str, *arguments: object) -> str:
    command = [str(BINARIES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def source_of(launch: Launch) -> Any:
    """What Triton's launcher would compile for these arguments."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[place,] = "constexpr", value
        elif parameter.annotation_type:
            signature[parameter.name] = parameter.annotation_type
        else:
            aligned = not parameter.do_not_specialize_on_alignment
            found = described(value, (place,), constants, attributes, aligned)
            signature[parameter.name] = found
    return ASTSource(launch.kernel, signature, constants, attributes)


def described(value: Any, path: Any, constants: Any, attributes: Any, aligned: bool = True) -> Any:
    """Type of an argument; what is known of it goes into `constants` and `attributes`."""
    if isinstance(value, tuple):
        parts = [
            described(part, (*path, number), constants, attributes)
            for number, part in enumerate(value)
        ]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, torch.Tensor):
        number, kind = value.data_ptr(), "*" + TYPES[value.dtype]
    elif value in (None, 1):
        constants[path] = value
        return "constexpr"
    else:
        number, kind = value, "i32"
    if number % 16 == 0 and aligned:
        attributes[path] = [["tt.divisibility", 16]]
    return kind


@pytest.fixture(scope="module")
def launches(
    make_case: Callable[..., Any], make_stored: Callable[..., StoredRows]
) -> Callable[..., list[Launch]]:
    """``launches(**fields)``: what attention to a case starts on a GPU of 132 multiprocessors."""

    def plan(**fields: Any) -> list[Launch]:
        usual = {"past": 260, "kv_heads": 1, "group": 4, "mean": "fixed", "dtype": torch.bfloat16}
        case = make_case(**{**usual, **fields})
        stored = make_stored(case)
        stored = replace(stored, keys=aligned(stored.keys), values=aligned(stored.values))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_plan, "_gpu", lambda device: (MULTIPROCESSORS, 3))
            planned = triton_plan.plan(case.query(case.dtype), stored)
        return triton_kernels.launches(planned, 0.1, None, None)[0]

    return plan


def aligned(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Runs in tensors of their own, as those of a buffer begin."""
    return tuple(
        replace(run, held=tuple(torch.clone(held.contiguous()) for held in run.tensors), place=0)
        for run in runs
    )


FORMATS = {
    "int4": {"key": "int4", "sinks": 4},
    "int8": {"key": "int8"},
    "fp8": {"key": "fp8"},
    # Keys wait until their group is full, so that all three kinds of regions occur.
    "int4-kivi": {"key": "int4-kivi", "value": "int4", "mean": "none", "tail": 60},
}
HOPPER = [(90, name, dim) for dim in (64, 128) for name in FORMATS]
OTHERS = [
    *[(80, "int4", 128), (80, "int4-kivi", 128), (80, "fp8", 64)],
    *[(89, "int8", 128), (89, "int4", 64)],
    *[(100, "int4", 128), (100, "int4-kivi", 64), (100, "fp8", 128)],
]


@pytest.mark.parametrize(("capability", "name", "dim"), [*HOPPER, *OTHERS])
def test_no_register_is_spilled(
    capability: int, name: str, dim: int, launches: Any, compiled: Any
) -> None:
    (launch,) = [
        it
        for it in launches(**FORMATS[name], key_dim=dim)
        if it.kernel is triton_kernels.attend_kernel
    ]

    made = compiled(launch, capability)

    assert made.spills == 0
    # As many programs fit as are started.
    residents = launch.arguments["SHAPE"].residents
    assert REGISTERS // (-(-made.registers // 8) * 8 * THREADS) >= residents
    assert made.shared <= SHARED[capability] // (2 if capability == 89 else residents)
    assert made.copies > 0


@pytest.mark.parametrize("mean", ["few", "most"])
def test_no_register_is_spilled_where_a_mean_turns(mean: str, launches: Any, compiled: Any) -> None:
    launch = launches(key="int4", key_dim=128, mean=mean)[1]

    assert launch.arguments["SHAPE"].pairs == (16 if mean == "few" else 32)
    assert compiled(launch, 90).spills == 0


# Queries of several tokens, some of which see what others do not.
@pytest.mark.parametrize(
    ("name", "window"),
    [
        *[("int4", None), ("int8", None), ("int8", 100), ("int4-kivi", 100)],
        *[("fp8 per-channel", 100), ("fp8_e5m2", 100), ("fp8_e5m2 per-head", 100)],
    ],
)
@pytest.mark.parametrize("capability", [80, 90])
def test_several_tokens(
    capability: int, name: str, window: int | None, launches: Any, compiled: Any
) -> None:
    fields = FORMATS.get(name, {"key": name})

    launch = launches(**fields, key_dim=128, new=4, window=window)[1]

    assert launch.arguments["SHAPE"].several
    assert compiled(launch, capability).spills == 0


def test_float32_queries(launches: Any, compiled: Any) -> None:
    launch = launches(key="int4", key_dim=128, dtype=torch.float32)[1]

    assert compiled(launch, 80).spills == 0


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_before_and_after(capability: int, launches: Any, compiled: Any) -> None:
    fold, _, combine = launches(key="int4", key_dim=128)

    assert compiled(fold, capability).spills == 0
    assert compiled(combine, capability).spills == 0


@pytest.mark.parametrize(
    ("capability", "key", "past"),
    [(80, "fp8", 1), (89, "int8 per-channel", 9), (90, "int4-kivi", 64), (100, "int4", 9)],
)
def test_append(
    capability: int,
    key: str,
    past: int,
    make_case: Any,
    make_codecs: Any,
    compiled: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_append, "_runs_on", lambda device: True)
    case = make_case(key=key, key_dim=128, past=past, dtype=torch.bfloat16)
    codec, _ = make_codecs(case)
    states = torch.zeros((1, 2, past, 128), dtype=torch.bfloat16)
    where = torch.arange(past)[None]
    targets = codec.encode(states, where, past)

    launch = triton_append.launch(codec, states, targets, 0, where, past)

    assert launch is not None
    assert compiled(launch, capability).spills == 0


def test_nothing_runs_on_a_cpu(make_case: Any, make_stored: Any) -> None:
    case = make_case()

    assert triton_kernels.refusal(case.query(), make_stored(case)) == "not on an NVIDIA GPU"


def test_nothing_is_appended_on_a_cpu(make_case: Any, make_codecs: Any) -> None:
    codec, _ = make_codecs(make_case(key="int8"))
    states = torch.ones((1, 2, 3, 16))
    targets = tuple(torch.zeros_like(coded) for coded in codec.encode(states))

    assert not triton_kernels.append(codec, states, targets, 0, None, 0)
    assert not any(bool(target.any()) for target in targets)
