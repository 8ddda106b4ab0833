"""Eight numbers at a time inside Numba functions.

Numba has no vector type, and LLVM vectorizes few of the short loops that a head needs. So here are
a vector of eight numbers and a square of eight vectors, of float32 or int32, with the operations of
the kernels. LLVM maps them to whatever registers the machine has.

Operators work number by number, int32 modulo 2^32: between two vectors or squares, between a square
and a vector, which then takes part in each row, and between int32 and an int. A product and a sum
are rounded one by one; only `fma` may contract them.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.core.extending import register_model
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic

LANES = 8

_NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

plain: Any = njit(**_NO_WRAPPERS)
"""Compiles a function for kernels, which are faster to compile when Python cannot call it."""

inline: Any = njit(forceinline=True, **_NO_WRAPPERS)
"""Likewise, as part of those that call it."""

_INT, _FLOAT = ir.IntType(32), ir.FloatType()


class Block(types.Type):
    """`rows` vectors of eight numbers."""

    def __init__(self, name: str, element: Any, rows: int) -> None:
        self.row = ir.VectorType(element, LANES)
        self.rows = rows
        super().__init__(name)


VECTOR, INT_VECTOR = Block("f32x8", _FLOAT, 1), Block("i32x8", _INT, 1)
SQUARE, INT_SQUARE = Block("f32x8x8", _FLOAT, LANES), Block("i32x8x8", _INT, LANES)
_BLOCKS = (VECTOR, INT_VECTOR, SQUARE, INT_SQUARE)


@register_model(Block)
class _BlockModel(PrimitiveModel):
    def __init__(self, manager: Any, block: Block) -> None:
        super().__init__(manager, block, ir.ArrayType(block.row, block.rows))


# What emits LLVM. The first argument is the builder; rows are LLVM values.


def define(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that emits LLVM one that Numba functions call.

    It gets a builder and the arguments, of these types, and returns the rows of a block as a list,
    or a scalar, or None.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            made = emit(builder, *args)
            if made is None:
                return context.get_dummy_value()
            return _join(builder, made) if isinstance(made, list) else made

        return _intrinsic(lambda context, *_: (signature(result, *arguments), codegen), emit)

    return decorate


def _elementwise(result: Block | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that emits LLVM for a row one of vectors and squares.

    A vector beside a square takes part in each of its rows. The numbers of the result are those of
    the block `result`, or the last argument's.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            count = sig.return_type.rows
            operands = [_spread(builder, *each, count) for each in zip(sig.args, args, strict=True)]
            return _join(builder, [emit(builder, *each) for each in zip(*operands, strict=True)])

        def typed(context: Any, *kinds: Any) -> Any:
            row, rows = (result or kinds[-1]).row, max(kind.rows for kind in kinds)
            (made,) = (block for block in _BLOCKS if block.row == row and block.rows == rows)
            return signature(made, *kinds), codegen

        return _intrinsic(typed, emit)

    return decorate


def _intrinsic(typed: Any, emit: Callable[..., Any]) -> Any:
    """Numba's intrinsic `typed` with the name, text and arguments of `emit`."""
    typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
    typed.__signature__ = inspect.signature(emit)
    return intrinsic(typed)


def rows_of(builder: Any, block: Any) -> list[Any]:
    """The rows of a vector or square."""
    return [builder.extract_value(block, index) for index in range(block.type.count)]


def repeat(builder: Any, number: Any) -> Any:
    """A row that holds a scalar eight times."""
    lanes = ir.VectorType(number.type, LANES)
    first = builder.insert_element(ir.Constant(lanes, ir.Undefined), number, _INT(0))
    return shuffle(builder, first, first, [0] * LANES)


def shuffle(builder: Any, one: Any, other: Any, lanes: Sequence[int]) -> Any:
    """A row of these lanes of two rows, those of the second counted on."""
    mask = ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes))
    return builder.shuffle_vector(one, other, mask)


def _join(builder: Any, rows: Sequence[Any]) -> Any:
    made = ir.Constant(ir.ArrayType(rows[0].type, len(rows)), ir.Undefined)
    for index, row in enumerate(rows):
        made = builder.insert_value(made, row, index)
    return made


