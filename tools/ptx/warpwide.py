"""Handlers of instructions that reach beyond a lane's registers: memory, copies, barriers, shuffles, matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.ptx.instructions import _BITS, _FLOATS, _INTEGERS, _drop, _kind, _op, _take
from tools.ptx.parse import TYPE_BYTES
from tools.ptx.warp import EVICT_FIRST, EVICT_NORMAL

if TYPE_CHECKING:
    from tools.ptx.compile import _BlockWriter

_LOADED = _INTEGERS | _BITS | _FLOATS


# ---- loads and stores -----------------------------------------------------------------------------------------


@_op("ld")
def _ld(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    space = modifiers.pop(0)
    kind = _kind(w, modifiers, _LOADED)
    to = w.vector(o[0])
    if space == "param":
        name, _, offset = o[1][1:-1].partition("+")
        declared = dict(w.program.kernel.parameters)
        if name not in declared or offset or TYPE_BYTES[declared[name]] != TYPE_BYTES[kind] or len(to) > 1:
            raise w.fail("this load of a parameter is not understood")
        value, bits = f"W.parameters[{name!r}]", f"b{TYPE_BYTES[kind] * 8}"
        if (
            kind == "s32" and TYPE_BYTES[w.kind_of(o[0]) or kind] == 8
        ):  # a wider register takes the sign along
            value, bits = f"{value}.view('i4').astype('i8')", "s64"
        w.write(o[0], value, bits)
        return
    size = _access(w, modifiers, to, kind)
    address = w.address(o[1], space)
    if space == "global":
        past_l1 = _drop(modifiers, "cg")
        w.emit(f"t = W.load_global({w.mask}, {address}, {size}, {past_l1})")
    elif space in ("shared", "shared::cta"):
        w.emit(f"t = W.load_shared({w.mask}, {address}, {size})")
    else:
        raise w.fail(f"unknown modifier .{space}")
    for i, register in enumerate(to):
        each = TYPE_BYTES[kind]
        if each == 4:
            w.write(register, f"t[{i}]", "b32")
        elif each == 2 and size == 2:
            w.write(register, "t[0].astype(u2)", "b16")
        elif each == 8:
            w.write(register, f"join([t[{2 * i}], t[{2 * i + 1}]])", "b64")
        else:
            raise w.fail("this load is not understood")


@_op("st")
def _st(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    space = modifiers.pop(0)
    kind = _kind(w, modifiers, _LOADED)
    source = w.vector(o[1])
    size = _access(w, modifiers, source, kind)
    each = TYPE_BYTES[kind]
    values = [w.read(x, f"b{each * 8}") for x in source]
    if each == 8:
        values = [f"split({v}, 2)[{i}]" for v in values for i in range(2)]
    address = w.address(o[0], space)
    name = {"global": "store_global", "shared": "store_shared", "shared::cta": "store_shared"}.get(space)
    if name is None or (each == 2 and (size > 2 or space != "global")):
        raise w.fail("this store is not understood")
    w.emit(f"W.{name}({w.mask}, {address}, [{', '.join(values)}])")


def _access(w: _BlockWriter, modifiers: list[str], registers: list[str], kind: str) -> int:
    """Bytes per lane; the vector modifier must agree with the operand."""
    count = 1
    for n in (2, 4):
        if _drop(modifiers, f"v{n}"):
            count = n
    size = count * TYPE_BYTES[kind]
    if len(registers) != count or size > 16:
        raise w.fail(f"{len(registers)} registers for a vector of {count}")
    return size


@_op("atom")
def _atom(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    _take(w, modifiers, "global")
    _take(w, modifiers, "add")
    kind = _kind(w, modifiers, {"u32"})
    address, value = w.address(o[1], "global"), w.read(o[2], kind)
    w.write(o[0], f"W.atomic_add({w.mask}, {address}, {value})", kind)


# ---- copies ---------------------------------------------------------------------------------------------------


@_op("createpolicy")
def _createpolicy(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    _take(w, modifiers, "fractional")
    first = _take(w, modifiers, "L2::evict_first", "L2::evict_normal") == "L2::evict_first"
    kind = _kind(w, modifiers, {"b64"})
    if not 0.0 < float(o[1]) <= 1.0:
        raise w.fail("a fraction in (0, 1] is needed")
    w.write(o[0], w.program.constant(EVICT_FIRST if first else EVICT_NORMAL, "u8"), kind)


@_op("cp")
def _cp(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    _take(w, modifiers, "async")
    if _drop(modifiers, "commit_group"):
        w.emit(f"W.commit({w.mask})")
    elif _drop(modifiers, "wait_group"):
        w.emit(f"W.wait({w.mask}, {w.immediate(o[0], 'u32')})")
    elif _drop(modifiers, "wait_all"):
        w.emit(f"W.wait({w.mask}, -1)")
    else:
        cached_in_l1 = _take(w, modifiers, "cg", "ca") == "ca"
        _take(w, modifiers, "shared", "shared::cta")
        _take(w, modifiers, "global")
        hinted = _drop(modifiers, "L2::cache_hint")
        size = w.immediate(o[2], "u32")
        if size not in ((4, 8, 16) if cached_in_l1 else (16,)) or len(o) != 3 + hinted:
            raise w.fail("this copy is not understood")
        policy = w.read(o[3], "b64") if hinted else "None"
        to, source = w.address(o[0], "shared"), w.address(o[1], "global")
        w.emit(f"W.copy({w.mask}, {to}, {source}, {size}, {policy})")


# ---- barriers and order ---------------------------------------------------------------------------------------


@_op("bar")
def _bar(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    warp = _drop(modifiers, "warp")
    _take(w, modifiers, "sync")
    if warp:
        w.emit(f"W.warp_barrier({w.mask}, {w.read(o[0], 'b32')})")
    elif w.current is None or w.current.guard is not None:
        raise w.fail("a guarded block barrier is not understood")
    elif o == ("0",):
        w.emit(f"W.all_together({w.mask})")  # the scheduler holds the warp
    else:
        raise w.fail("only barrier 0 of all threads is understood")


@_op("fence")
def _fence(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    _take(w, modifiers, "acq_rel", "sc")
    _take(w, modifiers, "gpu", "sys")
    w.emit(f"W.fence({w.mask})")


@_op("griddepcontrol")
def _griddepcontrol(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    if w.program.target < 90:
        raise w.fail("needs sm_90")
    if _take(w, modifiers, "wait", "launch_dependents") == "wait":
        w.emit("W.earlier_kernel_done()")
    else:
        w.emit("pass")  # the next kernel waits by itself for all of this one


# ---- across the warp ------------------------------------------------------------------------------------------


@_op("shfl")
def _shfl(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    _take(w, modifiers, "sync")
    mode = _take(w, modifiers, "up", "down", "bfly", "idx")
    kind = _kind(w, modifiers, {"b32"})
    to, _, in_range = o[0].partition("|")
    b, c = w.read(o[2], "u32"), w.read(o[3], "u32")
    w.emit(f"W.together({w.mask}, {w.read(o[4], 'b32')})")
    w.emit(f"t = numbers.shuffle_source({mode!r}, {b}, {c})")
    w.emit(f"W.from_lanes({w.mask}, t[0])")
    w.emit(f"t = {w.read(o[1], kind)}[t[0]], t[1]")
    w.write(to, "t[0]", kind)
    if in_range:
        w.write(in_range, "t[1]", "pred")


@_op("ldmatrix")
def _ldmatrix(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    for word in ("sync", "aligned", "m8n8"):
        _take(w, modifiers, word)
    count = int(_take(w, modifiers, "x1", "x2", "x4")[1])
    _take(w, modifiers, "shared", "shared::cta")
    _take(w, modifiers, "b16")
    to = w.vector(o[0])
    if len(to) != count:
        raise w.fail(f"{len(to)} registers for {count} matrices")
    w.emit(f"t = W.load_matrices({w.mask}, {w.address(o[1], 'shared')}, {count})")
    for i, register in enumerate(to):
        w.write(register, f"t[{i}]", "b32")


@_op("mma")
def _mma(w: _BlockWriter, o: tuple[str, ...], modifiers: list[str]) -> None:
    for word in ("sync", "aligned", "m16n8k16", "row", "col"):
        _take(w, modifiers, word)
    kind = modifiers[1] if len(modifiers) == 4 else ""
    if kind not in ("bf16", "f16") or modifiers != ["f32", kind, kind, "f32"]:
        raise w.fail("unknown types of matrices")
    modifiers.clear()
    d, a, b, c = (w.vector(x) for x in o)
    if (len(d), len(a), len(b), len(c)) != (4, 4, 2, 4):
        raise w.fail("wrong number of registers")
    parts = ", ".join(
        f"[{', '.join(w.read(x, t) for x in xs)}]" for xs, t in ((a, "b32"), (b, "b32"), (c, "f32"))
    )
    w.emit(f"W.all_together({w.mask})")
    w.emit(f"t = numbers.mma_m16n8k16({kind!r}, {parts})")
    for i, register in enumerate(d):
        w.write(register, f"t[{i}]", "f32")
