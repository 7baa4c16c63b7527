"""Arithmetic of PTX instructions on the 32 lanes of a warp: NumPy arrays in, new NumPy arrays out.

Every function follows the PTX ISA's text for one instruction. Values are kept by their bits: u2, u4 and u8 are the
unsigned integers of 2, 4 and 8 bytes, f4 is float32, f8 float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

LANES = np.arange(32)
CANONICAL_NAN = 0x7FFF  # of a conversion to bf16 or f16


# ---- sums and products rounded once ---------------------------------------------------------------------------


def odd_sum(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd: a second rounding to a format of half the digits is then the only one."""
    total = a + b
    # Knuth's exact error of the sum.
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = np.isfinite(total) & (error != 0)
    if not inexact.any():
        return total
    bits = total.view(np.uint64)
    even = inexact & ((bits & np.uint64(1)) == 0)
    # An even result moves by one place towards the exact value, which makes it odd.
    outward = (error > 0) == (total > 0)
    moved = np.where(outward, bits + np.uint64(1), bits - np.uint64(1))
    return np.where(even, moved, bits).view(np.float64)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f32: the product of two float32 is exact in float64."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    # Rounding twice is wrong only where the first result lies midway between two float32, or below their range.
    middle = (total.view(np.uint64) & np.uint64(0x1FFFFFFF)) == 0x10000000
    if middle.any() or (np.abs(total) < 2.0**-125).any():
        total = odd_sum(product, addend)
    return total.astype(np.float32)


def fma_down_f32(a: Array, b: Array, c: Array) -> Array:
    """fma.rm.f32: towards minus infinity."""
    total = odd_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    rounded = total.astype(np.float32)
    return np.where(rounded > total, np.nextafter(rounded, np.float32(-np.inf)), rounded)


def f16_bits(values: Array) -> Array:
    """cvt.rn.f16.f32 (or from float64): round to nearest even, subnormal numbers kept, one NaN."""
    bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(CANONICAL_NAN), bits)


def bf16_bits(values: Array) -> Array:
    """cvt.rn.bf16.f32: round to nearest even, one NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(CANONICAL_NAN), rounded.astype(np.uint16))


def bf16_values(bits: Array) -> Array:
    """float64 of bf16 bits, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def f16_values(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float64)


def _odd_f32(values: Array) -> Array:
    """float64 to float32, rounded to odd."""
    near = values.astype(np.float32)
    back = near.astype(np.float64)
    if (back == values).all():
        return near
    wrong = np.isfinite(near) & (back != values) & ((near.view(np.uint32) & np.uint32(1)) == 0)
    outward = np.abs(values) > np.abs(back)
    bits = near.view(np.uint32)
    moved = np.where(outward, bits + np.uint32(1), bits - np.uint32(1))
    return np.where(wrong, moved, bits).view(np.float32)


def halves(words: Array) -> Array:
    """The two 16-bit parts of each word, (32, 2), low part first."""
    return np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2)


def fma_pair(kind: str, a: Array, b: Array, c: Array) -> Array:
    """fma.rn.bf16x2 or .f16x2: each half rounded once."""
    if kind == "bf16x2":
        exact = odd_sum(bf16_values(halves(a)) * bf16_values(halves(b)), bf16_values(halves(c)))
        rounded = bf16_bits(_odd_f32(exact))
    else:
        rounded = f16_bits(odd_sum(f16_values(halves(a)) * f16_values(halves(b)), f16_values(halves(c))))
    return np.ascontiguousarray(rounded).view(np.uint32).reshape(-1)


def ex2(a: Array, flush: bool) -> Array:
    """ex2.approx: the ISA allows 2 units in the last place; this is the correctly rounded value."""
    with np.errstate(all="ignore"):
        result = np.exp2(a.astype(np.float64)).astype(np.float32)
    flushed: Array = np.where(np.abs(result) < 2.0**-126, np.float32(0), result)
    return flushed if flush else result


def saturate(a: Array) -> Array:
    """The modifier .sat of float32: into [0, 1], NaN to 0."""
    result: Array = np.where(np.isnan(a), np.float32(0), np.clip(a, np.float32(0), np.float32(1)))
    return result


# ---- integers -------------------------------------------------------------------------------------------------