def _spread(builder: Any, kind: Any, value: Any, count: int) -> list[Any]:
    """`count` rows: a block's own, or the same vector, or an int in all lanes, in each."""
    if not isinstance(kind, Block):
        return [repeat(builder, builder.trunc(value, _INT))] * count
    rows = rows_of(builder, value)
    return rows if len(rows) == count else rows * count


# Operators


def _operator(symbol: Any, instruction: str, left: Block, right: Any) -> None:
    """Makes ``left symbol right`` an LLVM instruction for each row."""

    @infer_global(symbol)
    class _Template(ConcreteTemplate):
        cases = [signature(left, left, right)]  # noqa: RUF012

    @lower_builtin(symbol, left, right)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pairs = zip(sig.args, args, strict=True)
        one, other = (_spread(builder, *pair, left.rows) for pair in pairs)
        emit = getattr(builder, instruction)
        return _join(builder, [emit(*pair) for pair in zip(one, other, strict=True)])


def _register_operators() -> None:
    floats = {"add": "fadd", "sub": "fsub", "mul": "fmul", "truediv": "fdiv"}
    for symbol, instruction in floats.items():
        for pair in ((VECTOR, VECTOR), (SQUARE, SQUARE), (SQUARE, VECTOR)):
            _operator(getattr(operator, symbol), instruction, *pair)
    ints = {"add": "add", "sub": "sub", "and_": "and_", "or_": "or_", "lshift": "shl"}
    for symbol, instruction in {**ints, "rshift": "lshr"}.items():
        for left in (INT_VECTOR, INT_SQUARE):
            for right in (left, types.int64):
                _operator(getattr(operator, symbol), instruction, left, right)


_register_operators()


# Functions of numbers


@define(VECTOR, types.float32)
def splat(builder: Any, number: Any) -> Any:
    """The same number eight times."""
    return [repeat(builder, number)]


@define(INT_VECTOR, types.int64)
def splat_int(builder: Any, number: Any) -> Any:
    """The same int eight times."""
    return [repeat(builder, builder.trunc(number, _INT))]


