"""The PTX interpreter itself: small hand-written programs whose results follow from the PTX ISA by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tools.ptx.parse import PtxError, parse
from tools.ptx.tests.snippets import execute, lanes, load, store

LANE = np.arange(32)


def binary(opcode: str, a: object, b: object) -> np.ndarray:
    return execute(load(2) + f"{opcode} %r2, %r0, %r1;" + store("%r2"), lanes(a, b))[:, 0]


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


# ---- integers and bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opcode", "a", "b", "expected"),
    [
        ("add.s32", -1, 3, 2),
        ("sub.u32", 1, 2, 0xFFFFFFFF),
        ("mul.lo.s32", -7, 3, -21),
        ("mul.hi.u32", 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFE),
        ("mul.hi.s32", -1, 2, -1),
        ("div.s32", -7, 2, -3),
        ("div.u32", 0xFFFFFFFE, 2, 0x7FFFFFFF),
        ("rem.s32", -7, 2, -1),
        ("rem.s32", 7, -2, 1),
        ("min.s32", -1, 1, -1),
        ("min.u32", 0xFFFFFFFF, 1, 1),
        ("max.s32", -1, 1, 1),
        ("shl.b32", 1, 31, 0x80000000),
        ("shl.b32", 1, 32, 0),
        ("shr.u32", 0x80000000, 31, 1),
        ("shr.u32", 0x80000000, 32, 0),
        ("shr.s32", -8, 1, -4),
        ("shr.s32", -8, 40, -1),
        ("and.b32", 0xF0F0, 0xFF00, 0xF000),
        ("or.b32", 0xF0F0, 0xFF00, 0xFFF0),
        ("xor.b32", 0xF0F0, 0xFF00, 0x0FF0),
    ],
)
def test_integers(opcode: str, a: int, b: int, expected: int) -> None:
    np.testing.assert_array_equal(binary(opcode, a, b), np.uint32(expected & 0xFFFFFFFF))


def test_wide_products_keep_the_sign() -> None:
    body = load(3) + "mul.wide.s32 %d6, %r0, %r1; mul.wide.u32 %d7, %r0, %r1; cvt.s64.s32 %d8, %r2;"
    body += "mad.wide.s32 %d9, %r0, %r1, %d8; mad.lo.s32 %r3, %r0, %r1, %r2;"
    body += "st.global.v2.u64 [%d4], {%d6, %d7}; st.global.u64 [%d4+16], %d9; st.global.u32 [%d4+24], %r3;"
    out = execute(body, lanes(-2, 3, 5))
    wide = out[:, :6].copy().view(np.int64)
    np.testing.assert_array_equal(wide[0], [-6, (2**32 - 2) * 3, -1])
    assert (out[:, 6].view(np.int32) == -1).all()


@pytest.mark.parametrize("table", [0x80, 0x96, 0xE8, 0xCA, 0xEA, 0xF8, 0x1B])
def test_lop3(table: int) -> None:
    """Every combination of bits, against the ISA's definition: the table is F(0xF0, 0xCC, 0xAA)."""
    body = load(3) + f"lop3.b32 %r3, %r0, %r1, %r2, {table:#x};" + store("%r3")
    assert int(execute(body, lanes(0xF0, 0xCC, 0xAA))[0, 0]) & 0xFF == table
    a, b, c = np.random.default_rng(table).integers(0, 1 << 32, (3, 32))
    known = {0x80: a & b & c, 0x96: a ^ b ^ c, 0xE8: (a & b) | (a & c) | (b & c), 0xCA: (a & b) | (~a & c)}
    known |= {0xEA: (a & b) | c, 0xF8: a | (b & c)}
    if table in known:
        np.testing.assert_array_equal(execute(body, lanes(a, b, c))[:, 0], known[table].astype(np.uint32))