def divide(a: Array, b: Array) -> Array:
    """div of integers, towards zero. Division by zero has no defined result: 0 here, refused where it is active."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient: Array = a // safe
    if a.dtype.kind == "u":
        return quotient
    rounded_down = (quotient * safe != a) & ((a < 0) != (safe < 0))
    result: Array = quotient + rounded_down.astype(a.dtype)
    return result


def remainder(a: Array, b: Array) -> Array:
    """rem: the sign of the dividend."""
    result: Array = a - divide(a, b) * b
    return result


def shift_left(a: Array, count: Array) -> Array:
    """shl: counts beyond the width give zero."""
    width = a.dtype.itemsize * 8
    limited = np.minimum(count, np.uint32(width - 1)).astype(a.dtype)
    result: Array = np.where(count >= width, a.dtype.type(0), a << limited)
    return result


def shift_right(a: Array, count: Array) -> Array:
    """shr: counts beyond the width fill with zeros, or with the sign of a signed type."""
    width = a.dtype.itemsize * 8
    limited = np.minimum(count, np.uint32(width - 1)).astype(a.dtype)
    shifted = a >> limited
    result: Array = shifted if a.dtype.kind == "i" else np.where(count >= width, a.dtype.type(0), shifted)
    return result


def multiply_high(a: Array, b: Array) -> Array:
    """mul.hi of 32 bits."""
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Bit i of the result is bit 4 a_i + 2 b_i + c_i of the table."""
    result = np.zeros(32, np.uint32)
    for index in range(8):
        if table >> index & 1:
            term = a if index & 4 else ~a
            term = term & (b if index & 2 else ~b)
            result = result | (term & (c if index & 1 else ~c))
    return result


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32 without a mode: four selectors of bytes 0-3 of a and 4-7 of b; bit 3 repeats the byte's sign."""
    source = np.stack([(a >> np.uint32(8 * i)) & np.uint32(0xFF) for i in range(4)])
    source = np.concatenate([source, [(b >> np.uint32(8 * i)) & np.uint32(0xFF) for i in range(4)]])
    result = np.zeros(32, np.uint32)
    for place in range(4):
        choice = (selector >> np.uint32(4 * place)) & np.uint32(0xF)
        byte = source[choice & np.uint32(7), LANES]
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        byte = np.where(choice & np.uint32(8), sign, byte)
        result = result | (byte.astype(np.uint32) << np.uint32(8 * place))
    return result


def funnel_shift(a: Array, b: Array, count: Array, left: bool, wrap: bool) -> Array:
    """shf: the 64 bits b:a are shifted; .l gives the high word, .r the low one."""
    n = (count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))).astype(np.uint64)
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    if left:
        # Shifted by 32 + n in two steps: a shift by 64 is not defined in C.
        return ((both << n) >> np.uint64(32)).astype(np.uint32)
    return (both >> n).astype(np.uint32)


def bit_field(a: Array, position: Array, length: Array) -> Array:
    """bfe.u32 and .s32: the field's bits, filled with zeros or the field's sign."""
    signed = a.dtype.kind == "i"
    pos = (position & np.uint32(0xFF)).astype(np.int64)
    size = (length & np.uint32(0xFF)).astype(np.int64)
    wide = a.astype(np.int64)
    keep = np.minimum(size, 62)
    field = (wide >> np.minimum(pos, 63)) & ((np.int64(1) << keep) - 1)
    if not signed:
        return field.astype(np.uint32)
    last = np.minimum(pos + size - 1, 31)  # bit that is the sign
    sign = np.where(size == 0, 0, (wide >> np.maximum(last, 0)) & 1)
    return np.where(sign == 1, field | ~((np.int64(1) << keep) - 1), field).astype(np.int32)


# ---- across the warp ------------------------------------------------------------------------------------------


def shuffle_source(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """The lane that each lane of shfl reads, and whether it is in range (else the lane itself)."""
    bval, cval = (b & np.uint32(31)).astype(np.int64), (c & np.uint32(31)).astype(np.int64)
    segment = ((c >> np.uint32(8)) & np.uint32(31)).astype(np.int64)
    highest = (LANES & segment) | (cval & ~segment)
    lowest = LANES & segment
    if mode == "up":
        source = LANES - bval
        valid = source >= highest
    else:
        source = {"down": LANES + bval, "bfly": LANES ^ bval, "idx": lowest | (bval & ~segment)}[mode]
        valid = source <= highest
    return np.where(valid, source, LANES), valid


GROUP, IN_GROUP = LANES // 4, LANES % 4


def _a_places() -> tuple[Array, Array]:
    """Row and column of a0..a7 in each lane, (32, 8): two elements per register, low half first."""
    i = np.arange(8)
    low_row = (i < 2) | ((i >= 4) & (i < 6))
    row = GROUP[:, None] + np.where(low_row, 0, 8)
    column = IN_GROUP[:, None] * 2 + (i & 1) + np.where(i < 4, 0, 8)
    return row, column


def _b_places() -> tuple[Array, Array]:
    i = np.arange(4)
    row = IN_GROUP[:, None] * 2 + (i & 1) + np.where(i < 2, 0, 8)
    return row, np.broadcast_to(GROUP[:, None], (32, 4))


def _c_places() -> tuple[Array, Array]:
    i = np.arange(4)
    row = GROUP[:, None] + np.where(i < 2, 0, 8)
    return row, IN_GROUP[:, None] * 2 + (i & 1)


A_ROW, A_COLUMN = _a_places()
B_ROW, B_COLUMN = _b_places()
C_ROW, C_COLUMN = _c_places()


def mma_m16n8k16(kind: str, a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """mma.m16n8k16.row.col.f32.T.T.f32. The ISA leaves the order of the sum open: here float64, rounded once."""
    values = bf16_values if kind == "bf16" else f16_values
    left, right, add = np.empty((16, 16)), np.empty((16, 8)), np.empty((16, 8))
    left[A_ROW, A_COLUMN] = values(np.stack(a, axis=1).view(np.uint16))
    right[B_ROW, B_COLUMN] = values(np.stack(b, axis=1).view(np.uint16))
    add[C_ROW, C_COLUMN] = np.stack(c, axis=1)
    result = (left @ right + add).astype(np.float32)
    spread = np.ascontiguousarray(result[C_ROW, C_COLUMN].T)
    return [spread[i] for i in range(4)]
