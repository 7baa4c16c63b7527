"""Run a looped decoder as one program of the core: all operations from embedding to logits in one call.

A system describes its model in a `Program`. The core multiplies by the packed codes, stores keys and values, and does
the rest in float32 (`docs/cpu.md`). No module of the model is called, so hooks do not see it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import loopq._native as native
from loopq.errors import ConfigError, KernelError
from loopq.runtime.cpu import CpuPanels
from loopq.runtime.linear import LAYOUTS, QuantLinear
from loopq.systems.program import Block, Program

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Runner"]

#: Tokens of a prompt that run at once: between calls a run can be stopped.
_AT_ONCE = 128
#: Names that classes of norms give to what is added to the mean.
_EPSILON = ("variance_epsilon", "eps")
#: Tokens after which numbers of threads are timed again.
_TRIED_EVERY = 64
#: Positions that angles are computed for at a time.
_POSITIONS = 512


class Runner:
    """A model's program with the keys and values of the tokens so far.

    Parameters
    ----------
    program : Program
        Program of a model on the processor. Some of its layers have codes.
    kv : {8, 4}, optional
        Bits of keys and values; by default those of the model's numbers.

    Raises
    ------
    KernelError
        If it cannot multiply by some codes: they have another layout, or mixed activations. Also if no layer has codes.
    ConfigError
        If shapes do not fit together.
    """

    def __init__(self, program: Program, kv: Literal[4, 8] | None = None) -> None:
        self.program = program
        first = program.embed(torch.zeros(1, dtype=torch.long))
        parts = _Parts(first.shape[-1])
        order = [(name, parts.number(name, what)) for name, what in program.order]
        head = parts.weight(program.head)
        if len(parts.activations) != 1:
            kinds = ", ".join(sorted(parts.activations)) or "none"
            raise KernelError(
                f"the runner takes layers with codes, all with the same activations; found {kinds}"
            )
        half = first.dtype == torch.bfloat16
        precision: Literal["int8", "fixed16", "fixed24"] = "fixed16" if half else "fixed24"
        codes: dict[int | None, Literal["int8", "int4"]] = {8: "int8", 4: "int4"}
        default: Literal["bfloat16", "float32"] = "bfloat16" if half else "float32"
        self._core = native.CpuRunner(
            parts.weights, parts.norms, parts.blocks, order, head, kept=codes.get(kv, default),
            precision="int8" if parts.activations == {"int8"} else precision,
        )  # fmt: skip
        self._vocabulary = program.head.out_features
        self._angles: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._threads = _Threads()

    @property
    def seen(self) -> int:
        """Number of tokens with stored keys and values."""
        return self._core.seen

    def restart(self) -> None:
        """Forget all tokens."""
        self._core.restart()

    def extend(self, ids: Tensor, start: Tensor | None = None) -> Tensor:
        """Continue with new tokens, int64 of shape (n), and return the float32 logits after the last one.

        A program with a step "start" takes their initial states, (n, width).

        Raises
        ------
        ConfigError
            There are no tokens.
        """
        if not len(ids):
            raise ConfigError(f"no tokens to go on by, after {self.seen}")
        logits = np.empty((1, self._vocabulary), np.float32)
        self._turn_to(self.seen + len(ids))
        with torch.no_grad():
            embeddings = self.program.embed(ids).float().numpy()
        states = None if start is None else start.float().numpy()
        for at in range(0, len(ids), _AT_ONCE):
            part = slice(at, at + _AT_ONCE)
            last = at + _AT_ONCE >= len(ids)
            with self._threads.of(len(embeddings[part])) as threads:
                self._core.run(
                    embeddings[part], self._angles, logits if last else logits[:0],
                    None if states is None else states[part], threads=threads,
                )  # fmt: skip
        return torch.from_numpy(logits[0])

    def _turn_to(self, n_positions: int) -> None:
        if n_positions > len(self._angles):
            with torch.no_grad():
                angles = self.program.angles(-(-n_positions // _POSITIONS) * _POSITIONS)
            self._angles = np.ascontiguousarray(angles.float().flatten(1).numpy())


class _Threads:
    """Threads of a call: torch's number, or one if threads wait for each other on a busy machine.

    Single tokens are repeatedly timed with both. The number of threads does not change a result's bits.
    """

    def __init__(self) -> None:
        self._n_tokens = 0
        self._took: dict[int, float] = {}

    @contextlib.contextmanager
    def of(self, n_tokens: int) -> Iterator[int]:
        """Set that number for a call."""
        most = torch.get_num_threads()
        if n_tokens > 1 or most == 1:
            yield most
            return
        turn = self._n_tokens % _TRIED_EVERY
        self._n_tokens += 1
        if turn == 0:
            self._took = {}
        tried = (most, most, 1, 1)
        threads = tried[turn] if turn < len(tried) else min(self._took, key=lambda n: self._took[n])
        start = time.perf_counter()
        yield threads
        self._took[threads] = min(self._took.get(threads, math.inf), time.perf_counter() - start)


class _Parts:
    """A program's layers, norms and blocks by number. Each appears once, even if it runs several times."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.weights: list[native._RunnerWeight] = []
        self.norms: list[tuple[list[float], float]] = []
        self.blocks: list[dict[str, Any]] = []
        self.activations: set[str] = set()
        self._numbers: dict[int, int] = {}

    def number(self, name: str, what: Any) -> int:
        """Number of a step's object."""
        if what is None or isinstance(what, int):
            return what or 0
        return {"block": self._block, "norm": self._norm, "adapter": self.weight}[name](what)

    def _add(self, to: list[Any], what: Any, make: Callable[[], Any]) -> int:
        if id(what) not in self._numbers:
            to_add = make()
            self._numbers[id(what)] = len(to)
            to.append(to_add)
        return self._numbers[id(what)]

    def weight(self, module: nn.Module) -> int:
        """Number of a linear layer."""
        return self._add(self.weights, module, lambda: self._values(module))

    def _values(self, module: nn.Module) -> native._RunnerWeight:
        bias = None if module.bias is None else module.bias.detach().float().numpy()
        if isinstance(module, QuantLinear):
            panels, transform = LAYOUTS[module.layout], module.transform
            if not isinstance(panels, CpuPanels):
                raise KernelError(f"the runner does not multiply by {module!r}")
            self.activations.add(module.activations)
            blocks = None if transform is None else transform.blocks()
            return panels.layout_of(module), module.qweight.numpy(), bias, blocks
        if type(module) is not nn.Linear:
            raise KernelError(f"the runner takes linear layers, no {type(module).__name__}")
        weight = module.weight.detach()
        if weight.dtype == torch.bfloat16:
            return None, weight.view(torch.uint16).numpy(), bias, None
        return None, weight.float().numpy(), bias, None

    def _norm(self, module: nn.Module) -> int:
        def values() -> tuple[list[float], float]:
            epsilon = next((float(v) for n in _EPSILON if (v := getattr(module, n, None)) is not None), None)
            if epsilon is None or "RMSNorm" not in type(module).__name__:
                raise KernelError(f"the runner takes RMS norms, no {type(module).__name__}")
            weight = getattr(module, "weight", None)
            return [1.0] * self._width if weight is None else weight.detach().float().tolist(), epsilon

        return self._add(self.norms, module, values)

    def _block(self, block: Block) -> int:
        return self._add(self.blocks, block, lambda: self._fields(block))

    def _fields(self, block: Block) -> dict[str, Any]:
        def norm(module: nn.Module | None) -> int | None:
            return None if module is None else self._norm(module)

        bias, norms = block.qk_bias, block.qk_norms
        return {
            **{
                name: getattr(block, name)
                for name in ("heads", "kv_heads", "head", "neighbours", "scale", "gates")
            },
            "qkv": [self.weight(m) for m in block.qkv],
            "out": self.weight(block.out),
            "gate_up": [self.weight(m) for m in block.gate_up],
            "down": self.weight(block.down),
            "norms": [[norm(n.input), norm(n.branch), norm(n.stream)] for n in block.norms],
            "qk_bias": [] if bias is None else bias.detach().float().flatten().tolist(),
            "qk_norms": None if norms is None else [self._norm(n) for n in norms],
        }