def test_bytes_fields_and_funnels() -> None:
    body = load(2) + "prmt.b32 %r2, %r0, %r1, 0x5410; prmt.b32 %r3, %r0, %r1, 0x000C;"
    body += "shf.l.wrap.b32 %r4, %r0, %r1, 8; shf.r.clamp.b32 %r5, %r0, %r1, 40; shf.r.wrap.b32 %r6, %r0, %r1, 40;"
    body += "bfe.u32 %r7, %r1, 28, 4; bfe.s32 %r8, %r1, 28, 4; bfe.s32 %r9, %r1, 4, 0;"
    out = execute(body + store(*(f"%r{i}" for i in range(2, 10))), lanes(0x83828180, 0x97969594))[0]
    # 0xC: byte 4 (0x94) with its sign repeated; 0x0: byte 0.
    expected = [0x95948180, 0x808080FF, 0x96959483, 0x97969594, 0x94838281, 9, 0xFFFFFFF9, 0]
    np.testing.assert_array_equal(out, np.uint32(expected))


def test_halves_are_packed_low_first() -> None:
    body = (
        load(1)
        + "mov.b32 {%h1, %h2}, %r0; mov.b32 %r2, {%h2, %h1}; cvt.u32.u16 %r3, %h1; cvt.u16.u32 %h3, %r0;"
    )
    body += "cvt.s32.s16 %r4, %h2; mov.b64 %d6, {%r0, %r2}; mov.b64 {%r5, %r6}, %d6;"
    out = execute(body + store("%r2", "%r3", "%r4", "%r5", "%r6"), lanes(0x80011234))[0]
    np.testing.assert_array_equal(
        out[:5], np.uint32([0x12348001, 0x1234, 0xFFFF8001, 0x80011234, 0x12348001])
    )


# ---- floating point: every result is rounded once ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "a", "b", "c", "expected"),
    [
        # 1 + 2^-3 + 2^-8 lies midway between two bf16; 2^-40 decides, and is lost by a float32 in between.
        ("bf16x2", 0x3F88, 0x3F88, 0x2B80, 0x3F91),
        ("bf16x2", 0x3F88, 0x3F88, 0x0000, 0x3F90),
        ("bf16x2", 0x3F88, 0x3F88, 0xAB80, 0x3F90),
        # A product rounded before the sum would give 0x3F82.
        ("bf16x2", 0x3F81, 0x3F81, 0x3B80, 0x3F83),
        ("bf16x2", 0x4307, 0x3F80, 0xC308, 0xBF80),  # 135 - 136: a code of 7 is -1
        ("bf16x2", 0x000F, 0x7F00, 0x0000, 0x3E70),  # subnormal: 15 * 2^-133 * 2^127
        ("bf16x2", 0x0001, 0x3F00, 0x0000, 0x0000),  # half of the smallest: a tie, to even
        ("bf16x2", 0x0003, 0x3F00, 0x0000, 0x0002),
        ("f16x2", 0x000F, 0x7800, 0x0000, 0x2780),
        ("f16x2", 0x3C20, 0x3C10, 0x0001, 0x3C31),
        ("f16x2", 0x3C20, 0x3C10, 0x0000, 0x3C30),
        ("f16x2", 0x64F0, 0x2C00, 0xD480, 0x4700),  # (1024 + 16 * 15) / 16 - 72 = 7
        ("f16x2", 0x7BFF, 0x4000, 0x0000, 0x7C00),
    ],
)
def test_fma_of_pairs(kind: str, a: int, b: int, c: int, expected: int) -> None:
    one = 0x3F80 if kind == "bf16x2" else 0x3C00
    body = load(3) + f"fma.rn.{kind} %r3, %r0, %r1, %r2;" + store("%r3")
    out = execute(body, lanes(a << 16 | one, b << 16 | one, c << 16))[:, 0]
    np.testing.assert_array_equal(out, np.uint32(expected << 16 | one))


