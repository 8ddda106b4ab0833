"""A handle is the tensor that it stands for, to all who do not know better."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

from kvquant.attention.handle import KEY, VALUE, TensorHandle

SHAPE = (2, 3, 5, 4)


class Noted:
    """A reading of random keys and values that counts how often it is asked."""

    backend = "auto"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2)]
        self.asked: list[int] = []

    def rows(self) -> None:
        return None

    def read(self, slot: int) -> torch.Tensor:
        self.asked.append(slot)
        return self.tensors[slot]

    def handle(self, slot: int = KEY) -> TensorHandle:
        held = self.tensors[slot]
        return TensorHandle(self, slot, tuple(held.shape), held.dtype, held.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_it_looks_like_is_known_without_reading(dtype: torch.dtype) -> None:
    reading = Noted(dtype)
    handle, tensor = reading.handle(), reading.tensors[KEY]
    for look in (
        lambda it: it.shape,
        lambda it: it.dtype,
        lambda it: it.device,
        lambda it: it.size(2),
        lambda it: it.shape[-2],
        lambda it: it.dim(),
        lambda it: it.numel(),
        lambda it: it.stride(),
        lambda it: it.is_floating_point(),
        lambda it: it.is_contiguous(),
        lambda it: it.requires_grad,
        lambda it: it.is_cuda,
        lambda it: it.layout,
        lambda it: len(it),
    ):
        assert look(handle) == look(tensor)
    assert isinstance(handle, torch.Tensor)
    assert reading.asked == []


def test_how_it_is_shown() -> None:
    reading = Noted()
    assert repr(reading.handle()) == "TensorHandle(keys [2, 3, 5, 4] torch.float32)"
    assert f"{reading.handle(VALUE)}" == "TensorHandle(values [2, 3, 5, 4] torch.float32)"
    assert reading.asked == []


QUERY = torch.randn(2, 3, 1, 4, generator=torch.Generator().manual_seed(1))

OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda it: it + 1,
    "reversed subtract": lambda it: 1 - it,
    "matmul": lambda it: QUERY @ it.transpose(2, 3),
    "torch.matmul": lambda it: torch.matmul(QUERY, it.mT),
    "cat": lambda it: torch.cat((it, QUERY), dim=2),
    "cat twice": lambda it: torch.cat([it, it], dim=-2),
    "stack": lambda it: torch.stack((it, it)),
    "slice": lambda it: it[:, :, -2:],
    "ellipsis": lambda it: it[..., None, :],
    "index": lambda it: it[torch.tensor([1, 0])],
    "iterate": lambda it: torch.cat(list(it)),
    "to a dtype": lambda it: it.to(torch.bfloat16),
    "to another tensor's": lambda it: it.type_as(QUERY.double()),
    "half": lambda it: it.half(),
    "clone": lambda it: it.clone(),
    "detach": lambda it: it.detach(),
    "data": lambda it: it.data,
    "reshape": lambda it: it.reshape(6, 5, 4),
    "view": lambda it: it.view(6, 5, 4),
    "expand": lambda it: it[:, :, None].expand(2, 3, 2, 5, 4),
    "permute": lambda it: it.permute(2, 0, 1, 3).contiguous(),
    "repeat_interleave": lambda it: it.repeat_interleave(2, 1),
    "repeat_kv": lambda it: repeat_kv(it, 2),
    "einsum": lambda it: torch.einsum("bhqd,bhkd->bhqk", QUERY, it),
    "softmax": lambda it: it.softmax(-1),
    "norm": lambda it: it.norm(),
    "equal": lambda it: torch.equal(it, it.clone()),
    "item": lambda it: it[0, 0, 0, 0].item(),
    "bool": lambda it: bool((it > -100).all()),
    "where": lambda it: torch.where(it > 0, it, 0.0),
    "copy into": lambda it: torch.zeros(SHAPE).copy_(it),
    "assign": lambda it: torch.zeros(SHAPE).index_copy_(0, torch.tensor([1, 0]), it),
    "deepcopy": copy.deepcopy,
    "named argument": lambda it: torch.sum(input=it, dim=2),
    "sdpa": lambda it: scaled_dot_product_attention(QUERY, it, it),
    "sdpa of groups": lambda it: scaled_dot_product_attention(
        QUERY.repeat(1, 2, 1, 1), it, it, enable_gqa=True
    ),
    "empty_like": lambda it: torch.empty_like(it).zero_(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_any_operation_gets_the_tensor(name: str) -> None:
    for slot in (KEY, VALUE):
        reading = Noted()
        found = OPERATIONS[name](reading.handle(slot))
        expected = OPERATIONS[name](reading.tensors[slot])
        assert set(reading.asked) == {slot}
        assert type(found) is type(expected)
        if isinstance(found, torch.Tensor):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        else:
            assert found == expected


def test_keys_and_values_in_one_operation() -> None:
    reading = Noted()
    found = torch.cat((reading.handle(KEY), QUERY, reading.handle(VALUE)), dim=2)
    keys, values = reading.tensors
    assert torch.equal(found, torch.cat((keys, QUERY, values), dim=2))


def test_what_changes_nothing_is_still_a_handle() -> None:
    reading = Noted()
    handle = reading.handle()
    for same in (handle.to(torch.float32), handle.contiguous(), handle.cpu(), handle.float()):
        assert type(same) is TensorHandle
        assert torch.equal(same.materialize(), reading.tensors[KEY])
    assert reading.asked == [KEY] * 4


def test_each_operation_reads_what_is_there_then() -> None:
    reading = Noted()
    handle = reading.handle()
    before = handle + 0
    reading.tensors[KEY] = reading.tensors[KEY] * 2
    assert torch.equal(handle + 0, 2 * before)


def test_numbers_are_never_made_up() -> None:
    """What needs memory and knows no dispatch must fail, rather than read what is not there."""
    handle = Noted().handle()
    for ask in (handle.tolist, handle.numpy):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            ask()


def test_a_gradient_flows_past_it() -> None:
    reading, query = Noted(), QUERY.clone().requires_grad_()
    (query @ reading.handle().mT).sum().backward()
    assert query.grad is not None
    torch.testing.assert_close(query.grad, reading.tensors[KEY].sum(2, keepdim=True))


def test_on_a_device(without_device_guards: Callable[..., Any]) -> None:
    with FakeTensorMode(), without_device_guards():
        reading = Noted()
        reading.tensors = [torch.empty(SHAPE, device="cuda", dtype=torch.bfloat16)] * 2
        handle = reading.handle()
        assert (handle.device.type, handle.dtype) == ("cuda", torch.bfloat16)
        assert handle.is_cuda
        scores = torch.empty(2, 3, 1, 4, device="cuda", dtype=torch.bfloat16) @ handle.mT
        assert (scores.device.type, tuple(scores.shape)) == ("cuda", (2, 3, 1, 5))
