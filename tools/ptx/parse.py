"""PTX text to kernels: registers, basic blocks, branches and the points where diverged lanes meet again.

Written from the PTX ISA (https://docs.nvidia.com/cuda/parallel-thread-execution). Only what the CUDA front end and
inline assembly of `kernels/` produce is taken; anything else is an error that names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["Block", "Instruction", "Kernel", "PtxError", "parse"]


class PtxError(Exception):
    """The PTX is not understood, or did something that the PTX ISA does not allow; the message says what and where."""


TYPE_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4}
TYPE_BYTES |= {"f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}


@dataclass(frozen=True)
class Instruction:
    """One statement; registers in `operands` and `guard` carry the number of their scope, `name#scope`."""

    line: int
    guard: str | None  # register of the predicate
    negated: bool
    opcode: str
    operands: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The opcode's parts; a doubled colon belongs to one part (`L2::cache_hint`)."""
        return self.opcode.split(".")

    def __str__(self) -> str:
        return f"line {self.line}: {self.opcode} {', '.join(self.operands)}"


@dataclass
class Block:
    """Instructions without a jump; `branch` is the conditional or plain jump at the end."""

    instructions: list[Instruction] = field(default_factory=list)
    branch: Instruction | None = None
    target: int = -1  # of the branch
    next: int = -1  # falls through to; -1: nowhere
    pause: bool = False  # ends with a block barrier, at which the warp stops

    @property
    def successors(self) -> list[int]:
        return [s for s in (self.target, self.next) if s >= 0]


@dataclass
class Kernel:
    """One entry; `registers` maps scoped names to types, `symbols` those of shared arrays to byte offsets."""

    name: str
    parameters: list[tuple[str, str]]  # name, type
    registers: dict[str, str]
    blocks: list[Block]
    symbols: dict[str, int]
    max_threads: int | None

    @cached_property
    def meeting(self) -> list[int]:
        """For each block, the first block that every path from it passes (immediate post-dominator); -1: the end."""
        return _post_dominators(self.blocks)


_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
_NAME = re.compile(r"%?[A-Za-z_$][\w$]*")
_ENTRY = re.compile(r"(?:\.visible\s+)?\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+([\w$]+)$")
_SHARED = re.compile(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\]\s*;")
_ENDS = {"bra", "ret", "exit"}
_PAUSES = {"bar", "barrier"}  # bar.warp is no pause: the warp runs on
_YIELDS = {"atom", "fence"}  # other blocks may come in between


def parse(text: str) -> dict[str, Kernel]:
    """Every kernel of a PTX file by name.

    Raises
    ------
    PtxError
        On a directive or statement that is not understood.
    """
    # Comments become spaces, so that offsets and lines stay.
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)
    symbols = {match[1]: 0 for match in _SHARED.finditer(text)}
    kernels = {}
    outside = text
    for match in _ENTRY.finditer(text):
        end = _closing(text, match.end())
        kernels[match[1]] = _Body(text, match, end, symbols).kernel()
        outside = outside.replace(text[match.start() : end], "", 1)
    _check_outside(_SHARED.sub("", outside))
    return kernels


def _check_outside(text: str) -> None:
    """What stands outside of kernels: the header, and constants that nothing refers to by name."""
    known = re.compile(r"\.version [\d.]+|\.target [\w, ]+|\.address_size 64|\.global [^;]*;|\s+")
    rest = known.sub(" ", text).strip()
    if rest:
        raise PtxError(f"not understood outside of kernels: {rest[:80]!r}")


