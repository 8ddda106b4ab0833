"""An orthogonal matrix for each head width, applied in a fixed order of operations.

Multiplied by it, a head's few large channels spread over all of them, so that one range per token
fits all (QuaRot, arXiv 2404.00456). The entries are ±1/sqrt(dim) where a Hadamard matrix is known::

    dim       m     core                                 R
    64        64    none                                 Sylvester_64 / 8
    96        8     Hadamard matrix of order 12          (Sylvester_8 ⊗ H_12) / sqrt(96)
    80, 112   4     of order 20, of order 28             likewise
    71, 72    1     orthogonal, seeded                   the core itself

A matrix product of BLAS adds in an order that depends on the number of rows. Here it is additions
and subtractions of whole slices, so that a token's result never depends on its neighbours.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

SEED = 2404
"""Of the matrices for widths without a Hadamard matrix: seed and width alone say which one it is,
so a file that names a rotated scheme need not hold it."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """``R = (Sylvester_butterflies ⊗ core) * factor``, acting on the last axis.

    Attributes:
        dim: Width of a head.
        butterflies: Order of the Sylvester matrix, a power of two; ``dim = butterflies * c``.
        core_values: The core, float32 ``[c, c]``, or None if c is 1.
        factor: 1/sqrt(dim), rounded to float32; 1 where the core itself is orthogonal.
    """

    dim: int
    butterflies: int
    core_values: NDArray[np.float32] | None
    factor: float
    _moved: dict[tuple[str, torch.device], torch.Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def core(self) -> torch.Tensor | None:
        """The core as a tensor on the CPU."""
        # Wrapped anew each time: under FakeTensorMode even this gives a fake, which must not stay.
        return None if self.core_values is None else torch.from_numpy(self.core_values)

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """``R x`` of each row of float32 `states` ``[..., dim]``.

        Butterflies first, with strides c, 2c, 4c, …; then the core within each c consecutive
        channels, input by input; then the factor.
        """
        turned = self._butterflies(states)
        core = self._constant("core", states)
        if core is not None:
            turned = self._product(core, turned)
        return turned * self.factor

    def invert(self, states: torch.Tensor) -> torch.Tensor:
        """``R^T y`` of each row of float32 `states` ``[..., dim]``.

        It is only needed for reading, where the order of operations may differ: on CUDA it is one
        matrix product.
        """
        if states.is_cuda:
            matrix = self._constant("matrix", states)
            assert matrix is not None
            with torch.autocast("cuda", enabled=False):
                return states @ matrix
        turned = self._butterflies(states)
        core = self._constant("core", states)
        if core is not None:
            turned = self._product(core.T, turned)
        return turned * self.factor

    def matrix(self) -> torch.Tensor:
        """R itself, float32 ``[dim, dim]`` on the CPU."""
        return self.apply(torch.eye(self.dim, dtype=torch.float32, device="cpu")).T.contiguous()

    def _butterflies(self, states: torch.Tensor) -> torch.Tensor:
        width = self.dim // self.butterflies
        while width < self.dim:
            pairs = torch.unflatten(states, -1, (-1, 2, width))
            one, other = pairs[..., 0, :], pairs[..., 1, :]
            states = torch.stack((one + other, one - other), dim=-2).flatten(-3)
            width *= 2
        return states

    def _product(self, core: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """``core x`` of each block of channels.

        Products and sums are rounded one by one, inputs ascending.
        """
        blocks = torch.unflatten(states, -1, (self.butterflies, -1))
        total = torch.zeros_like(blocks)
        for index in range(blocks.shape[-1]):
            total = total + blocks[..., index, None] * core[:, index]
        return total.flatten(-2)

    def _constant(self, name: str, states: torch.Tensor) -> torch.Tensor | None:
        """Core or matrix where `states` are; copied to a device once."""
        key = (name, states.device)
        is_real = type(states) is torch.Tensor
        if is_real and key in self._moved:
            return self._moved[key]
        made = self.core if name == "core" else self.matrix()
        if made is None:
            return None
        made = made.to(states.device)
        if is_real:
            self._moved[key] = made
        return made


@functools.cache
def rotation(dim: int) -> Rotation:
    """The rotation of heads of `dim` channels: always the same one.

    A Hadamard matrix if dim is a power of two, or one times 12, 20 or 28; else orthogonal.
    """
    factor = float(np.float32(1 / math.sqrt(dim)))
    if dim & (dim - 1) == 0:
        return Rotation(dim, dim, None, factor)
    for order, core in ((12, _paley_one(11)), (20, _paley_one(19)), (28, _paley_two(13))):
        blocks, rest = divmod(dim, order)
        if rest == 0 and blocks & (blocks - 1) == 0:
            return Rotation(dim, blocks, core, factor)
    return Rotation(dim, 1, _orthogonal(dim), 1.0)


def _paley_one(prime: int) -> NDArray[np.float32]:
    """Hadamard matrix of order prime + 1, for primes of 3 modulo 4 (Paley 1933)."""
    skew = _bordered(prime)
    skew[1:, 0] = -1
    return (np.eye(prime + 1) + skew).astype(np.float32)


def _paley_two(prime: int) -> NDArray[np.float32]:
    """Hadamard matrix of order 2 (prime + 1), for primes of 1 modulo 4 (Paley 1933)."""
    made = np.kron(_bordered(prime), [[1, 1], [1, -1]])
    made += np.kron(np.eye(prime + 1), [[1, -1], [-1, -1]])
    return made.astype(np.float32)


def _bordered(prime: int) -> NDArray[np.float64]:
    """``[[0, 1…], [1…, Q]]`` with Q[i, j] = 1 if i - j is a non-zero square, -1 if it is none."""
    squares = {number * number % prime for number in range(1, prime)}
    sign = np.array([0] + [1 if number in squares else -1 for number in range(1, prime)])
    numbers = np.arange(prime)
    made = np.ones((prime + 1, prime + 1))
    made[0, 0] = 0
    made[1:, 1:] = sign[(numbers[:, None] - numbers) % prime]
    return made


def _orthogonal(dim: int) -> NDArray[np.float32]:
    """QR of a normal matrix, signs fixed by a positive diagonal of R: uniformly distributed."""
    # RandomState: its stream is frozen (NEP 19), unlike those of newer generators and of torch.
    normal = np.random.RandomState(SEED).standard_normal((dim, dim))
    basis, triangle = np.linalg.qr(normal)
    return np.asarray(basis * np.sign(np.diag(triangle)), dtype=np.float32)
