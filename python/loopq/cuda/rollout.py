"""Whole N-step rollouts of a Huginn-like loop: 34 launches per step, captured in one CUDA graph per shape.

A step is ``x = adapter([s; e])``, then for each block ``x = norm_2(attn(norm_1(x)) + x)`` and ``x =
norm_4(mlp(norm_3(x)) + x)``, and ``s = x``. A `QuantLinear` layer uses the int4 kernel. A plain linear layer uses
cuBLAS. Both sides of a comparison share everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from loopq.cuda.fused import (
    MAX_ATTENTION_TOKENS,
    add_norm,
    rope_attention,
    rotation_table,
    swiglu,
)
from loopq.cuda.launch import Workspace, launch_gemm, workspace_for
from loopq.cuda.load import Backend, Captured
from loopq.errors import ConfigError, KernelError

TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class BlockParts:
    """The modules and weights of one recurrent block."""

    wqkv: torch.nn.Module
    proj: torch.nn.Module
    fc: torch.nn.Module
    mlp_proj: torch.nn.Module
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    qk_bias: torch.Tensor | None


@dataclass
class LoopParts:
    """A Huginn-like loop: the adapter, the blocks, and what attention and norms need."""

    adapter: torch.nn.Module
    blocks: list[BlockParts]
    n_heads: int
    epsilon: float
    rotation: torch.Tensor

    @property
    def width(self) -> int:
        return int(self.blocks[0].norms[0].shape[0])

    @property
    def head(self) -> int:
        return self.width // self.n_heads

    def products(self) -> list[torch.nn.Module]:
        """The linear layers of one step in call order."""
        found = [self.adapter]
        for block in self.blocks:
            found += [block.wqkv, block.proj, block.fc, block.mlp_proj]
        return found

    @classmethod
    def from_model(cls, model: Any) -> LoopParts:
        """Parts of a model with Huginn's module names.

        Parameters
        ----------
        model : torch.nn.Module
            The model has ``transformer.adapter`` and ``transformer.core_block[i]``. A block has ``attn.Wqkv``,
            ``attn.proj``, ``mlp.fc``, ``mlp.proj``, ``norm_1 .. norm_4`` and optionally ``attn.qk_bias``. The config
            has ``n_heads`` (or ``num_attention_heads``), ``norm_eps`` and ``rope_base``.

        Raises
        ------
        ConfigError
            If the model has other names.
        """
        try:
            config = model.config
            n_heads = int(getattr(config, "n_heads", 0) or config.num_attention_heads)
            blocks = [
                BlockParts(
                    wqkv=block.attn.Wqkv,
                    proj=block.attn.proj,
                    fc=block.mlp.fc,
                    mlp_proj=block.mlp.proj,
                    norms=tuple(getattr(block, f"norm_{i}").weight.detach() for i in (1, 2, 3, 4)),
                    qk_bias=_flat_bias(getattr(block.attn, "qk_bias", None), n_heads),
                )
                for block in model.transformer.core_block
            ]
            adapter = model.transformer.adapter
            epsilon, base = float(config.norm_eps), float(config.rope_base)
        except AttributeError as error:
            raise ConfigError(
                f"the rollout runner needs Huginn's module names (transformer.adapter, "
                f"transformer.core_block.i.attn.Wqkv, ...): {error}"
            ) from error
        weight = blocks[0].norms[0]
        rotation = rotation_table(MAX_ATTENTION_TOKENS, weight.shape[0] // n_heads, base, weight.device)
        return cls(adapter, blocks, n_heads, epsilon, rotation)


def _flat_bias(bias: torch.Tensor | None, n_heads: int) -> torch.Tensor | None:
    # A copy is contiguous and aligned even if the source is a slice.
    return (
        None
        if bias is None
        else bias.detach().reshape(2, n_heads, -1).clone(memory_format=torch.contiguous_format)
    )


@dataclass
class _Buffers:
    """Buffers of a rollout of one shape. Their addresses are fixed so that a graph can use them."""

    stacked: torch.Tensor  # [s; e]
    stream: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    branch: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor
    workspace: Workspace

    @property
    def state(self) -> torch.Tensor:
        return self.stacked[:, : self.stream.shape[1]]

    @property
    def embedding(self) -> torch.Tensor:
        return self.stacked[:, self.stream.shape[1] :]


class RolloutRunner:
    """Runs N-step rollouts with fused small operations, eagerly or as CUDA graphs.

    Parameters
    ----------
    parts : LoopParts
        Layers are `QuantLinear` in the packed layout, or plain linear layers without bias.
    backend : Backend
        `loopq.cuda.load.CudaBackend`, or a stand-in.

    Attributes
    ----------
    n_products : int
        Products launched since the runner was created (a graph counts when it is captured).

    Notes
    -----
    There is no key-value cache. Sequences have at most 64 tokens and start at position 0. A shorter sequence runs in
    the next larger bucket. Attention is causal, so the padding rows behind it change nothing.

    A runner owns its buffers and its workspace, so each stream needs its own runner.

    Raises
    ------
    ConfigError
        If a layer is of another kind.
    KernelError
        If the model is on another device than the backend, or its norms are not bfloat16 or float16.
    """

    def __init__(self, parts: LoopParts, backend: Backend) -> None:
        _check_parts(parts, backend)
        self.parts = parts
        self.backend = backend
        self.n_products = 0
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        self._graphs: dict[tuple[int, int, int], Captured] = {}

    def run(
        self, state: torch.Tensor, embedding: torch.Tensor, n_steps: int, graph: bool = False
    ) -> torch.Tensor:
        """State after `n_steps` steps.

        Parameters
        ----------
        state, embedding : torch.Tensor of shape (sequences, tokens, width)
            In the type of the model's weights.
        n_steps : int
        graph : bool
            Replay the graph that `capture` made for this shape.

        Returns
        -------
        torch.Tensor, shape (sequences, tokens, width)

        Raises
        ------
        KernelError
            If a shape, type or device is wrong, the sequence is too long, or its graph was not captured.
        """
        self._check_inputs(state, embedding, n_steps)
        sequences, tokens, width = state.shape
        bucket = self.bucket(tokens)
        buffers = self._buffers_for(sequences, bucket)
        for source, target in ((state, buffers.state), (embedding, buffers.embedding)):
            target.view(sequences, bucket, width)[:, :tokens].copy_(source)
        if graph:
            captured = self._graphs.get((sequences, bucket, n_steps))
            if captured is None:
                raise KernelError(
                    f"no graph of {sequences} sequences in the bucket of {bucket} tokens and {n_steps} "
                    f"steps: call capture({sequences}, {tokens}, {n_steps}) first"
                )
            captured.replay()
        else:
            self._rollout(buffers, bucket, n_steps)
        return buffers.state.reshape(sequences, bucket, width)[:, :tokens].clone()

    def capture(self, sequences: int, tokens: int, n_steps: int) -> None:
        """Capture the rollout of a shape. One step runs first, so that everything is compiled and loaded."""
        bucket = self.bucket(tokens)
        buffers = self._buffers_for(sequences, bucket)
        counted = self.n_products

        def warm_up() -> None:
            self._rollout(buffers, bucket, 1)
            self.n_products = counted

        captured = self.backend.capture(lambda: self._rollout(buffers, bucket, n_steps), warm_up)
        self._graphs[(sequences, bucket, n_steps)] = captured

    def _check_inputs(self, state: torch.Tensor, embedding: torch.Tensor, n_steps: int) -> None:
        like = self.parts.blocks[0].norms[0]
        if n_steps < 1:
            raise KernelError(f"a rollout of {n_steps} steps; at least 1 is needed")
        for name, tensor in (("state", state), ("embedding", embedding)):
            if tensor.dim() != 3 or tensor.shape[-1] != self.parts.width or tensor.shape != state.shape:
                raise KernelError(
                    f"{name} has shape {tuple(tensor.shape)}; state and embedding are both (sequences, tokens, "
                    f"{self.parts.width})"
                )
            if tensor.dtype != like.dtype or tensor.device != like.device:
                raise KernelError(
                    f"{name} is {tensor.dtype} on {tensor.device}; the model runs in {like.dtype} on {like.device}: "
                    f"move or cast it"
                )

    def bucket(self, tokens: int) -> int:
        """The smallest bucket that holds `tokens` tokens of a sequence.

        Raises
        ------
        KernelError
            If `tokens` is below 1 or above 64.
        """
        for size in TOKEN_BUCKETS:
            if 1 <= tokens <= size:
                return size
        raise KernelError(
            f"{tokens} tokens; the fused rollout takes sequences of 1 up to {TOKEN_BUCKETS[-1]}. "
            f"Use the model's own forward pass for longer ones"
        )

    def _buffers_for(self, sequences: int, bucket: int) -> _Buffers:
        found = self._buffers.get((sequences, bucket))
        if found is None:
            found = self._buffers[(sequences, bucket)] = self._allocate(sequences * bucket)
        return found

    def _allocate(self, rows: int) -> _Buffers:
        parts = self.parts
        like = parts.blocks[0].norms[0]
        inner = parts.blocks[0].mlp_proj.in_features

        def empty(columns: int) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=like.dtype, device=like.device)

        width = parts.width
        quantized = [layer for layer in parts.products() if _holds_codes(layer)]
        layers = [(layer.out_features, 0, layer.in_features, layer.group_size) for layer in quantized]
        workspace = (
            workspace_for(self.backend, layers, rows, like.device)
            if layers
            else Workspace.allocate(0, 0, like.device)
        )
        return _Buffers(
            stacked=empty(2 * width),
            stream=empty(width),
            normed=empty(width),
            qkv=empty(3 * width),
            attended=empty(width),
            branch=empty(width),
            gate_up=empty(2 * inner),
            gated=empty(inner),
            workspace=workspace,
        )

    def _product(self, layer: Any, x: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
        self.n_products += 1
        if _holds_codes(layer):
            launch_gemm(self.backend, layer.product(x), out, workspace)
        else:
            torch.mm(x, layer.weight.detach().t(), out=out)

    def _rollout(self, b: _Buffers, bucket: int, n_steps: int) -> None:
        with torch.no_grad():
            for _ in range(n_steps):
                self._product(self.parts.adapter, b.stacked, b.stream, b.workspace)
                norm = self.parts.blocks[0].norms[0]
                add_norm(self.backend, b.stream, None, norm, b.normed, None, self.parts.epsilon)
                for index in range(len(self.parts.blocks)):
                    self._block(b, bucket, index)

    def _block(self, b: _Buffers, bucket: int, index: int) -> None:
        parts, block = self.parts, self.parts.blocks[index]
        last = index == len(parts.blocks) - 1
        self._product(block.wqkv, b.normed, b.qkv, b.workspace)
        rope_attention(self.backend, b.qkv, block.qk_bias, parts.rotation, b.attended, parts.n_heads, bucket)
        self._product(block.proj, b.attended, b.branch, b.workspace)
        second = block.norms[2], b.normed
        add_norm(self.backend, b.branch, b.stream, block.norms[1], b.stream, second, parts.epsilon)
        self._product(block.fc, b.normed, b.gate_up, b.workspace)
        swiglu(self.backend, b.gate_up, b.gated)
        self._product(block.mlp_proj, b.gated, b.branch, b.workspace)
        y, following = (b.state, None) if last else (b.stream, (parts.blocks[index + 1].norms[0], b.normed))
        add_norm(self.backend, b.branch, b.stream, block.norms[3], y, following, parts.epsilon)


def _check_parts(parts: LoopParts, backend: Backend) -> None:
    for layer in parts.products():
        _check_layer(layer)
    like = parts.blocks[0].norms[0]
    if like.dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(
            f"the norms are {like.dtype}; the fused rollout runs in bfloat16 or float16: model.bfloat16()"
        )
    tensors = [parts.rotation, *(norm for block in parts.blocks for norm in block.norms)]
    for layer in parts.products():
        tensors.append(layer.qweight if _holds_codes(layer) else layer.weight)
    for tensor in tensors:
        if tensor.device != backend.device:
            raise KernelError(
                f"the model has a tensor on {tensor.device}, the backend runs on {backend.device}: "
                f"model.to({str(backend.device)!r})"
            )


def _holds_codes(layer: Any) -> bool:
    """Whether a layer is a `loopq.inference.linear.QuantLinear`. That module imports this package."""
    return hasattr(layer, "layout") and hasattr(layer, "qweight")


def _check_layer(layer: Any) -> None:
    if _holds_codes(layer):
        if layer.layout != "lq-w4":
            raise ConfigError(
                f"{layer} is not in the kernel's layout (4 bits, out % 16, in % 32); the rollout runner needs it"
            )
    elif getattr(layer, "weight", None) is None or getattr(layer, "bias", None) is not None:
        raise ConfigError(
            f"{type(layer).__name__}: the rollout runner takes QuantLinear, or linear layers without bias"
        )
