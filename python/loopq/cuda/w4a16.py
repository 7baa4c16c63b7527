"""The int4 product as a torch operator: checks, launch, reference, registration.

Importing this module needs torch; CuPy is asked for at the first call on a CUDA device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from loopq.cuda.launch import (
    ACTIVATIONS,
    SCALES,
    Workspace,
    launch_dequantize,
    launch_gemm,
    workspace_size,
)
from loopq.cuda.layout import K_STEP, N_STEP, TILE_K, WORDS_PER_TILE, packed_shape
from loopq.cuda.load import Backend, cuda_backend
from loopq.cuda.plan import fold_of
from loopq.errors import KernelError

__all__ = [
    "Product",
    "dequantize_packed",
    "w4a16_linear",
    "w4a16_linear_ref",
]

# Above this many tokens an int4 weight is dequantised for cuBLAS, which an H200 does faster from 192 (docs/kernels.md).
INT4_KERNEL_TOKENS = 128
_DEVICES = ("cpu", "cuda", "meta")


def _refuse(what: str) -> KernelError:
    return KernelError(f"w4a16_linear: {what}")


@dataclass(frozen=True)
class Product:
    """One product's operands, in the order of the operator's arguments; see `w4a16_linear` for each of them."""

    x: torch.Tensor
    qweight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    addend: torch.Tensor | None
    in_features: int
    group_size: int
    k_begin: int = 0
    out_dtype: torch.dtype | None = None

    @property
    def out_features(self) -> int:
        return int(self.qweight.shape[0]) * N_STEP

    @property
    def width(self) -> int:
        return int(self.x.shape[-1]) if self.x.dim() else 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.x.dtype if self.out_dtype is None else self.out_dtype

    @property
    def layer(self) -> tuple[int, int, int, int]:
        """What a cut depends on: outputs, K range, group size."""
        return self.out_features, self.k_begin, self.k_begin + self.width, self.group_size

    def checked(self) -> Product:
        """Itself, if its operands fit together.

        Raises
        ------
        KernelError
            On a device, type, shape or stride that does not fit.
        """
        for name, tensor in self._constants().items():
            if tensor.device != self.x.device:
                raise _refuse(
                    f"{name} is on {tensor.device}, x on {self.x.device}: move the layer or the input"
                )
        self._check_types()
        self._check_shapes()
        self._check_extras()
        for name, tensor in self._constants().items():
            if name != "addend" and not tensor.is_contiguous():
                raise _refuse(f"{name} is not contiguous: .contiguous() it once, when the layer is built")
        return self

    def _constants(self) -> dict[str, torch.Tensor]:
        found = {"qweight": self.qweight, "scales": self.scales, "bias": self.bias, "addend": self.addend}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _check_types(self) -> None:
        x = self.x
        if not x.is_floating_point():
            raise _refuse(f"activations are {x.dtype}; a floating-point type is needed")
        if x.device.type != "cpu":
            if x.dtype not in ACTIVATIONS:
                raise _refuse(
                    f"activations are {x.dtype}; the kernel takes bfloat16 and float16. Cast x, or the model"
                )
            if self.dtype not in (x.dtype, torch.float32):
                raise _refuse(
                    f"output {self.dtype} from {x.dtype} activations; the kernel gives {x.dtype} or float32"
                )
        if self.qweight.dtype != torch.int32:
            raise _refuse(
                f"the packed weight is {self.qweight.dtype}; expected int32 words as made by pack_w4"
            )
        if self.scales.dtype not in SCALES:
            raise _refuse(f"scales are {self.scales.dtype}; expected float32, bfloat16 or float16")

    def _check_shapes(self) -> None:
        packed = tuple(self.qweight.shape)
        if len(packed) != 2 or packed != packed_shape(self.out_features, self.in_features):
            raise _refuse(
                f"packed weight of shape {packed} does not hold {self.in_features} inputs: expected "
                f"(out / {N_STEP}, {-(-self.in_features // TILE_K) * WORDS_PER_TILE})"
            )
        fold_of(self.group_size)
        groups = 1 if self.group_size == -1 else -(-self.in_features // self.group_size)
        if tuple(self.scales.shape) != (groups, self.out_features):
            raise _refuse(
                f"scales of shape {tuple(self.scales.shape)}; expected ({groups}, {self.out_features}), group by output"
            )
        begin, width = self.k_begin, self.width
        if begin < 0 or begin % K_STEP or width == 0 or width % K_STEP or begin + width > self.in_features:
            raise _refuse(
                f"x has {width} features from input {begin} on; a range of the layer's {self.in_features} inputs "
                f"that begins and ends at a multiple of {K_STEP} is needed"
            )

    def _check_extras(self) -> None:
        bias, addend = self.bias, self.addend
        if bias is not None and (tuple(bias.shape) != (self.out_features,) or bias.dtype != torch.float32):
            raise _refuse(
                f"bias is {bias.dtype} {tuple(bias.shape)}; expected float32 ({self.out_features},)"
            )
        if addend is not None:
            expected = (*self.x.shape[:-1], self.out_features)
            if tuple(addend.shape) != expected or addend.dtype != torch.float32:
                raise _refuse(f"addend is {addend.dtype} {tuple(addend.shape)}; expected float32 {expected}")


def _rows(x: torch.Tensor, what: str) -> torch.Tensor:
    """x as (rows, width) with unit stride along the width, without a copy.

    Raises
    ------
    KernelError
        If the strides do not allow it.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise _refuse(
            f"{what} has stride {x.stride(-1)} along its last dimension; the kernel needs 1: .contiguous()"
        )
    if x.dim() == 1:
        return x.unsqueeze(0)
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError as error:
        raise _refuse(
            f"{what} of shape {tuple(x.shape)} and strides {x.stride()} has no uniform row stride: "
            f".contiguous()"
        ) from error


