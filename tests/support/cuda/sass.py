"""Machine code of a cubin, and what one stage of the int4 kernel's main loop costs in it: issue slots by opcode."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# Blocks with one of these are part of every ordinary stage: products, and the copies that refill the ring.
_ALWAYS = ("HMMA", "LDGSTS")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


def disassembler() -> str | None:
    """nvdisasm on the PATH, or the one that Triton's wheel carries; None where there is neither."""
    path = shutil.which("nvdisasm")
    if path is None:
        try:
            import triton
        except ImportError:
            return None
        inside = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        path = str(inside) if inside.is_file() else None
    return path


def disassemble(cubin: bytes) -> str:
    tool = disassembler()
    assert tool is not None, "ask disassembler() before disassemble()"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


@dataclass
class Block:
    """Instructions that run one after another, and the blocks that may follow (by index)."""

    opcodes: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True
    successors: list[int] = field(default_factory=list)


def blocks_of(sass: str) -> list[Block]:
    """Basic blocks in the order of the code."""
    blocks = [Block()]
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label = _LABEL.match(line)
        if label:
            if blocks[-1].opcodes:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
            continue
        match = _INSTRUCTION.search(line)
        if not match:
            continue
        opcode, operands = match[1], match[2]
        blocks[-1].opcodes.append(opcode)
        if opcode.split(".")[0] in ("BRA", "EXIT", "RET"):
            always = "@" not in line and "BRA.DIV" not in line and not re.match(r"!?U?P\d", operands)
            target = _TARGET.search(operands)
            blocks[-1].targets += [target[1]] if target else []
            blocks[-1].falls_through = not always
            blocks.append(Block())
    for index, block in enumerate(blocks):
        block.successors = [labels[name] for name in block.targets if name in labels]
        if block.falls_through and index + 1 < len(blocks):
            block.successors.append(index + 1)
    return blocks


def stage_slots(sass: str) -> Counter[str]:
    """Opcodes that a warp issues for one ordinary stage: neither the last of a pair nor the first of another.

    The main loop is the smallest one with most of the products. An ordinary stage is the shortest way around it through
    every block that multiplies or copies.
    """
    blocks = blocks_of(sass)
    products = [sum(op.startswith("HMMA") for op in block.opcodes) for block in blocks]
    loops = [(b, a) for a, block in enumerate(blocks) for b in block.successors if b <= a]
    assert loops, "no loop in the machine code"
    first, last = min(loops, key=lambda loop: (-sum(products[loop[0] : loop[1] + 1]), loop[1] - loop[0]))
    inside = range(first, last + 1)
    stops = [first, *(i for i in inside if any(op.startswith(_ALWAYS) for op in blocks[i].opcodes)), last]
    path = [first]
    for goal in stops[1:]:
        if goal != path[-1]:
            path += _shortest(blocks, path[-1], goal)
    return Counter(op.split(".")[0] for index in path for op in blocks[index].opcodes)


def _shortest(blocks: list[Block], start: int, goal: int) -> list[int]:
    """Blocks after `start` up to `goal`, going forward, with the fewest instructions."""
    best: dict[int, tuple[int, list[int]]] = {start: (0, [])}
    for index in range(start, goal):
        if index not in best:
            continue
        cost, path = best[index]
        for after in blocks[index].successors:
            if index < after <= goal:
                price = cost + len(blocks[after].opcodes)
                if after not in best or price < best[after][0]:
                    best[after] = (price, [*path, after])
    assert goal in best, f"block {goal} cannot be reached from block {start}"
    return best[goal][1]