def _closing(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.end()
    raise PtxError("a kernel has no closing brace")


class _Body:
    """The statements of one kernel, with the names of nested scopes made unique."""

    def __init__(self, text: str, match: re.Match[str], end: int, symbols: dict[str, int]) -> None:
        self.text, self.at, self.end = text, match.end(), end - 1
        self.line = text.count("\n", 0, self.at) + 1
        self.name, self.symbols = match[1], symbols
        self.parameters = []
        for part in filter(None, (p.strip() for p in match[2].split(","))):
            found = _PARAMETER.match(part)
            if found is None:
                raise PtxError(f"{self.name}: parameter {part!r} is not understood")
            self.parameters.append((found[2], found[1]))
        threads = re.search(r"\.maxntid\s+(\d+)", match[3])
        self.max_threads = int(threads[1]) if threads else None
        self.registers: dict[str, str] = {}
        self.families: list[tuple[str, int, str]] = []  # prefix, count, type: of `%r<99>`
        self.scopes = [0]  # numbers of the open ones
        self.opened = 0
        self.statements: list[Instruction | str] = []  # a label is its scoped name

    def kernel(self) -> Kernel:
        while self._skip_space():
            if self.text[self.at] == "{":
                self.opened += 1
                self.scopes.append(self.opened)
                self.at += 1
            elif self.text[self.at] == "}":
                self.scopes.pop()
                self.at += 1
            elif label := _LABEL.match(self.text, self.at, self.end):
                self.statements.append(f"{label[1]}#{self.scopes[-1]}")
                self.at = label.end()
            else:
                self._statement()
        blocks = self._blocks()
        return Kernel(self.name, self.parameters, self.registers, blocks, self.symbols, self.max_threads)

    def _skip_space(self) -> bool:
        while self.at < self.end and self.text[self.at].isspace():
            self.line += self.text[self.at] == "\n"
            self.at += 1
        return self.at < self.end

    def _statement(self) -> None:
        stop = self.text.index(";", self.at)
        raw, line = self.text[self.at : stop], self.line
        statement = " ".join(raw.split())
        self.line += raw.count("\n")
        self.at = stop + 1
        if statement.startswith(".reg "):
            self._declare(statement, line)
        elif statement.startswith("."):
            if not statement.startswith(".pragma"):
                raise PtxError(f"line {line}: directive {statement!r} is not understood")
        else:
            self.statements.append(self._instruction(statement, line))

    def _declare(self, statement: str, line: int) -> None:
        _, kind, names = statement.split(None, 2)
        for name in (n.strip() for n in names.split(",")):
            family = re.match(r"(%[\w$]+)<(\d+)>$", name)
            if family:
                self.families.append((family[1], int(family[2]), kind[1:]))
            elif _NAME.fullmatch(name):
                self.registers[f"{name}#{self.scopes[-1]}"] = kind[1:]
            else:
                raise PtxError(f"line {line}: register {name!r} is not understood")

    def _instruction(self, statement: str, line: int) -> Instruction:
        guard, negated = None, False
        if statement.startswith("@"):
            word, statement = statement[1:].split(None, 1)
            negated = word.startswith("!")
            guard = self._scoped(word.lstrip("!"))
        opcode, _, rest = statement.partition(" ")
        # Commas inside of braces and brackets do not separate operands; no operand of these kernels nests them.
        parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", rest)
        operands = tuple(_NAME.sub(lambda m: self._scoped(m[0]), part.strip()) for part in parts)
        if opcode.split(".")[0] == "bra":
            operands = (self._label(parts[0].strip()),)
        return Instruction(line, guard, negated, opcode, operands)

    def _label(self, name: str) -> str:
        # A label may come later in the text, so it is looked up when all are known: by the scopes open here.
        return " ".join(f"{name}#{scope}" for scope in reversed(self.scopes))

    def _scoped(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if f"{name}#{scope}" in self.registers:
                return f"{name}#{scope}"
        for prefix, count, kind in self.families:
            number = name[len(prefix) :]
            if name.startswith(prefix) and number.isdigit() and int(number) < count:
                self.registers[f"{name}#0"] = kind
                return f"{name}#0"
        return name  # a special register, a parameter or an array

    def _blocks(self) -> list[Block]:
        blocks = [Block()]
        labels: dict[str, int] = {}
        for statement in self.statements:
            if isinstance(statement, str):
                labels[statement] = _open(blocks)
                continue
            last = blocks[-1]
            base = statement.words[0]
            if base in _ENDS:
                last.branch = statement
                blocks.append(Block())
                # Behind an unconditional jump nothing falls through.
                last.next = len(blocks) - 1 if statement.guard else -1
                continue
            last.instructions.append(statement)
            pauses = base in _PAUSES and statement.words[1] != "warp"
            if pauses or base in _YIELDS:
                last.pause = pauses
                blocks.append(Block())
                last.next = len(blocks) - 1
        for block in blocks:
            if block.branch is not None and block.branch.words[0] == "bra":
                known = [labels[name] for name in block.branch.operands[0].split() if name in labels]
                if not known:
                    raise PtxError(f"{block.branch}: no such label")
                block.target = known[0]
        return blocks


def _open(blocks: list[Block]) -> int:
    """The index of a block that begins here; a label falls through from the block before it."""
    last = blocks[-1]
    if last.instructions or last.branch:
        blocks.append(Block())
        if last.branch is None:
            last.next = len(blocks) - 1
    return len(blocks) - 1


def _post_dominators(blocks: list[Block]) -> list[int]:
    """Immediate post-dominators by the usual iteration over reverse post-order of the reversed graph."""
    end = len(blocks)
    successors = [block.successors or [end] for block in blocks]
    for block, found in zip(blocks, successors, strict=True):
        if block.branch is not None and block.branch.words[0] in ("ret", "exit") and end not in found:
            found.append(end)  # a guarded exit
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for index, found in enumerate(successors):
        for s in found:
            before[s].append(index)
    order = _post_order(before, end)
    rank = {node: i for i, node in enumerate(order)}
    immediate = {end: end}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [s for s in successors[node] if s in immediate]
            best = known[0]
            for other in known[1:]:
                best = _common(best, other, immediate, rank)
            if immediate.get(node) != best:
                immediate[node] = best
                changed = True
    return [-1 if immediate.get(i, end) == end else immediate[i] for i in range(end)]


def _common(a: int, b: int, immediate: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = immediate[a]
        while rank[b] < rank[a]:
            b = immediate[b]
    return a


def _post_order(edges: list[list[int]], root: int) -> list[int]:
    """Nodes that `root` reaches, each after those it reaches first; the root comes last."""
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(edges[root]))]
    while stack:
        node, rest = stack[-1]
        for successor in rest:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(edges[successor])))
                break
        else:
            order.append(node)
            stack.pop()
    return order