def dequantize_packed(
    qweight: torch.Tensor, scales: torch.Tensor, in_features: int, group_size: int
) -> torch.Tensor:
    """s * q of a packed weight in float32, (out_features, in_features), with torch operations on any device.

    Parameters
    ----------
    qweight : torch.Tensor, int32, shape (out / 16, ceil(in / 64) * 128)
    scales : torch.Tensor, shape (groups, out)
    in_features, group_size : int
        -1 for one scale per output.

    Returns
    -------
    torch.Tensor, float32, shape (out, in)
    """
    strips = qweight.shape[0]
    words = qweight.view(strips, -1, 8, 4, 4)  # tile, column, pair, step
    tiles = words.shape[1]
    codes = qweight.new_empty((strips, 2, 8, tiles, 4, 2, 4, 2), dtype=torch.float32)
    for half in range(2):
        for high in range(2):
            for odd in range(2):
                nibble = (words >> (4 * (2 * half + high + 4 * odd))) & 15
                codes[:, half, :, :, :, high, :, odd] = (nibble - 8).permute(0, 2, 1, 4, 3).float()
    weight = codes.view(strips * N_STEP, tiles * TILE_K)[:, :in_features]
    return weight * spread_scales(scales, in_features, group_size)


def spread_scales(scales: torch.Tensor, in_features: int, group_size: int) -> torch.Tensor:
    """Scales (groups, out) as float32 (out, in): one per input, the last group cut short."""
    if group_size == -1:
        return scales.float().t()
    return scales.float().t().repeat_interleave(group_size, dim=1)[:, :in_features]


def w4a16_linear_ref(p: Product) -> torch.Tensor:
    """The plain twin of the kernel: float32 weights, float32 product, one rounding at the end."""
    weight = dequantize_packed(p.qweight, p.scales, p.in_features, p.group_size)
    out = p.x.float() @ weight[:, p.k_begin : p.k_begin + p.width].t()
    if p.bias is not None:
        out = out + p.bias
    if p.addend is not None:
        out = out + p.addend
    return out.to(p.dtype)


_COUNTERS: dict[tuple[int, int], torch.Tensor] = {}


