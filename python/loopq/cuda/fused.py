"""Small operations between the products: launches of `fused_ops.cu`, and their reference versions in torch."""

from __future__ import annotations

import numpy as np
import torch

from loopq.cuda.load import Backend, Kernel
from loopq.errors import KernelError

MAX_NORM_WIDTH = 16_384
MAX_ATTENTION_TOKENS = 64
MAX_HEAD = 128
_IO = {torch.bfloat16: "Bf16Io", torch.float16: "Fp16Io"}


def _kernel(entry: str, dtype: torch.dtype) -> Kernel:
    if dtype not in _IO:
        raise KernelError(f"{entry}: activations are {dtype}; the kernel takes bfloat16 and float16")
    return Kernel("fused_ops.cu", entry, (f"-DLQ_IO={_IO[dtype]}",))


def _check_rows(entry: str, like: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    for name, t in tensors.items():
        if t is None:
            continue
        _check_kind(entry, name, t, like)
        if t.dim() != 2 or t.stride(1) != 1 or t.stride(0) % 8 or t.data_ptr() % 16:
            raise KernelError(
                f"{entry}: {name} of shape {tuple(t.shape)} and strides {t.stride()} must be a matrix with unit "
                f"stride along its rows, a row stride that is a multiple of 8, and a 16-byte aligned start"
            )


def _check_kind(entry: str, name: str, t: torch.Tensor, like: torch.Tensor) -> None:
    if t.dtype != like.dtype or t.device != like.device:
        raise KernelError(
            f"{entry}: {name} is {t.dtype} on {t.device}; expected {like.dtype} on {like.device} like the rest"
        )


def _check_vector(
    entry: str, name: str, t: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...]
) -> None:
    if t is None:
        return
    _check_kind(entry, name, t, like)
    if tuple(t.shape) != shape or not t.is_contiguous() or t.data_ptr() % 16:
        raise KernelError(
            f"{entry}: {name} has shape {tuple(t.shape)} and strides {t.stride()}; expected {shape}, contiguous "
            f"and 16-byte aligned: .clone() it"
        )


def _check_shape(entry: str, name: str, t: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if t is not None and tuple(t.shape) != shape:
        raise KernelError(f"{entry}: {name} has shape {tuple(t.shape)}; expected {shape}")


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.data_ptr())


def _stride(tensor: torch.Tensor | None) -> np.int32:
    return np.int32(0 if tensor is None else tensor.stride(0))


