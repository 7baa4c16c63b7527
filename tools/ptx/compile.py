"""Kernels to Python: each basic block becomes one generated function, compiled when it is first run.

A function takes the warp, its registers (a list of arrays of 32 lanes, never changed in place) and the mask of
active lanes, and returns who takes the branch. There are two of each: for a whole warp, without masks, and for a part.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tools.ptx.warpwide  # noqa: F401 (registers the handlers of memory, order and matrices)
from tools.ptx import numbers
from tools.ptx.instructions import write_instruction
from tools.ptx.memory import SHARED_BASE, Array
from tools.ptx.parse import TYPE_BYTES, Block, Instruction, Kernel, PtxError

DTYPES = {"pred": "bool"} | {
    kind: ("i" if kind[0] == "s" else "u") + str(n) for kind, n in TYPE_BYTES.items()
}
DTYPES |= {"f32": "f4", "f64": "f8"}  # f16 and bf16 values are handled by their bits
_SPECIALS = {f"%{base}.{axis}" for base in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}
_SPECIALS |= {"%laneid", "%warpid"}


class _UnwrittenRegister:
    """Stands in a register until it is written; every use is an error."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise PtxError("a register is read before it is written")

    __array__ = __getattr__ = __invert__ = __neg__ = __getitem__ = _refuse
    __add__ = __sub__ = __mul__ = __and__ = __or__ = __xor__ = _refuse


UNWRITTEN_REGISTER = _UnwrittenRegister()
_POISON = {1: np.zeros(32, bool), 2: np.full(32, 0xDEAD, np.uint16), 4: np.full(32, 0xFFC0DEAD, np.uint32)}
_POISON |= {8: np.full(32, 0xFFF8DEADDEADDEAD, np.uint64)}


def merge(mask: Array, new: Array, old: Any) -> Array:
    """A write by some lanes; lanes that never wrote hold a pattern that is a NaN and no valid address."""
    if old is UNWRITTEN_REGISTER:
        old = _POISON[new.dtype.itemsize].view(new.dtype)
    result: Array = np.where(mask, new, old)
    return result


class Program:
    """A kernel ready to run."""

    def __init__(self, kernel: Kernel, target: int) -> None:
        self.kernel, self.target = kernel, target
        self.slots: dict[str, int] = {}
        self.constants: dict[tuple[int, str], str] = {}
        self._functions: dict[tuple[int, bool], Callable[..., Any]] = {}
        self._lines: dict[str, list[Instruction]] = {}
        self.names: dict[str, Any] = {
            name: getattr(np, name)
            for name in ("where", "isnan", "rint", "sqrt", "stack", "minimum", "maximum")
        }
        self.names |= {
            code: np.dtype(code) for code in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")
        }
        self.names |= {
            "numbers": numbers,
            "merge": merge,
            "np": np,
            "split": _split,
            "join": _join,
            "checked": _checked,
        }
        for register in (*kernel.registers, *_SPECIALS):
            self.slots[register] = len(self.slots)

    def function(self, index: int, full: bool) -> Callable[..., Any]:
        found = self._functions.get((index, full))
        if found is None:
            source, lines = _BlockWriter(self, full).source(self.kernel.blocks[index])
            file = f"<ptx {self.kernel.name} {index} {full}>"
            self._lines[file] = lines
            scope: dict[str, Any] = {}
            exec(compile(source, file, "exec"), self.names, scope)
            found = self._functions[index, full] = scope["block"]
        return found

    def understand(self) -> None:
        """Translates every block, also those that no run comes to.

        Raises
        ------
        PtxError
            That names an instruction, modifier or operand that is not known.
        """
        for index in range(len(self.kernel.blocks)):
            self.function(index, True)
            self.function(index, False)

    def describe(self, file: str, line: int) -> str:
        """The PTX instruction behind a line of generated code."""
        lines = self._lines[file]
        return str(lines[line - 2]) if 0 <= line - 2 < len(lines) else "?"

    def constant(self, value: int, dtype: str) -> str:
        """Name of an array that holds these bits in every lane."""
        size = int(dtype[1:])
        bits = value & ((1 << 8 * size) - 1)
        key = (bits, dtype)
        if key not in self.constants:
            name = self.constants[key] = f"K{len(self.constants)}"
            array = np.full(32, bits, f"u{size}").view(dtype)
            array.flags.writeable = False
            self.names[name] = array
        return self.constants[key]

    def bind(self, arguments: Sequence[Any]) -> dict[str, Array]:
        """Parameters by name from launch arguments.

        Raises
        ------
        PtxError
            If number or types do not fit.
        """
        declared = self.kernel.parameters
        if len(arguments) != len(declared):
            raise PtxError(f"{self.kernel.name} takes {len(declared)} arguments, not {len(arguments)}")
        bound = {}
        for (name, kind), value in zip(declared, arguments, strict=True):
            fits = {"u64": int, "u32": np.int32, "f32": np.float32}.get(kind)
            if fits is None or not isinstance(value, fits):
                raise PtxError(f"{self.kernel.name}: {value!r} for parameter {name} of type {kind}")
            raw = np.full(32, value, {"u64": np.uint64, "u32": np.int32, "f32": np.float32}[kind])
            bound[name] = raw.view(f"u{TYPE_BYTES[kind]}")
        return bound


