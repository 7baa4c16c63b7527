"""One handler per PTX opcode: it writes the Python line that does what the PTX ISA says.

A handler takes the modifiers it knows out of the list; what is left over is an error. Nothing is skipped silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tools.ptx.parse import TYPE_BYTES, Instruction

if TYPE_CHECKING:
    from tools.ptx.compile import _BlockWriter

Handler = Callable[["_BlockWriter", tuple[str, ...], list[str]], None]
_HANDLERS: dict[str, Handler] = {}
_INTEGERS = {kind for kind in TYPE_BYTES if kind[0] in "us" and kind != "u8" and kind != "s8"}
_BITS = {"b16", "b32", "b64"}
_PAIRS = {"bf16x2", "f16x2"}
_FLOATS = {"f32", "f64"}


def write_instruction(w: _BlockWriter, instruction: Instruction) -> None:
    """Emits the code of one instruction.

    Raises
    ------
    PtxError
        That names an instruction, modifier or operand that is not known.
    """
    base, *modifiers = instruction.words
    handler = _HANDLERS.get(base)
    if handler is None:
        raise w.fail("unknown instruction")
    handler(w, instruction.operands, modifiers)
    if modifiers:
        raise w.fail(f"unknown modifier .{'.'.join(modifiers)}")


def _op(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


def _take(w: _BlockWriter, modifiers: list[str], *choices: str) -> str:
    """Removes and returns the one of `choices` that must be there."""
    for choice in choices:
        if choice in modifiers:
            modifiers.remove(choice)
            return choice
    raise w.fail(f"one of the modifiers {', '.join(choices)} is needed")


def _drop(modifiers: list[str], name: str) -> bool:
    if name in modifiers:
        modifiers.remove(name)
        return True
    return False


def _kind(w: _BlockWriter, modifiers: list[str], allowed: set[str]) -> str:
    """The type, which comes last."""
    if not modifiers or modifiers[-1] not in allowed:
        raise w.fail(f"unknown type .{modifiers[-1] if modifiers else ''}")
    return modifiers.pop()


# ---- arithmetic -----------------------------------------------------------------------------------------------


def _arithmetic(base: str) -> None:
    sign = {"add": "+", "sub": "-"}[base]

    def handler(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
        kind = _kind(w, modifiers, _INTEGERS | _FLOATS)
        if kind in _FLOATS:
            _drop(modifiers, "rn")  # the default
        w.write(o[0], f"{w.read(o[1], kind)} {sign} {w.read(o[2], kind)}", kind)

    _HANDLERS[base] = handler


_arithmetic("add")
_arithmetic("sub")


@_op("mul")
def _mul(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, _INTEGERS | _FLOATS)
    a, b = w.read(o[1], kind), w.read(o[2], kind)
    if kind in _FLOATS:
        _drop(modifiers, "rn")
        w.write(o[0], f"{a} * {b}", kind)
        return
    part = _take(w, modifiers, "lo", "wide", "hi")
    if part == "lo":
        w.write(o[0], f"{a} * {b}", kind)
    elif part == "wide":
        wide, dtype = _widened(w, kind)
        w.write(o[0], f"{a}.astype({dtype}) * {b}.astype({dtype})", wide)
    elif kind in ("u32", "s32"):
        w.write(o[0], f"numbers.multiply_high({a}, {b})", kind)
    else:
        raise w.fail("mul.hi is there for 32 bits")


def _widened(w: _BlockWriter, kind: str) -> tuple[str, str]:
    size = TYPE_BYTES[kind] * 2
    if size > 8:
        raise w.fail("unknown modifier .wide of 64 bits")
    return f"{kind[0]}{size * 8}", f"{'i' if kind[0] == 's' else 'u'}{size}"


@_op("mad")
def _mad(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, _INTEGERS)
    a, b = w.read(o[1], kind), w.read(o[2], kind)
    if _take(w, modifiers, "lo", "wide") == "lo":
        w.write(o[0], f"{a} * {b} + {w.read(o[3], kind)}", kind)
    else:
        wide, dtype = _widened(w, kind)
        w.write(o[0], f"{a}.astype({dtype}) * {b}.astype({dtype}) + {w.read(o[3], wide)}", wide)


@_op("div")
def _div(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, _INTEGERS | _FLOATS)
    a, b = w.read(o[1], kind), w.read(o[2], kind)
    if kind in _FLOATS:
        _take(w, modifiers, "rn")
        w.write(o[0], f"{a} / {b}", kind)
    else:
        w.write(o[0], f"numbers.divide({a}, checked({b}, {w.mask}))", kind)


@_op("rem")
def _rem(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, _INTEGERS)
    w.write(o[0], f"numbers.remainder({w.read(o[1], kind)}, checked({w.read(o[2], kind)}, {w.mask}))", kind)


@_op("min", "max")
def _least(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    assert w.current is not None
    kind = _kind(w, modifiers, _INTEGERS)
    function = {"min": "minimum", "max": "maximum"}[w.current.words[0]]
    w.write(o[0], f"{function}({w.read(o[1], kind)}, {w.read(o[2], kind)})", kind)


@_op("neg")
def _neg(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, {"s16", "s32", "s64", *_FLOATS})
    w.write(o[0], f"-{w.read(o[1], kind)}", kind)


@_op("fma")
def _fma(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, {"f32"} | _PAIRS)
    way = _take(w, modifiers, "rn", "rm")
    if kind == "f32":
        a, b, c = (w.read(x, kind) for x in o[1:])
        w.write(o[0], f"numbers.fma_{'down_' if way == 'rm' else ''}f32({a}, {b}, {c})", kind)
    elif way == "rn":
        a, b, c = (w.read(x, "b32") for x in o[1:])
        w.write(o[0], f"numbers.fma_pair({kind!r}, {a}, {b}, {c})", "b32")
    else:
        raise w.fail(f"unknown modifier .{way}")


@_op("sqrt")
def _sqrt(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, {"f32"})
    _take(w, modifiers, "rn")
    w.write(o[0], f"sqrt({w.read(o[1], kind)})", kind)


@_op("ex2")
def _ex2(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, {"f32"})
    _take(w, modifiers, "approx")
    w.write(o[0], f"numbers.ex2({w.read(o[1], kind)}, {_drop(modifiers, 'ftz')})", kind)


# ---- bits -----------------------------------------------------------------------------------------------------


@_op("and", "or", "xor")
def _logic(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    assert w.current is not None
    kind = _kind(w, modifiers, _BITS | {"pred"})
    sign = {"and": "&", "or": "|", "xor": "^"}[w.current.words[0]]
    w.write(o[0], f"{w.read(o[1], kind)} {sign} {w.read(o[2], kind)}", kind)


@_op("not")
def _not(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, _BITS | {"pred"})
    w.write(o[0], f"~{w.read(o[1], kind)}", kind)


@_op("shl", "shr")
def _shift(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    assert w.current is not None
    left = w.current.words[0] == "shl"
    kind = _kind(w, modifiers, _BITS if left else _BITS | _INTEGERS)
    name = "shift_left" if left else "shift_right"
    w.write(o[0], f"numbers.{name}({w.read(o[1], kind)}, {w.read(o[2], 'u32')})", kind)


@_op("shf")
def _shf(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, {"b32"})
    left = _take(w, modifiers, "l", "r") == "l"
    wrap = _take(w, modifiers, "wrap", "clamp") == "wrap"
    a, b, c = (w.read(x, kind) for x in o[1:])
    w.write(o[0], f"numbers.funnel_shift({a}, {b}, {c}, {left}, {wrap})", kind)


@_op("bfe")
def _bfe(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, {"u32", "s32"})
    w.write(
        o[0], f"numbers.bit_field({w.read(o[1], kind)}, {w.read(o[2], 'u32')}, {w.read(o[3], 'u32')})", kind
    )


@_op("lop3")
def _lop3(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, {"b32"})
    a, b, c = (w.read(x, kind) for x in o[1:4])
    w.write(o[0], f"numbers.lop3({a}, {b}, {c}, {w.immediate(o[4], 'b32')})", kind)


@_op("prmt")
def _prmt(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, {"b32"})
    a, b, c = (w.read(x, kind) for x in o[1:])
    w.write(o[0], f"numbers.prmt({a}, {b}, {c})", kind)


# ---- comparison and choice ------------------------------------------------------------------------------------

_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
}
_COMPARE |= {"hs": ">="}


@_op("setp")
def _setp(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, _INTEGERS | _BITS | _FLOATS)
    name = modifiers.pop(0) if modifiers else ""
    a, b = w.read(o[1], kind), w.read(o[2], kind)
    if kind in _FLOATS:
        ordered = name in ("eq", "lt", "le", "gt", "ge")
        if ordered or name == "neu":
            value = f"({a} {_COMPARE[name.removesuffix('u')]} {b})"
        elif name == "ne":  # false where one is no number
            value = f"(({a} < {b}) | ({a} > {b}))"
        elif name in ("equ", "ltu", "leu", "gtu", "geu"):
            value = f"(({a} {_COMPARE[name[:2]]} {b}) | isnan({a}) | isnan({b}))"
        else:
            raise w.fail(f"unknown comparison .{name}")
    elif name in _COMPARE and not (kind in _BITS and name not in ("eq", "ne")):
        value = f"({a} {_COMPARE[name]} {b})"
    else:
        raise w.fail(f"unknown comparison .{name}")
    for word, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        if _drop(modifiers, word):
            value += f" {sign} {'~' if o[3].startswith('!') else ''}{w.read(o[3].lstrip('!'), 'pred')}"
            o = o[:3]
    if "|" in o[0] or len(o) != 3:
        raise w.fail("a second result of setp is not understood")
    w.write(o[0], value, "pred")


@_op("selp")
def _selp(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, _INTEGERS | _BITS | _FLOATS)
    w.write(o[0], f"where({w.read(o[3], 'pred')}, {w.read(o[1], kind)}, {w.read(o[2], kind)})", kind)


# ---- moves and conversions ------------------------------------------------------------------------------------


@_op("mov")
def _mov(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    kind = _kind(w, modifiers, _INTEGERS | _BITS | _FLOATS | {"pred"})
    to, source = w.vector(o[0]), w.vector(o[1])
    if len(to) == len(source) == 1:
        # An undefined value may be moved; only its use is an error.
        same = w.kind_of(o[0]) is not None and w.kind_of(o[0]) == w.kind_of(o[1]) and w.mask == "None"
        if same and kind != "pred":
            w.emit(f"R[{w.program.slots[o[0]]}] = R[{w.program.slots[o[1]]}]")
        else:
            w.write(o[0], w.read(o[1], kind), kind)
        return
    part = f"b{TYPE_BYTES[kind] * 8 // max(len(to), len(source))}"
    if part not in _BITS or min(len(to), len(source)) != 1:
        raise w.fail("this mov of parts is not understood")
    if len(source) > 1:
        w.write(o[0], f"join([{', '.join(w.read(x, part) for x in source)}])", kind)
        return
    w.emit(f"t = split({w.read(o[1], kind)}, {len(to)})")
    for i, x in enumerate(to):
        if x != "_":
            w.write(x, f"t[{i}]", part)


@_op("cvt")
def _cvt(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    words = list(modifiers)
    modifiers.clear()
    form = ".".join(words)
    if len(words) == 2 and set(words) <= _INTEGERS:
        to, source = words
        size = TYPE_BYTES[to]
        w.write(o[0], f"{w.read(o[1], source)}.astype({'i' if to[0] == 's' else 'u'}{size})", to)
    elif form in ("rn.f32.s32", "rn.f32.u32", "rn.f32.f64", "f64.f32", "rn.f64.s32", "rn.f64.u32"):
        to = words[-2]
        w.write(o[0], f"{w.read(o[1], words[-1])}.astype({'f4' if to == 'f32' else 'f8'})", to)
    elif form in ("rni.f32.f32", "rni.f64.f64"):
        w.write(o[0], f"rint({w.read(o[1], words[2])})", words[2])
    elif form == "rzi.s32.f32":
        w.write(o[0], f"{w.read(o[1], 'f32')}.astype('i4')", "s32")
    elif form == "f32.f16":
        w.write(o[0], f"numbers.f16_values({w.read(o[1], 'b16')}).astype(f4)", "f32")
    elif form == "f32.bf16" and w.program.target >= 90:
        w.write(o[0], f"numbers.bf16_values({w.read(o[1], 'b16')}).astype(f4)", "f32")
    elif form in ("rn.f16.f32", "rn.bf16.f32"):
        w.write(o[0], f"numbers.{words[1]}_bits({w.read(o[1], 'f32')})", "b16")
    elif form in ("rn.f16x2.f32", "rn.bf16x2.f32"):  # the first source is the high half
        kind = words[1].removesuffix("x2")
        low, high = (f"numbers.{kind}_bits({w.read(x, 'f32')})" for x in (o[2], o[1]))
        w.write(o[0], f"join([{low}, {high}])", "b32")
    elif form == "sat.f32.f32":
        w.write(o[0], f"numbers.saturate({w.read(o[1], 'f32')})", "f32")
    else:
        raise w.fail("unknown conversion")


@_op("cvta")
def _cvta(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    """Generic addresses of global memory are the same numbers; no other space is used by generic address."""
    kind = _kind(w, modifiers, {"u64"})
    _drop(modifiers, "to")
    _take(w, modifiers, "global")
    w.write(o[0], w.read(o[1], kind), kind)