def rotation_table(n_tokens: int, head: int, base: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """Cosines and sines of the rotary embedding for interleaved pairs.

    Returns
    -------
    torch.Tensor, float32 of shape (n_tokens, head / 2, 2)
        ``cos, sin`` of ``token * base ** (-2 i / head)``, computed in float64.
    """
    frequency = base ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    angle = torch.outer(torch.arange(n_tokens, dtype=torch.float64), frequency)
    return torch.stack((angle.cos(), angle.sin()), dim=-1).float().to(device)


def add_norm(
    backend: Backend,
    a: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    y: torch.Tensor,
    second: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
) -> None:
    """``y = rms(a + residual) * weight`` and, with `second`, ``z = rms(y) * weight2``. y may be the residual.

    Parameters
    ----------
    a, residual, y : torch.Tensor, bfloat16 or float16, shape (rows, width)
    weight : torch.Tensor of the same type, shape (width,)
    second : tuple or None
        weight2 and z, with the shapes of weight and y.
    epsilon : float
        ``rms(v) = v / sqrt(mean(v^2) + epsilon)``

    Raises
    ------
    KernelError
        If the kernel does not support the type, stride, alignment or width.
    """
    kernel = _kernel("loopq_add_norm", a.dtype)
    weight2, z = second or (None, None)
    _check_rows("add_norm", a, a=a, residual=residual, y=y, z=z)
    rows, width = a.shape
    if width % 8 or width > MAX_NORM_WIDTH:
        raise KernelError(f"add_norm: width {width} must be a multiple of 8 up to {MAX_NORM_WIDTH}")
    for name, rows_of in (("residual", residual), ("y", y), ("z", z)):
        _check_shape("add_norm", name, rows_of, (rows, width))
    for name, vector in (("weight", weight), ("weight2", weight2)):
        _check_vector("add_norm", name, vector, a, (width,))
    pieces = width // 8
    per_thread = -(-pieces // 512)
    threads = -(-pieces // (32 * per_thread)) * 32
    backend.launch(
        kernel,
        (rows, 1),
        threads,
        threads // 32 * 4,
        (
            *(_pointer(t) for t in (a, residual, weight, weight2, y, z)),
            np.int32(width),
            *(_stride(t) for t in (a, residual, y, z)),
            np.float32(epsilon),
        ),
    )


def rope_attention(
    backend: Backend,
    qkv: torch.Tensor,
    qk_bias: torch.Tensor | None,
    rotation: torch.Tensor,
    out: torch.Tensor,
    n_heads: int,
    n_tokens: int,
) -> None:
    """Bias on q and k, rotation, and causal softmax attention within sequences of `n_tokens` rows.

    Parameters
    ----------
    qkv : bfloat16 or float16 torch.Tensor of shape (sequences * n_tokens, 3 * n_heads * head)
        q of all heads, followed by k and v.
    qk_bias : torch.Tensor or None, shape (2, n_heads, head), contiguous
    rotation : torch.Tensor, float32, shape (>= n_tokens, head / 2, 2), contiguous
        See `rotation_table`.
    out : torch.Tensor, shape (sequences * n_tokens, n_heads * head)

    Raises
    ------
    KernelError
        If the kernel does not support the shape, type, stride or alignment.
    """
    kernel = _kernel("loopq_rope_attention", qkv.dtype)
    _check_rows("rope_attention", qkv, qkv=qkv, out=out)
    head = out.shape[1] // n_heads
    sequences = qkv.shape[0] // n_tokens
    _check_shape("rope_attention", "out", out, (qkv.shape[0], n_heads * head))
    _check_shape("rope_attention", "qkv", qkv, (qkv.shape[0], 3 * n_heads * head))
    _check_vector("rope_attention", "qk_bias", qk_bias, qkv, (2, n_heads, head))
    if head % 2 or head > MAX_HEAD or n_tokens > MAX_ATTENTION_TOKENS or qkv.shape[0] % n_tokens:
        raise KernelError(
            f"rope_attention: {qkv.shape[0]} rows in sequences of {n_tokens}, head {head}; the kernel takes "
            f"sequences of up to {MAX_ATTENTION_TOKENS} tokens and even heads of up to {MAX_HEAD}"
        )
    if (
        rotation.dtype != torch.float32
        or rotation.device != qkv.device
        or not rotation.is_contiguous()
        or rotation.shape[0] < n_tokens
        or rotation.shape[1:] != (head // 2, 2)
    ):
        raise KernelError(
            f"rope_attention: rotation is {rotation.dtype} {tuple(rotation.shape)} on {rotation.device}; expected "
            f"float32 (at least {n_tokens}, {head // 2}, 2), contiguous, on {qkv.device}"
        )
    backend.launch(
        kernel,
        (n_heads, sequences),
        32 * min(8, n_tokens),
        3 * n_tokens * (head + 1) * 4,
        (
            *(_pointer(t) for t in (qkv, qk_bias, rotation, out)),
            *(np.int32(v) for v in (n_tokens, n_heads, head)),
            *(_stride(t) for t in (qkv, out)),
            np.float32(head**-0.5),
        ),
    )


def swiglu(backend: Backend, gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """``out = silu(gate) * up`` for gate_up (rows, 2 * width), gate first.

    Raises
    ------
    KernelError
        If the kernel does not support the type, stride, alignment or width.
    """
    kernel = _kernel("loopq_swiglu", out.dtype)
    _check_rows("swiglu", out, gate_up=gate_up, out=out)
    rows, width = out.shape
    if width % 8 or tuple(gate_up.shape) != (rows, 2 * width):
        raise KernelError(
            f"swiglu: {tuple(gate_up.shape)} to {tuple(out.shape)}; width must be a multiple of 8"
        )
    blocks = min(-(-rows * width // (8 * 256)), 8 * backend.limits.multiprocessors)
    backend.launch(
        kernel,
        (blocks, 1),
        256,
        0,
        (
            *(_pointer(t) for t in (gate_up, out)),
            *(np.int32(v) for v in (rows, width)),
            *(_stride(t) for t in (gate_up, out)),
        ),
    )