def test_fma_and_rounding_modes() -> None:
    a = 1 + 2.0**-12  # a * a = 1 + 2^-11 + 2^-24, midway between two float32
    body = "".join(f"ld.global.f32 %f{i}, [%d3+{4 * i}];" for i in range(4))
    body += "fma.rn.f32 %f5, %f0, %f0, %f1; fma.rn.f32 %f6, %f0, %f0, %f2; fma.rm.f32 %f7, %f0, %f0, %f1;"
    body += "fma.rm.f32 %f8, %f3, %f0, %f2; add.f32 %f9, %f0, %f1; fma.rn.f32 %f10, %f1, %f1, %f2;"
    for i in range(6):
        body += f"st.global.f32 [%d4+{4 * i}], %f{5 + i};"
    given = np.broadcast_to(np.float32([a, 2.0**-80, 0, -a]), (32, 4))
    out = execute(body, given)[0, :6].view(np.float32)
    tie = 1 + 2.0**-11
    np.testing.assert_array_equal(out, np.float32([tie + 2.0**-23, tie, tie, -tie - 2.0**-23, a, 0]))


def test_conversions() -> None:
    cases = {  # float: bf16, f16
        1 + 2.0**-8: (0x3F80, 0x3C04),
        1 + 3 * 2.0**-8: (0x3F82, 0x3C0C),
        1 + 2.0**-8 + 2.0**-20: (0x3F81, 0x3C04),
        -65520.0: (0xC780, 0xFC00),
        65519.0: (0x4780, 0x7BFF),
        2.0**-25: (0x3300, 0x0000),
        1.5 * 2.0**-25: (0x3340, 0x0001),
        3.4e38: (0x7F80, 0x7C00),
        float("nan"): (0x7FFF, 0x7FFF),
        float("-inf"): (0xFF80, 0xFC00),
    }
    given = np.zeros((32, 1), np.float32)
    given[: len(cases), 0] = list(cases)
    body = (
        "ld.global.f32 %f1, [%d3]; cvt.rn.bf16.f32 %h1, %f1; cvt.rn.f16.f32 %h2, %f1; cvt.f32.f16 %f2, %h2;"
    )
    body += "cvt.rn.bf16x2.f32 %r5, %f1, 0f3F800000; cvt.sat.f32.f32 %f4, %f1;"
    body += "cvt.u32.u16 %r1, %h1; cvt.u32.u16 %r2, %h2; mov.b32 %r3, %f2; mov.b32 %r4, %f4;"
    out = execute(body + store("%r1", "%r2", "%r3", "%r5", "%r4"), given)[: len(cases)]
    np.testing.assert_array_equal(out[:, :2], np.uint32(list(cases.values())))
    back = out[:, 1].astype(np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out[:, 2].view(np.float32), back)
    np.testing.assert_array_equal(out[:, 3], out[:, 0] << 16 | 0x3F80)
    np.testing.assert_array_equal(out[:, 4].view(np.float32), np.nan_to_num(given[:10, 0]).clip(0, 1))


def test_floats_divide_and_compare() -> None:
    body = "ld.global.f32 %f1, [%d3]; ld.global.f32 %f2, [%d3+4]; ld.global.s32 %r9, [%d3+8];"
    body += "div.rn.f32 %f3, %f1, %f2; sqrt.rn.f32 %f4, %f1; ex2.approx.ftz.f32 %f5, %f1; neg.f32 %f6, %f1;"
    body += "cvt.rn.f32.s32 %f7, %r9; mul.f32 %f8, %f1, %f2; sub.f32 %f9, %f1, %f2;"
    for i in range(7):
        body += f"st.global.f32 [%d4+{4 * i}], %f{3 + i};"
    given = np.broadcast_to(np.float32([2.0, 3.0, np.int32(-5).view(np.float32)]), (32, 3))
    out = execute(body, given)[0, :7].view(np.float32)
    two, three = np.float32(2), np.float32(3)
    np.testing.assert_array_equal(out, [two / three, np.sqrt(two), 4, -2, -5, 6, -1])
    compare = "ld.global.f32 %f1, [%d3]; mov.f32 %f2, 0f3F800000;\n"
    for i, name in enumerate(("lt", "ge", "eq", "ne", "neu", "gtu")):
        compare += f"setp.{name}.f32 %p1, %f1, %f2; selp.b32 %r{i}, 1, 0, %p1;\n"
    out = execute(compare + store(*(f"%r{i}" for i in range(6))), np.full((32, 1), np.nan, np.float32))
    np.testing.assert_array_equal(out[0, :6], [0, 0, 0, 0, 1, 1])


