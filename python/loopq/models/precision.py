"""The type a model computes in, if it differs from the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from loopq.errors import require
from loopq.settings.execution import available_bytes
from loopq.storage.model_files import HELD_AS
from loopq.storage.names import names_of

if TYPE_CHECKING:
    from torch import nn

#: As Linux calls what multiplies bfloat16: x86 with AVX-512 or AMX, ARM.
_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 product instructions. True where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return True
    flags = [set(line.split()) for line in lines if line.lower().startswith(("flags", "features"))]
    return not flags or bool(_FLAGS & flags[0])


def to_float32(model: nn.Module) -> nn.Module:
    """Let a model compute in float32. `loopq.storage.model_files.model_tensors` still gives the types it had."""
    torch = require("torch")
    names, kinds = names_of(model), {torch.float16: "F16", torch.bfloat16: "BF16"}
    state = model.state_dict(keep_vars=True)
    hold(model, {names.in_file(n): kinds[t.dtype] for n, t in state.items() if t.dtype in kinds})
    return model.float()


def hold(model: nn.Module, types: Mapping[str, str]) -> None:
    """Set types of tensors in a model's files (`loopq.storage.model_files.types_of`)."""
    setattr(model, HELD_AS, {**getattr(model, HELD_AS, {}), **types})


def widen(model: nn.Module) -> str:
    """Let a bfloat16 model compute in float32 on processors with slow bfloat16. Return the note to report.

    The weights keep their values and are still read as bfloat16 (`loopq.storage.model_files.model_tensors`). On a
    processor with AVX2 alone, rollouts of SmolLM2 are five times as fast (docs/performance.md).
    """
    torch = require("torch")
    state = model.state_dict(keep_vars=True)
    names = [name for name, tensor in state.items() if tensor.dtype == torch.bfloat16]
    if not names or multiplies_bfloat16() or any(t.dtype == torch.float16 for t in state.values()):
        return ""
    free, need = available_bytes(), 4 * sum(state[name].numel() for name in names)
    if free is not None and need > free:
        return (
            f"this processor has no instructions for bfloat16: float32 is about five times as fast, but takes "
            f"{need / 2**30:.1f} GiB more and {free / 2**30:.1f} are free"
        )
    to_float32(model)
    return "bfloat16 weights, computed in float32: this processor has no instructions for bfloat16"
