"""How far a range reaches. Imports no torch: the command line checks it before anything heavy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvquant.errors import SchemeError


class Method(str, Enum):
    """How the range is chosen."""

    AMAX = "amax"
    PERCENTILE = "percentile"
    MSE = "mse"


@dataclass(frozen=True)
class RangeMethod:
    """A method with its parameter.

    Attributes:
        method: ``amax`` covers everything seen; ``percentile`` lets the rarest values saturate;
            ``mse`` searches the clip that minimises the squared error of the sketched values.
        percentile: Share of values in percent that a ``percentile`` range covers.

    Raises:
        SchemeError: A percentile outside (50, 100].
    """

    method: Method = Method.AMAX
    percentile: float = 99.99

    def __post_init__(self) -> None:
        """Refuses percentiles that cover less than half."""
        if not 50 < self.percentile <= 100:
            raise SchemeError(f"--percentile must be in (50, 100], not {self.percentile}")

    def __str__(self) -> str:
        """For headers and tables: ``percentile 99.99``."""
        suffix = f" {self.percentile:g}" if self.method is Method.PERCENTILE else ""
        return f"{self.method.value}{suffix}"