# ---- predicates and divergence ----------------------------------------------------------------------------------


def test_guards_and_predicates() -> None:
    body = "setp.lt.s32 %p1, %r60, 8; setp.eq.s32 %p2, %r60, 3; setp.ge.and.u32 %p3, %r60, 2, %p1; mov.u32 %r1, 7;"
    body += "and.pred %p4, %p1, %p2; or.pred %p5, %p2, %p3; not.pred %p6, %p1; xor.pred %p7, %p1, %p2;"
    body += "@%p1 mov.u32 %r1, 8; @!%p1 add.s32 %r1, %r1, %r60; @%p2 st.global.u32 [%d4+4], %r1;"
    body += (
        "selp.b32 %r2, 1, 0, %p3; selp.b32 %r3, 1, 0, %p5; selp.b32 %r4, 1, 0, %p6; selp.b32 %r5, 1, 0, %p7;"
    )
    body += "st.global.u32 [%d4], %r1; st.global.v4.u32 [%d4+16], {%r2, %r3, %r4, %r5};"
    out = execute(body)
    np.testing.assert_array_equal(out[:, 0], np.where(LANE < 8, 8, 7 + LANE))
    np.testing.assert_array_equal(out[:, 1], np.where(LANE == 3, 8, 0xEEEEEEEE))
    np.testing.assert_array_equal(out[:, 4], (LANE >= 2) & (LANE < 8))
    np.testing.assert_array_equal(out[:, 5], (LANE >= 2) & (LANE < 8))
    np.testing.assert_array_equal(out[:, 6], LANE >= 8)
    np.testing.assert_array_equal(out[:, 7], (LANE < 8) & (LANE != 3))


LOOPS = """
    mov.u32 %r1, 0; mov.u32 %r2, 0;
  outer:
    setp.ge.s32 %p1, %r1, %r60;          // lane times ...
    @%p1 bra done;
    and.b32 %r3, %r1, 1;
    setp.eq.s32 %p2, %r3, 0;
    @%p2 bra even;
    add.s32 %r2, %r2, 100;               // ... 100 in odd turns, 1 in even ones
    bra.uni joined;
  even:
    add.s32 %r2, %r2, 1;
  joined:
    add.s32 %r1, %r1, 1;
    bra outer;
  done:
    bar.warp.sync 0xffffffff;            // all lanes meet again
"""


@pytest.mark.parametrize("seed", range(4))
def test_lanes_leave_a_loop_at_different_times(seed: int) -> None:
    out = execute(LOOPS + store("%r2"), seed=seed)
    np.testing.assert_array_equal(out[:, 0], (LANE + 1) // 2 + 100 * (LANE // 2))


def test_lanes_that_return_are_gone() -> None:
    out = execute("setp.gt.s32 %p1, %r60, 4; @%p1 ret;" + store("%r60"))
    np.testing.assert_array_equal(out[:, 0], np.where(LANE > 4, 0xEEEEEEEE, LANE))


@pytest.mark.parametrize(
    "instruction",
    [
        "bar.warp.sync 0xffffffff;",
        "shfl.sync.idx.b32 %r2, %r60, 0, 31, 0xffffffff;",
        "bar.sync 0;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r63];",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r60,%r60,%r60,%r60}, {%r60,%r60}, "
        "{%f0,%f0,%f0,%f0};",
    ],
)
def test_a_part_of_a_warp_is_refused(instruction: str) -> None:
    body = f"mov.f32 %f0, 0f00000000; setp.lt.s32 %p1, %r60, 16; @%p1 bra over;\n{instruction}\nover:\n"
    with pytest.raises(PtxError, match=r"(without|by) lanes .*" + instruction.split(".")[0]):
        execute(body)