class _BlockWriter:
    """Writes the function of one block; handlers of instructions call it."""

    def __init__(self, program: Program, full: bool) -> None:
        self.program, self.full = program, full
        self.mask = "None" if full else "m"
        self.indent = " "
        self.lines: list[str] = []
        self.origin: list[Instruction] = []
        self.current: Instruction | None = None

    def source(self, block: Block) -> tuple[str, list[Instruction]]:
        for instruction in block.instructions:
            self.current = instruction
            if instruction.guard is not None:
                guard = self.guard(instruction)
                self.emit(f"q = {guard}" if self.full else f"q = {guard} & m")
                self.emit("if q.any():")
                mask, self.mask, self.indent = self.mask, "q", "  "
                write_instruction(self, instruction)
                self.mask, self.indent = mask, " "
            else:
                write_instruction(self, instruction)
        result = "None"
        if block.branch is not None:
            self.current = block.branch
            if block.branch.guard is not None:
                result = self.guard(block.branch)
            _check_branch(block.branch)
        else:
            self.current = (
                block.instructions[-1] if block.instructions else Instruction(0, None, False, "end", ())
            )
        self.emit(f"return {result}")
        return "def block(W, R, m):\n" + "\n".join(self.lines), self.origin

    def guard(self, instruction: Instruction) -> str:
        assert instruction.guard is not None
        value = self.read(instruction.guard, "pred")
        return f"~{value}" if instruction.negated else value

    def emit(self, line: str) -> None:
        assert self.current is not None
        self.lines.append(self.indent + line)
        self.origin.append(self.current)

    def fail(self, why: str) -> PtxError:
        return PtxError(f"{self.current}: {why}")

    # ---- operands -----------------------------------------------------------------------------------------------

    def kind_of(self, operand: str) -> str | None:
        """Declared type of a register, else None."""
        if operand in _SPECIALS:
            return "u32"
        return self.program.kernel.registers.get(operand)

    def read(self, operand: str, kind: str) -> str:
        """Expression of an operand as the type that the instruction names."""
        declared = self.kind_of(operand)
        if declared is not None:
            slot = self.program.slots[operand]
            have, want = storage(declared), DTYPES[kind]
            if have != want and (have == "bool" or want == "bool" or have[1:] != want[1:]):
                raise self.fail(f"{operand} of type .{declared} where .{kind} is needed")
            return f"R[{slot}]" if have == want else f"R[{slot}].view({want})"
        if operand in self.program.kernel.symbols:
            return self.program.constant(SHARED_BASE + self.program.kernel.symbols[operand], DTYPES[kind])
        if kind == "pred":
            return f"(np.full(32, {bool(int(operand, 0))}))"
        return self.program.constant(self.immediate(operand, kind), DTYPES[kind])

    def immediate(self, operand: str, kind: str) -> int:
        """Bits of a constant."""
        if (operand[:2].lower(), kind) in (("0f", "f32"), ("0f", "b32"), ("0d", "f64"), ("0d", "b64")):
            return int(operand[2:], 16)
        try:
            if kind == "f32":
                return int(struct.unpack("<I", struct.pack("<f", float(operand)))[0])
            return int(operand.rstrip("U"), 0)
        except ValueError:
            raise self.fail(f"operand {operand!r} is not understood") from None

    def write(self, operand: str, value: str, kind: str) -> None:
        """Emits the assignment of an expression of type `kind`."""
        if operand == "_":
            self.emit(value)
            return
        declared = self.kind_of(operand)
        if declared is None or operand in _SPECIALS:
            raise self.fail(f"{operand!r} cannot be written")
        have, want = DTYPES[kind], storage(declared)
        if have != want:
            if have == "bool" or want == "bool" or have[1:] != want[1:]:
                raise self.fail(f"{operand} of type .{declared} where .{kind} is written")
            value = f"({value}).view({want})"
        slot = self.program.slots[operand]
        self.emit(
            f"R[{slot}] = {value}"
            if self.mask == "None"
            else f"R[{slot}] = merge({self.mask}, {value}, R[{slot}])"
        )

    def vector(self, operand: str) -> list[str]:
        """Parts of `{a,b}`, or the operand alone."""
        if operand.startswith("{"):
            return [part.strip() for part in operand[1:-1].split(",")]
        return [operand]

    def address(self, operand: str, space: str) -> str:
        """Expression of `[register + offset]`: u8 for global memory, u4 for shared."""
        if not operand.startswith("["):
            raise self.fail(f"address {operand!r} is not understood")
        base, _, offset = operand[1:-1].replace(" ", "").partition("+")
        kind = "u64" if space == "global" else "u32"
        value = self.read(base, kind)
        return f"({value} + {self.program.constant(int(offset, 0), DTYPES[kind])})" if offset else value


def storage(declared: str) -> str:
    """How a register of a declared type is kept: by its bits, but float32 as itself."""
    if declared in ("pred", "f32", "f64"):
        return DTYPES[declared]
    return f"u{TYPE_BYTES[declared]}"


def _check_branch(branch: Instruction) -> None:
    if branch.opcode not in ("bra", "bra.uni", "ret", "exit"):
        raise PtxError(f"{branch}: unknown instruction")


def _split(words: Array, parts: int) -> list[Array]:
    """The `parts` pieces of a register, the low one first."""
    kind = f"u{words.dtype.itemsize // parts}"
    pieces = np.ascontiguousarray(words).view(kind).reshape(32, parts)
    return [np.ascontiguousarray(pieces[:, i]) for i in range(parts)]


def _join(parts: Sequence[Array]) -> Array:
    size = parts[0].dtype.itemsize * len(parts)
    return np.ascontiguousarray(np.stack(parts, axis=1)).view(f"u{size}").reshape(32)


def _checked(divisor: Array, mask: Array | None) -> Array:
    if (divisor == 0 if mask is None else (divisor == 0) & mask).any():
        raise PtxError("integer division by zero")
    return divisor
