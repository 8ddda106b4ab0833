from __future__ import annotations

import pytest

from kvquant.capacity.hardware import find_gpu, gpus
from kvquant.capacity.memory import choose_memory
from kvquant.errors import InputError


@pytest.mark.parametrize(
    ("name", "memory_gb", "bandwidth_tbs"),
    [
        ("a100-40gb", 40, 1.555),
        ("a100-80gb", 80, 2.039),
        ("h100-80gb", 80, 3.35),
        ("h200", 141, 4.8),
        ("b200", 180, 8.0),
        ("l4", 24, 0.3),
        ("l40s", 48, 0.864),
        ("rtx-4090", 24, 1.008),
        ("rtx-5090", 32, 1.792),
        ("mi300x", 192, 5.3),
    ],
)
def test_data_sheets(name: str, memory_gb: float, bandwidth_tbs: float) -> None:
    gpu = find_gpu(name)
    assert (gpu.memory_gb, gpu.bandwidth_tbs) == (memory_gb, bandwidth_tbs)


def test_every_figure_has_a_source() -> None:
    assert all(gpu.source for gpu in gpus())
    assert len({gpu.name for gpu in gpus()}) == len(gpus())


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H100-80GB", "h100-80gb"),
        ("h100", "h100-80gb"),
        ("RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
    ],
)
def test_names_as_people_type_them(typed: str, name: str) -> None:
    assert find_gpu(typed).name == name


def test_unknown_gpus() -> None:
    with pytest.raises(InputError, match="unknown GPU 'h20': did you mean h200 or") as error:
        find_gpu("h20")
    assert "--memory-gb with --bandwidth-tbs" in str(error.value)
    with pytest.raises(InputError, match="unknown GPU 'zzz'; --list-gpus shows all"):
        find_gpu("zzz")


def test_the_table_is_overridden() -> None:
    memory = choose_memory("h100-80gb", 85.5, None, 10)
    assert memory is not None
    assert (memory.nbytes, memory.overhead_nbytes) == (85_500_000_000, 10_000_000_000)
    assert memory.bandwidth == 3.35e12
    assert memory.source.endswith("; memory as given")
    other = choose_memory("h100-80gb", None, 3.0, None)
    assert other is not None
    assert (other.nbytes, other.bandwidth) == (80_000_000_000, 3e12)
    assert other.source.endswith("; bandwidth as given")


def test_any_other_gpu() -> None:
    memory = choose_memory(None, 20, None, 0)
    assert memory is not None
    assert (memory.nbytes, memory.overhead_nbytes, memory.bandwidth) == (20 * 10**9, 0, None)


def test_no_gpu() -> None:
    assert choose_memory(None, None, None, None) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, None, 3.0, None), "go with --gpu or --memory-gb"),
        ((None, None, None, 3.0), "go with --gpu or --memory-gb"),
        (("l4", None, None, 24.0), "--overhead-gb 24 leaves nothing of 24 GB"),
    ],
)
def test_options_that_make_no_sense(options: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_memory(*options)  # type: ignore[arg-type]


def test_what_is_left_beside_weights() -> None:
    memory = choose_memory("l4", None, None, 4)
    assert memory is not None
    assert memory.free_nbytes(15 * 10**9) == 5 * 10**9
    assert memory.free_nbytes(20 * 10**9) == 0
    with pytest.raises(InputError, match=r"20.10 GB of weights and 4.00 GB .* 24.00 GB of l4: use"):
        memory.free_nbytes(20_100_000_000)