def test_a_part_of_a_warp_may_shuffle_by_its_own_mask() -> None:
    body = "mov.u32 %r2, 99; setp.lt.s32 %p1, %r60, 16; @%p1 bra over;\n"
    body += "shfl.sync.bfly.b32 %r2, %r60, 1, 31, 0xffff0000;\nover:\n"
    np.testing.assert_array_equal(execute(body + store("%r2"))[:, 0], np.where(LANE < 16, 99, LANE ^ 1))


# ---- across the warp --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "b", "c", "source", "valid"),
    [
        ("bfly", 16, 0x1F, LANE ^ 16, LANE >= 0),
        ("idx", 5, 0x1F, np.full(32, 5), LANE >= 0),
        ("idx", 5, 0x181F, LANE // 8 * 8 + 5, LANE >= 0),  # within groups of 8
        ("up", 3, 0x0, np.where(LANE < 3, LANE, LANE - 3), LANE >= 3),
        ("down", 3, 0x1F, np.where(LANE > 28, LANE, LANE + 3), LANE <= 28),
        ("down", 3, 0x181F, np.where(LANE % 8 > 4, LANE, LANE + 3), LANE % 8 <= 4),
        (
            "bfly",
            1,
            0x2,
            np.where(LANE > 1, np.where(LANE == 3, 2, LANE), LANE ^ 1),
            (LANE < 2) | (LANE == 3),
        ),
    ],
)
def test_shuffles(mode: str, b: int, c: int, source: np.ndarray, valid: np.ndarray) -> None:
    body = f"shfl.sync.{mode}.b32 %r1|%p1, %r60, {b}, {c}, 0xffffffff; selp.b32 %r2, 1, 0, %p1;"
    out = execute(body + store("%r1", "%r2"))
    np.testing.assert_array_equal(out[:, 0], source)
    np.testing.assert_array_equal(out[:, 1], valid)


