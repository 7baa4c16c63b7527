"""Launches of the int4 kernels: workspace, cuts, arguments, and the self-test of a loaded kernel.

Importing this module needs torch. The backend decides which device runs a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from loopq.errors import KernelError
from loopq.quantizers.cuda.load import Backend, Kernel
from loopq.runtime.cuda.layout import (
    K_STEP,
    N_STEP,
    TILE_K,
    WORDS_PER_TILE,
    level_bytes,
    pack_w4,
    packed_shape,
)
from loopq.runtime.cuda.plan import (
    TOKENS_PER_LAUNCH,
    GemmShape,
    NarrowPlan,
    Variant,
    fold_of,
    make_plan,
    token_tiles_for,
)
from loopq.runtime.cuda.tiled import WARP_TOKENS, TiledPlan, TiledVariant, make_tiled_plan

ACTIVATIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SCALES = {torch.float32: "f32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_OUT_FLOAT32, _EVICT_FIRST = 1, 2
# Weights that fit in the L2 with everything else use the default caching. Longer streams are evicted first.
_STAYS_IN_L2_BYTES = 24 * 1024 * 1024


@dataclass
class Workspace:
    """Scratch memory of split-K products: float32 partial sums, and counters that are zero between launches.

    One workspace serves one stream (or one captured graph) at a time. Two concurrent launches would mix their partial
    sums.
    """

    partials: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(cls, n_floats: int, n_counters: int, device: torch.device) -> Workspace:
        return cls(
            torch.empty(max(n_floats, 1), dtype=torch.float32, device=device),
            torch.zeros(max(n_counters, 1), dtype=torch.int32, device=device),
        )


def refuse(what: str) -> KernelError:
    return KernelError(f"w4a16_linear: {what}")


@dataclass(frozen=True)
class Product:
    """One product's operands in the order of the operator's arguments. `w4a16_linear` describes each of them."""

    x: torch.Tensor
    qweight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    addend: torch.Tensor | None
    in_features: int
    group_size: int
    k_begin: int = 0
    out_dtype: torch.dtype | None = None
    levels: Sequence[int] | None = None

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
        """Layer of a cut: outputs, K range and group size."""
        return self.out_features, self.k_begin, self.k_begin + self.width, self.group_size

    def checked(self) -> Product:
        """Return the product itself if its operands fit together.

        Raises
        ------
        KernelError
            If a device, type, shape or stride does not fit.
        """
        for name, tensor in self._constants().items():
            if tensor.device != self.x.device:
                raise refuse(
                    f"{name} is on {tensor.device}, x on {self.x.device}: move the layer or the input"
                )
        level_bytes(self.levels)
        self._check_types()
        self._check_shapes()
        self._check_extras()
        for name, tensor in self._constants().items():
            if name != "addend" and not tensor.is_contiguous():
                raise refuse(f"{name} is not contiguous: .contiguous() it once, when the layer is built")
        return self

    def _constants(self) -> dict[str, torch.Tensor]:
        constants = {"qweight": self.qweight, "scales": self.scales, "bias": self.bias, "addend": self.addend}
        return {name: tensor for name, tensor in constants.items() if tensor is not None}

    def _check_types(self) -> None:
        x = self.x
        if not x.is_floating_point():
            raise refuse(f"activations are {x.dtype}; a floating-point type is needed")
        if x.device.type != "cpu":
            if x.dtype not in ACTIVATIONS:
                raise refuse(
                    f"activations are {x.dtype}; the kernel takes bfloat16 and float16. Cast x, or the model"
                )
            if self.dtype not in (x.dtype, torch.float32):
                raise refuse(
                    f"output {self.dtype} from {x.dtype} activations; the kernel gives {x.dtype} or float32"
                )
        if self.qweight.dtype != torch.int32:
            raise refuse(
                f"the packed weight is {self.qweight.dtype}; expected int32 words as made by pack_w4"
            )
        if self.scales.dtype not in SCALES:
            raise refuse(f"scales are {self.scales.dtype}; expected float32, bfloat16 or float16")

    def _check_shapes(self) -> None:
        packed = tuple(self.qweight.shape)
        if len(packed) != 2 or packed != packed_shape(self.out_features, self.in_features):
            raise refuse(
                f"packed weight of shape {packed} does not hold {self.in_features} inputs: expected "
                f"(out / {N_STEP}, {-(-self.in_features // TILE_K) * WORDS_PER_TILE})"
            )
        fold_of(self.group_size)
        groups = 1 if self.group_size == -1 else -(-self.in_features // self.group_size)
        if tuple(self.scales.shape) != (groups, self.out_features):
            raise refuse(
                f"scales of shape {tuple(self.scales.shape)}; expected ({groups}, {self.out_features}), group by output"
            )
        begin, width = self.k_begin, self.width
        if begin < 0 or begin % K_STEP or width == 0 or width % K_STEP or begin + width > self.in_features:
            raise refuse(
                f"x has {width} features from input {begin} on; a range of the layer's {self.in_features} inputs "
                f"that begins and ends at a multiple of {K_STEP} is needed"
            )

    def _check_extras(self) -> None:
        bias, addend = self.bias, self.addend
        if bias is not None and (tuple(bias.shape) != (self.out_features,) or bias.dtype != torch.float32):
            raise refuse(f"bias is {bias.dtype} {tuple(bias.shape)}; expected float32 ({self.out_features},)")
        if addend is not None:
            expected = (*self.x.shape[:-1], self.out_features)
            if tuple(addend.shape) != expected or addend.dtype != torch.float32:
                raise refuse(f"addend is {addend.dtype} {tuple(addend.shape)}; expected float32 {expected}")


def _check_alignment(x: torch.Tensor, named: dict[str, torch.Tensor]) -> None:
    if x.shape[0] > 1 and x.stride(0) % 8:
        raise refuse(f"x has a row stride of {x.stride(0)} elements; the kernel needs a multiple of 8")
    for name, tensor in named.items():
        if tensor.data_ptr() % 16:
            raise refuse(f"{name} starts at an address that is not a multiple of 16: .clone() it")


def workspace_size(backend: Backend, layer: tuple[int, int, int, int], rows: int) -> tuple[int, int]:
    """Count partial sums and counters for (out_features, k_begin, k_end, group_size) at 1 to `rows` tokens."""
    floats = counters = 0
    for tiles in (1, 2, 4):
        shape = GemmShape(*layer, tiles)
        plan = make_plan(shape, backend.limits, backend.ring_stages)
        counters = shape.pairs
        if plan.slices > 1:
            floats = max(floats, plan.slices * shape.pairs * 256 * tiles)
        if tiles >= token_tiles_for(min(rows, TOKENS_PER_LAUNCH)):
            break
    if rows > TOKENS_PER_LAUNCH:
        # The number of slices does not change with the deeper rings of shorter scales.
        for tokens in range(WARP_TOKENS, rows + WARP_TOKENS, WARP_TOKENS):
            tiled = make_tiled_plan(layer, tokens, backend.limits, stages=backend.ring_stages)
            floats, counters = max(floats, tiled.partial_floats), max(counters, tiled.units)
    return floats, counters


def launch_gemm(
    backend: Backend,
    p: Product,
    out: torch.Tensor,
    workspace: Workspace,
    *,
    plan: NarrowPlan | TiledPlan | None = None,
) -> None:
    """Launch the product for x (rows, width) into out (rows, out_features).

    Up to 32 rows run in `w4a16_gemm.cu`, more in `w4a16_tiled.cu`. The caller checks types and shapes
    (`Product.checked`). This function checks what only a kernel needs. `plan`
    replaces the cheapest cut: a `NarrowPlan` for up to 32 rows, else a `TiledPlan`.

    Raises
    ------
    KernelError
        If a pointer or a row stride is not aligned.
    """
    x, layer, table = p.x, p.layer, "-table" * (p.levels is not None)
    _check_alignment(x, {"x": x, "qweight": p.qweight, "scales": p.scales})
    rows, types = x.shape[0], (ACTIVATIONS[x.dtype] + table, SCALES[p.scales.dtype])
    launched: _Launch
    if rows > TOKENS_PER_LAUNCH:
        assert not isinstance(plan, NarrowPlan), "a cut for at most 32 tokens"
        cut = plan or make_tiled_plan(layer, rows, backend.limits, *types, stages=backend.ring_stages)
        launched = _Launch.tiled(cut)
    else:
        shape = GemmShape(*layer, token_tiles_for(rows))
        assert not isinstance(plan, TiledPlan), "a cut for more than 32 tokens"
        launched = _Launch.narrow(
            plan or make_plan(shape, backend.limits, backend.ring_stages), shape, rows, *types
        )
    flags = _OUT_FLOAT32 if out.dtype == torch.float32 else 0
    if launched.reads_weights_once and p.qweight.numel() * 4 > _STAYS_IN_L2_BYTES:
        flags |= _EVICT_FIRST
    strides = (x.stride(0), out.stride(0), 0 if p.addend is None else p.addend.stride(0))
    numbers = (rows, layer[0], -(-p.in_features // TILE_K), *layer[1:3], *strides)
    backend.launch(
        launched.kernel,
        launched.grid,
        launched.threads,
        launched.shared_bytes,
        (
            *(t.data_ptr() for t in (x, p.qweight, p.scales, out)),
            *(0 if t is None else t.data_ptr() for t in (p.bias, p.addend)),
            *(workspace.partials.data_ptr(), workspace.counters.data_ptr()),
            *(np.int32(v) for v in (*numbers, launched.group_shift, p.scales.shape[0], flags)),
            *level_bytes(p.levels),
        ),
    )


@dataclass(frozen=True)
class _Launch:
    """Launch parameters of a cut."""

    kernel: Kernel
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    group_shift: int
    reads_weights_once: bool

    @classmethod
    def narrow(cls, cut: NarrowPlan, shape: GemmShape, rows: int, activation: str, scales: str) -> _Launch:
        variant = Variant(activation, shape.token_tiles, cut.fold, cut.stages, scales)
        return cls(
            Kernel("w4a16_gemm.cu", "loopq_w4a16_gemm", variant.defines, partial(prove, variant)),
            (cut.blocks, cut.slices),
            cut.warps * 32,
            cut.shared_bytes(rows, shape.token_tiles),
            cut.group_shift,
            reads_weights_once=True,
        )

    @classmethod
    def tiled(cls, cut: TiledPlan) -> _Launch:
        variant = cut.variant
        return cls(
            Kernel("w4a16_tiled.cu", "loopq_w4a16_tiled", variant.defines, partial(prove, variant)),
            (cut.blocks, cut.slices),
            variant.threads,
            cut.shared_bytes,
            cut.group_shift,
            reads_weights_once=cut.token_blocks == 1,
        )


def launch_dequantize(backend: Backend, p: Product, out: torch.Tensor) -> None:
    """Write s * q into out (out_features, in_features), rounded once to its type (bfloat16 or float16)."""
    out_features, in_features = out.shape
    tiles = p.qweight.numel() // WORDS_PER_TILE
    kind = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[p.scales.dtype]
    group = in_features if p.group_size == -1 else p.group_size
    numbers = (out_features, in_features, -(-in_features // TILE_K), group, p.scales.shape[0], kind)
    defines = f"-DLQ_FLOAT16={int(out.dtype == torch.float16)}", f"-DLQ_TABLE={int(p.levels is not None)}"
    backend.launch(
        Kernel("w4_dequantize.cu", "loopq_w4_dequantize", defines),
        (min(-(-tiles // 8), 16 * backend.limits.multiprocessors), 1),
        256,
        0,
        (
            *(t.data_ptr() for t in (p.qweight, p.scales, out)),
            *(np.int32(v) for v in numbers),
            *level_bytes(p.levels),
        ),
    )


#: A table whose bytes all differ, for the proof.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_GROUP_OF_FOLD = {fold_of(size)[0]: size for size in (32, 64, 128, 256)}


def _cut_in_two(
    variant: Variant | TiledVariant, layer: tuple[int, int, int, int], backend: Backend
) -> tuple[int, NarrowPlan | TiledPlan, Workspace]:
    """Tokens that fill a block of the variant, a cut into two slices, and their workspace."""
    if isinstance(variant, TiledVariant):
        tokens = WARP_TOKENS * variant.token_warps
        types = (variant.activation, variant.scales)
        tiled = make_tiled_plan(layer, tokens, backend.limits, *types, variant.stages, slices=2)
        return tokens, tiled, Workspace.allocate(tiled.partial_floats, tiled.units, backend.device)
    shape = GemmShape(*layer, variant.token_tiles)
    plan = make_plan(shape, backend.limits, variant.stages, slices=2)
    floats = plan.slices * shape.pairs * 256 * variant.token_tiles
    return 8 * variant.token_tiles, plan, Workspace.allocate(floats, shape.pairs, backend.device)


def prove(variant: Variant | TiledVariant, backend: Backend) -> None:
    """Multiply a small layer with a newly loaded kernel. All sums are of small integers or sixteenths, so it is exact.

    The layer contains every code, a short last group and a half-empty pair of strips. It is cut into two slices. The
    kernel relies on properties such as subnormal 16-bit operands. A device or compiler without them raises an error at
    the first call instead of giving wrong answers.

    Raises
    ------
    KernelError
        If the product is wrong.
    """
    k, n, group = 416, 48, _GROUP_OF_FOLD[variant.fold]
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.arange(n * k) % 16 - 8).reshape(n, k).astype(np.int8)
    scales = torch.from_numpy(rng.integers(1, 5, (-(-k // group), n)).astype(np.float32))
    tokens, plan, workspace = _cut_in_two(variant, (n, 0, k, group), backend)
    x = torch.from_numpy(rng.integers(-8, 9, (tokens, k)).astype(np.float32))
    kind, _, table = variant.activation.partition("-")
    levels = _LEVELS if table else None
    values = torch.arange(-8.0, 8.0) if levels is None else torch.tensor(levels) / 16
    weight = (
        values.double()[codes.astype(np.int64) + 8] * scales.double().repeat_interleave(group, dim=0)[:k].t()
    )
    expected = x.double() @ weight.t()
    out = torch.full((len(x), n), torch.nan, device=backend.device)
    activations = {name: dtype for dtype, name in ACTIVATIONS.items()}[kind]
    kept = scales.to(backend.device, {name: dtype for dtype, name in SCALES.items()}[variant.scales])
    words = torch.from_numpy(pack_w4(codes)).to(backend.device)
    product = Product(x.to(backend.device, activations), words, kept, None, None, k, group, levels=levels)
    launch_gemm(backend, product, out, workspace, plan=plan)
    wrong = int((out.cpu().double() != expected).sum())
    if wrong:
        raise KernelError(
            f"w4a16_linear: the int4 kernel for {variant} is wrong on {backend.device}, in {wrong} of {out.numel()} "
            f"outputs of a known layer. It is not used. Move the layer to the CPU for the reference path, and report "
            f"this with the name of the GPU and the versions of its driver and of CuPy"
        )