def _call(builder: Any, name: str, *operands: Any) -> Any:
    kind = ir.FunctionType(operands[0].type, [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v8f32")
    return builder.call(function, operands)


def multiply_add(builder: Any, one: Any, other: Any, addend: Any) -> Any:
    """What `fma` emits for a row."""
    return _call(builder, "fmuladd", one, other, addend)


@_elementwise()
def fma(builder: Any, one: Any, other: Any, addend: Any) -> Any:
    """``one * other + addend``, rounded once where the machine is faster that way."""
    return multiply_add(builder, one, other, addend)


@_elementwise()
def nearest(builder: Any, numbers: Any) -> Any:
    """The nearest whole number, halves to even."""
    return _call(builder, "rint", numbers)


@_elementwise()
def maximum(builder: Any, one: Any, other: Any) -> Any:
    """The larger number; `other` where one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


@_elementwise()
def minimum(builder: Any, one: Any, other: Any) -> Any:
    """The smaller number; `other` where one of them is NaN."""
    return builder.select(builder.fcmp_ordered("<", one, other), one, other)


@_elementwise()
def where_less(builder: Any, one: Any, other: Any, less: Any, otherwise: Any) -> Any:
    """`less` where ``one < other`` (floats, or signed ints), else `otherwise`."""
    compare = builder.fcmp_ordered if one.type.element == _FLOAT else builder.icmp_signed
    return builder.select(compare("<", one, other), less, otherwise)


@_elementwise(VECTOR)
def to_float(builder: Any, numbers: Any) -> Any:
    """Signed ints as floats."""
    return builder.sitofp(numbers, VECTOR.row)


@_elementwise(INT_VECTOR)
def to_int(builder: Any, numbers: Any) -> Any:
    """Whole floats as ints."""
    return builder.fptosi(numbers, INT_VECTOR.row)


@_elementwise(VECTOR)
def from_bits(builder: Any, bits: Any) -> Any:
    """Floats with these bits."""
    return builder.bitcast(bits, VECTOR.row)


@_elementwise(INT_VECTOR)
def to_bits(builder: Any, numbers: Any) -> Any:
    """Bits of floats."""
    return builder.bitcast(numbers, INT_VECTOR.row)


@define(types.float32, VECTOR)
def total(builder: Any, numbers: Any) -> Any:
    """The sum of the eight numbers, added in pairs."""
    return _fold(builder, numbers, builder.fadd)


@define(types.float32, VECTOR)
def largest(builder: Any, numbers: Any) -> Any:
    """The largest of the eight numbers."""

    def larger(one: Any, other: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", one, other), one, other)

    return _fold(builder, numbers, larger)


def _fold(builder: Any, numbers: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """One number of eight: halves are combined until one is left."""
    (row,) = rows_of(builder, numbers)
    for distance in (4, 2, 1):
        lanes = [(lane + distance) % LANES for lane in range(LANES)]
        row = emit(row, shuffle(builder, row, row, lanes))
    return builder.extract_element(row, _INT(0))


# Functions of squares


def _combine(rows: list[Any], distance: int, emit: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Puts ``emit(a, b)`` in place of all rows a and b that are `distance` apart."""
    for index in range(LANES):
        if not index & distance:
            rows[index], rows[index + distance] = emit(rows[index], rows[index + distance])


@define(SQUARE, SQUARE)
def butterfly(builder: Any, square: Any) -> Any:
    """Sums and differences of rows 1 apart, then 2, then 4: the Sylvester matrix of order 8."""
    rows = rows_of(builder, square)
    for distance in (1, 2, 4):
        _combine(rows, distance, lambda a, b: (builder.fadd(a, b), builder.fsub(a, b)))
    return rows


_MASKS = {
    1: ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]),
    2: ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
    4: ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
}
"""Two rows so far apart exchange these numbers; but at last within the halves, as AVX likes it."""


@define(SQUARE, SQUARE)
def transpose(builder: Any, square: Any) -> Any:
    """Rows become columns."""
    rows = rows_of(builder, square)
    for distance, masks in _MASKS.items():

        def exchange(one: Any, other: Any, masks: Any = masks) -> Any:
            return tuple(shuffle(builder, one, other, mask) for mask in masks)

        _combine(rows, distance, exchange)
    return [rows[index] for index in (0, 2, 1, 3, 4, 6, 5, 7)]


@define(VECTOR, SQUARE)
def lowest(builder: Any, square: Any) -> Any:
    """The smallest number of each column."""
    return _reduce(builder, square, "<")


@define(VECTOR, SQUARE)
def highest(builder: Any, square: Any) -> Any:
    """The largest number of each column."""
    return _reduce(builder, square, ">")


@define(VECTOR, SQUARE)
def nan_if_any(builder: Any, square: Any) -> Any:
    """NaN for each column that has one, else 0."""
    rows = rows_of(builder, square)
    pairs = zip(rows[::2], rows[1::2], strict=True)
    one, *others = (builder.fcmp_unordered("uno", *pair) for pair in pairs)
    found = functools.reduce(builder.or_, others, one)
    lanes = [ir.Constant(VECTOR.row, [value] * LANES) for value in (float("nan"), 0.0)]
    return [builder.select(found, *lanes)]


@define(VECTOR, SQUARE)
def row_sums(builder: Any, square: Any) -> Any:
    """The sum of each row, added in pairs."""
    rows = rows_of(builder, square)
    for masks in _MASKS.values():
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [
            builder.fadd(*(shuffle(builder, one, other, mask) for mask in masks))
            for one, other in pairs
        ]
    return rows


@define(SQUARE)
def zeros(builder: Any) -> Any:
    """Zeros."""
    return [ir.Constant(VECTOR.row, None)] * LANES


def _reduce(builder: Any, square: Any, order: str) -> list[Any]:
    best, *rest = rows_of(builder, square)
    for row in rest:
        best = builder.select(builder.fcmp_ordered(order, row, best), row, best)
    return [best]