def fragment_a(matrix: np.ndarray) -> np.ndarray:
    """The ISA's figure read from the matrix's side: which thread's which element holds row r, column c."""
    out = np.zeros((32, 8), matrix.dtype)
    for r in range(16):
        for c in range(16):
            out[(r % 8) * 4 + (c % 8) // 2, c % 2 + 2 * (r // 8) + 4 * (c // 8)] = matrix[r, c]
    return out


def fragment_b(matrix: np.ndarray) -> np.ndarray:
    out = np.zeros((32, 4), matrix.dtype)
    for r in range(16):
        for c in range(8):
            out[c * 4 + (r % 8) // 2, r % 2 + 2 * (r // 8)] = matrix[r, c]
    return out


def matrix_c(fragment: np.ndarray) -> np.ndarray:
    out = np.zeros((16, 8), fragment.dtype)
    for r in range(16):
        for c in range(8):
            out[r, c] = fragment[(r % 8) * 4 + c // 2, c % 2 + 2 * (r // 8)]
    return out


def multiply(kind: str, a: np.ndarray, b: np.ndarray, c: float = 0.0) -> np.ndarray:
    """a (16, 16) b (16, 8) + c by one mma; values that 8 bits hold."""

    def encode(m: np.ndarray) -> np.ndarray:
        if kind == "f16":
            return m.astype(np.float16).view(np.uint16)
        return (m.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    body = load(6) + f"mov.b32 %f0, {bits(c):#x};"
    body += (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f1,%f2,%f3,%f4}}, {{%r0,%r1,%r2,%r3}}, "
    )
    body += "{%r4,%r5}, {%f0,%f0,%f0,%f0}; st.global.v4.f32 [%d4], {%f1,%f2,%f3,%f4};"
    words = np.concatenate([fragment_a(encode(a)), fragment_b(encode(b))], axis=1)
    return matrix_c(execute(body, words)[:, :4].copy().view(np.float32))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_every_place_of_a_fragment(kind: str) -> None:
    numbered = np.arange(1, 129).reshape(16, 8)
    np.testing.assert_array_equal(multiply(kind, np.eye(16), numbered), numbered)
    turned = np.roll(np.eye(16), 3, axis=1)  # row r picks row r + 3
    np.testing.assert_array_equal(multiply(kind, turned, numbered), np.roll(numbered, -3, axis=0))
    left = np.arange(256).reshape(16, 16) - 128
    for columns in (slice(0, 8), slice(8, 16)):
        np.testing.assert_array_equal(
            multiply(kind, left, np.eye(16)[:, columns], 0.5), left[:, columns] + 0.5
        )


def test_products_of_matrices() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-100, 100, (16, 16)), rng.integers(-100, 100, (16, 8))
    for kind in ("bf16", "f16"):
        np.testing.assert_array_equal(multiply(kind, a, b, 3.0), a @ b + 3)


def test_ldmatrix() -> None:
    """Thread i writes row i; lane l asks for row (5 l) % 32 and gets words l % 4 of the rows of lanes 8 j + l / 4."""
    body = load(4) + "st.shared.v4.u32 [%r59], {%r0,%r1,%r2,%r3}; bar.warp.sync 0xffffffff;"
    body += "mul.lo.s32 %r4, %r60, 5; and.b32 %r4, %r4, 31; shl.b32 %r4, %r4, 4; add.s32 %r4, %r4, %r63;"
    body += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5,%r6,%r7,%r8}, [%r4];"
    rows = np.arange(128, dtype=np.uint32).reshape(32, 4) + 1000
    out = execute(body + store("%r5", "%r6", "%r7", "%r8"), rows)
    for j in range(4):
        asked = (5 * (8 * j + LANE // 4)) % 32
        np.testing.assert_array_equal(out[:, j], rows[asked, LANE % 4])


# ---- the language -----------------------------------------------------------------------------------------------


def test_names_of_inner_scopes_are_their_own() -> None:
    body = "mov.u32 %r1, 0; mov.u32 %r2, 3;\n"
    for _ in range(2):
        body += "{ .reg .pred q; .reg .u32 i; mov.u32 i, 0; again: add.u32 %r1, %r1, 1; add.u32 i, i, 1;"
        body += " setp.lt.u32 q, i, %r2; @q bra again; }\n"
    np.testing.assert_array_equal(execute(body + store("%r1"))[:, 0], 6)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("popc.b32 %r1, %r60;", "popc.*unknown instruction"),
        ("add.sat.s32 %r1, %r60, 1;", "unknown modifier .sat"),
        ("ld.global.nc.u32 %r1, [%d3];", "unknown modifier .nc"),
        ("fma.rn.relu.bf16x2 %r1, %r60, %r60, %r60;", "unknown modifier .relu"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r1}, {%r1}, {%f1,%f2,%f3,%f4};",
         "m16n8k16 is needed"),
        ("add.s32 %r1, %d1, 1;", "%d1.*where .s32 is needed"),
        ("add.s32 %r1, %r99, 1;", "'%r99' is not understood"),
        ("setp.eq.s32 %p1|%p2, %r60, 1;", "second result"),
        ("cvt.rni.s32.f32 %r1, %f1;", "unknown conversion"),
        ("bar.sync 1;", "only barrier 0"),
        (".loc 1 2 3;", "directive"),
        ("call f;", "unknown instruction"),
        ("bra nowhere;", "no such label"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named(statement: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        execute(statement)


def test_what_stands_outside_of_kernels_is_known_too() -> None:
    with pytest.raises(PtxError, match="outside of kernels"):
        parse(".version 8.0 .target sm_80 .address_size 64 .func f() { ret; }")


def test_sm90_instructions_need_sm90() -> None:
    execute("griddepcontrol.wait;")
    with pytest.raises(PtxError, match="needs sm_90"):
        execute("griddepcontrol.wait;", target=80)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s32 %r1, %r2, 1;", "register is read before"),
        ("add.s32 %r1, %r2, %r3;", "register is read before"),
        ("mov.u32 %r1, %r2; shl.b32 %r3, %r1, 1;", "register is read before"),
        ("@%p1 mov.u32 %r1, 1;", "register is read before"),
        ("mov.u32 %r1, 0; div.s32 %r2, %r60, %r1;", "division by zero"),
    ],
)
def test_undefined_results_are_refused(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        execute(body)
