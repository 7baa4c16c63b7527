"""Marlin's int4 product, by vLLM's or GPTQModel's functions, if one of them is installed."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from benches.kernels.procedure import Procedure, draw, record, relative_l2
from benches.kernels.shapes import Projection
from benches.kernels.timed import Timed

#: Modules of the linear product and the order of scales, of the order of codes, and of the type of codes.
SOURCES: dict[str, tuple[str, str, str]] = {
    "vllm": (
        "vllm.model_executor.layers.quantization.utils.marlin_utils",
        "vllm._custom_ops",
        "vllm.scalar_type",
    ),
    "gptqmodel": ("gptqmodel.utils.marlin", "gptqmodel.utils.marlin", "gptqmodel.utils.marlin_scalar_type"),
}
_GROUP = 128
#: Largest relative difference from the product of the dequantized weight, in bfloat16.
_SAME = 1e-2


def time_marlin(backend: Timed, layer: Projection, tokens: int, procedure: Procedure) -> dict[str, Any]:
    """Time of Marlin's product at group 128, inputs padded to a multiple of 128 and outputs to 256, cold L2.

    Returns
    -------
    dict
        ``timing``, ``source`` and the padded shape; or ``unavailable`` with the reason. A product that differs from
        that of the dequantized weight is not timed.
    """
    reasons = []
    for source, modules in SOURCES.items():
        try:
            utils, ops, types = (import_module(name) for name in modules)
        except Exception as error:  # noqa: BLE001  a package that is built for another torch fails in its own way
            reasons.append(f"{source}: {_first(error)}")
            continue
        try:
            return {"source": source, **_timed(backend, layer, tokens, procedure, utils, ops, types)}
        except Exception as error:  # noqa: BLE001  functions of others, whose arguments differ between versions
            reasons.append(f"{source}: {_first(error)}")
    return {"unavailable": "; ".join(reasons)}


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def _timed(
    backend: Timed, layer: Projection, tokens: int, procedure: Procedure, utils: Any, ops: Any, types: Any
) -> dict[str, Any]:
    width, height = (-(-n // m) * m for n, m in ((layer.in_features, _GROUP), (layer.out_features, 256)))
    x = draw(tokens, width, backend.device, 0, torch.bfloat16)
    shared = {
        "weight_zp": utils.marlin_make_empty_g_idx(backend.device),
        "g_idx": utils.marlin_make_empty_g_idx(backend.device),
        "g_idx_sort_indices": utils.marlin_make_empty_g_idx(backend.device),
        "workspace": utils.marlin_make_workspace_new(backend.device),
        "wtype": types.scalar_types.uint4b8,
        "output_size_per_partition": height,
        "input_size_per_partition": width,
        "is_k_full": True,
    }
    runs = []
    for seed in range(procedure.copies(width * height // 2)):
        words, scales = _drawn(width, height, backend.device, seed)
        weight = {
            "weight": ops.gptq_marlin_repack(words, shared["g_idx_sort_indices"], width, height, 4),
            "weight_scale": utils.marlin_permute_scales(scales, width, height, _GROUP),
        }
        runs.append(partial(utils.apply_gptq_marlin_linear, x, **weight, **shared))
        if seed == 0:
            error = relative_l2(runs[0](), x.double() @ dequantized(words, scales).double())
            if not error < _SAME:
                return {"unavailable": f"its product differs by {error:.1e}"}
    timing = record(backend, runs, procedure).time(backend, procedure)
    return {"timing": timing.__dict__, "padded": (width, height)}


def _drawn(width: int, height: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of eight codes in GPTQ's order (width / 8, height), and scales (width / 128, height)."""
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.randint(
        -(2**31), 2**31, (width // 8, height), generator=generator, device=device, dtype=torch.int64
    )
    scales = torch.rand(width // _GROUP, height, generator=generator, device=device) + 0.5
    return words.to(torch.int32), (scales / (6.0 * width**0.5)).to(torch.bfloat16)


def dequantized(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight (width, height) in float32: input i is nibble i mod 8 of word i / 8, less 8, times its scale."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    codes = (words[:, None] >> shifts[:, None]) & 15
    return (codes.flatten(0, 1) - 8).float() * scales.float().repeat_interleave(_GROUP, 0)