def _eager_workspace(
    backend: Backend, layer: tuple[int, int, int, int], rows: int, device: torch.device
) -> Workspace:
    floats, pairs = workspace_size(backend, layer, rows)
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed beside anything: it gets counters of its own, zeroed in each replay.
        return Workspace.allocate(floats, pairs, device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    counters = _COUNTERS.get(key)
    if counters is None or counters.numel() < pairs:
        counters = _COUNTERS[key] = torch.zeros(max(pairs, 4096), dtype=torch.int32, device=device)
    return Workspace(torch.empty(max(floats, 1), dtype=torch.float32, device=device), counters)


def run_linear(backend: Backend, p: Product, workspace: Workspace | None = None) -> torch.Tensor:
    """The product on a backend: the kernels, or above INT4_KERNEL_TOKENS tokens dequantise and multiply."""
    rows = _rows(p.x, "x")
    addend = None if p.addend is None else _rows(p.addend, "addend")
    out = torch.empty((rows.shape[0], p.out_features), dtype=p.dtype, device=rows.device)
    if rows.shape[0] > INT4_KERNEL_TOKENS:
        out.copy_(_multiply_dequantized(backend, p, rows, addend))
    elif rows.shape[0] > 0:
        launch_gemm(
            backend,
            rows,
            p.qweight,
            p.scales,
            out,
            in_features=p.in_features,
            group_size=p.group_size,
            k_begin=p.k_begin,
            bias=p.bias,
            addend=addend,
            workspace=workspace or _eager_workspace(backend, p.layer, rows.shape[0], rows.device),
        )
    return out.view(*p.x.shape[:-1], p.out_features)


def _multiply_dequantized(
    backend: Backend, p: Product, rows: torch.Tensor, addend: torch.Tensor | None
) -> torch.Tensor:
    weight = torch.empty((p.out_features, p.in_features), dtype=rows.dtype, device=rows.device)
    launch_dequantize(backend, p.qweight, p.scales, weight, p.group_size)
    product = torch.nn.functional.linear(rows, weight[:, p.k_begin : p.k_begin + p.width])
    if p.bias is None and addend is None:
        return product
    return product.float() + (0 if p.bias is None else p.bias) + (0 if addend is None else addend)


_SCHEMA = (
    "w4a16_linear(Tensor x, Tensor qweight, Tensor scales, Tensor? bias, Tensor? addend, int in_features, "
    "int group_size, int k_begin=0, ScalarType? out_dtype=None) -> Tensor"
)
_library = torch.library.Library("loopq", "FRAGMENT")
_library.define(_SCHEMA)


# Arguments come in the schema's order, which is that of Product's fields.
def _on_cpu(*operands: Any) -> torch.Tensor:
    return w4a16_linear_ref(Product(*operands).checked())


def _on_cuda(*operands: Any) -> torch.Tensor:
    product = Product(*operands).checked()
    with torch.cuda.device(product.x.device):
        return run_linear(cuda_backend(product.x.device.index), product)


def _fake(*operands: Any) -> torch.Tensor:
    product = Product(*operands).checked()
    return product.x.new_empty((*product.x.shape[:-1], product.out_features), dtype=product.dtype)


_library.impl("w4a16_linear", _on_cpu, "CPU")
_library.impl("w4a16_linear", _on_cuda, "CUDA")
torch.library.register_fake("loopq::w4a16_linear", _fake, lib=_library)


def w4a16_linear(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    *,
    in_features: int,
    group_size: int,
    k_begin: int = 0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x @ (s q)^T (+ bias) (+ addend)`` for int4 weights, as the operator ``loopq::w4a16_linear``.

    Parameters
    ----------
    x : torch.Tensor, bfloat16 or float16 (any floating type on the CPU), shape (..., width)
        Inputs ``k_begin .. k_begin + width`` of the layer; both ends multiples of 32. On a GPU: unit stride
        along the width, a uniform row stride that is a multiple of 8, 16-byte aligned.
    qweight : torch.Tensor, int32, shape (out / 16, ceil(in / 64) * 128)
        See `loopq.cuda.layout.pack_w4`.
    scales : torch.Tensor, float32, bfloat16 or float16, shape (ceil(in / group_size), out)
    bias : torch.Tensor or None, float32, shape (out,)
    addend : torch.Tensor or None, float32, shape (..., out)
        Joins the float32 sum before it is rounded.
    in_features : int
        Width of the whole layer, of which x may cover a part.
    group_size : int
        32, 64, 128 or a larger power of two; -1 for one scale per output.
    k_begin : int
        First input that x holds.
    out_dtype : torch.dtype or None
        x's type (default) or float32.

    Returns
    -------
    torch.Tensor, shape (..., out)

    Raises
    ------
    KernelError
        If a tensor has the wrong device, type, shape, stride or alignment, or the device is too old.
    MissingExtraError
        On a CUDA device without a matching CuPy.

    Notes
    -----
    Precision: codes exact, float32 sum per group, scale applied to that sum, float32 across groups, one
    rounding. Above `INT4_KERNEL_TOKENS` tokens on a GPU the weights ``s q`` are rounded to x's type first.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from loopq.cuda.layout import pack_w4
    >>> packed = torch.from_numpy(pack_w4(np.ones((16, 32), np.int8)))
    >>> w4a16_linear(torch.ones(1, 32), packed, torch.full((1, 16), 0.5), in_features=32, group_size=32)[0, 0]
    tensor(16.)
    """
    if x.device.type not in _DEVICES:
        raise _refuse(
            f"x is on {x.device}; there are implementations for {', '.join(_DEVICES)}: move x and the layer"
        )
    out: torch.Tensor = torch.ops.loopq.w4a16_linear(
        x, qweight, scales, bias, addend, in_features, group_size, k_begin, out_dtype
    )
    return out
