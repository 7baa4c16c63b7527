"""Measurements of whole rollouts on a Huginn-like loop with random weights: graphs, fusions, the eager way.

Only the loop is timed (N steps of the adapter and its blocks); prelude, coda and head run once per forward
pass and are the same in every variant. The latencies of Li, Sec. 6.2 include them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benches.kernels.procedure import TOKENS, Procedure, Timing, paired_trials, ratio_of, relative_l2
from loopq.cuda.fused import MAX_ATTENTION_TOKENS, rotation_table
from loopq.cuda.layout import TILE_K, WORDS_PER_TILE
from loopq.cuda.load import Backend
from loopq.cuda.rollout import BlockParts, LoopParts, RolloutRunner
from loopq.cuda.w4a16 import dequantize_packed
from loopq.inference.layout import Held
from loopq.inference.linear import QuantLinear
from loopq.layers.grids.integer import Integer

__all__ = [
    "EagerLoop",
    "LoopSize",
    "compare_rollouts",
    "random_inputs",
    "random_parts",
    "same_bits_overlapping",
    "verify_rollout",
]


@dataclass(frozen=True)
class LoopSize:
    """Width, heads, inner width of the MLP and number of blocks of a Huginn-like loop."""

    width: int = 5280
    heads: int = 55
    inner: int = 17920
    blocks: int = 4


def random_parts(
    size: LoopSize, device: torch.device, *, quantized: bool, group_size: int = 128, seed: int = 0
) -> LoopParts:
    """A loop of random weights, made on the device; the two variants of a seed hold the same numbers.

    The plain variant's weights are the quantized one's, rounded to bfloat16.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def linear(out_features: int, in_features: int) -> torch.nn.Module:
        tiles = -(-in_features // TILE_K)
        words = torch.randint(
            -(2**31), 2**31, (out_features // 16, tiles * WORDS_PER_TILE), generator=generator, device=device
        ).to(torch.int32)
        groups = -(-in_features // group_size)
        scales = torch.rand(groups, out_features, generator=generator, device=device) + 0.5
        scales = (scales / (5.0 * in_features**0.5)).to(torch.bfloat16)
        held = Held(out_features, in_features, Integer(4, group_size, "bfloat16"))
        layer = QuantLinear("lq-w4", words, scales, held=held)
        if quantized:
            return layer
        plain = torch.nn.Linear(in_features, out_features, bias=False, device="meta", dtype=torch.bfloat16)
        plain.weight = torch.nn.Parameter(_dense(layer), requires_grad=False)
        return plain

    def vector(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=generator, device=device) + 0.5).to(torch.bfloat16)

    width, head = size.width, size.width // size.heads
    adapter = linear(width, 2 * width)
    blocks = [
        BlockParts(
            wqkv=linear(3 * width, width),
            proj=linear(width, width),
            fc=linear(2 * size.inner, width),
            mlp_proj=linear(width, size.inner),
            norms=(vector(width), vector(width), vector(width), vector(width)),
            qk_bias=vector(2, size.heads, head),
        )
        for _ in range(size.blocks)
    ]
    rotation = rotation_table(MAX_ATTENTION_TOKENS, head, 50000.0, device)
    return LoopParts(adapter, blocks, size.heads, 1e-6, rotation)


def _dense(layer: QuantLinear) -> torch.Tensor:
    return dequantize_packed(layer.product(layer.scales)).to(torch.bfloat16)


class EagerLoop:
    """The loop as published model code runs it: one torch operation after another, in bfloat16.

    Products are the layers' own forward passes: cuBLAS, or the int4 operator.
    """

    def __init__(self, parts: LoopParts) -> None:
        self.parts = parts

    def run(self, state: torch.Tensor, embedding: torch.Tensor, n_steps: int) -> torch.Tensor:
        """State (sequences, tokens, width) after `n_steps` steps."""
        with torch.no_grad():
            for _ in range(n_steps):
                x = self.parts.adapter(torch.cat((state, embedding), dim=-1))
                for block in self.parts.blocks:
                    x = self._norm(self._attention(block, self._norm(x, block.norms[0])) + x, block.norms[1])
                    x = self._norm(self._mlp(block, self._norm(x, block.norms[2])) + x, block.norms[3])
                state = x
        return state

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        v = x.float()
        return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.parts.epsilon)).to(x.dtype) * weight

    def _turn(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cosine, sine = self.parts.rotation[:tokens].unsqueeze(1).unbind(-1)
        even, odd = pairs.unbind(-1)
        return (
            torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), -1).flatten(-2).to(x.dtype)
        )

    def _attention(self, block: BlockParts, x: torch.Tensor) -> torch.Tensor:
        sequences, tokens, width = x.shape
        shape = (sequences, tokens, self.parts.n_heads, self.parts.head)
        q, k, v = (t.reshape(shape) for t in block.wqkv(x).chunk(3, dim=-1))
        if block.qk_bias is not None:
            q, k = q + block.qk_bias[0], k + block.qk_bias[1]
        q, k = self._turn(q, tokens), self._turn(k, tokens)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=tokens > 1
        )
        result: torch.Tensor = block.proj(mixed.transpose(1, 2).reshape(sequences, tokens, width))
        return result

    def _mlp(self, block: BlockParts, x: torch.Tensor) -> torch.Tensor:
        gate, up = block.fc(x).chunk(2, dim=-1)
        result: torch.Tensor = block.mlp_proj(torch.nn.functional.silu(gate) * up)
        return result


def random_inputs(
    size: LoopSize, tokens: int, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """State and embedding, (1, tokens, width): noise of Huginn's scale, and unit variance."""
    generator = torch.Generator(device).manual_seed(seed)
    state, embedding = (
        torch.randn(1, tokens, size.width, generator=generator, device=device).to(torch.bfloat16)
        for _ in range(2)
    )
    return state * 0.632, embedding


def verify_rollout(
    backend: Backend,
    *,
    size: LoopSize,
    n_steps: int,
    tokens: Sequence[int] = TOKENS,
    graphs: bool = True,
) -> list[dict[str, Any]]:
    """Counts of products, graph replay against eager launches bit for bit, and distance to the eager loop.

    Returns
    -------
    list of dict
        Per number of tokens: ``n_products`` of an eager rollout (544 for Huginn and 32 steps),
        ``replay_equals_eager`` (two replays, None without graphs), and ``from_eager_loop`` after one step.
    """
    device = backend.device
    parts = random_parts(size, device, quantized=True)
    runner = RolloutRunner(parts, backend)
    records = []
    for m in tokens:
        state, embedding = random_inputs(size, m, device, seed=m)
        before = runner.n_products
        eager = runner.run(state, embedding, n_steps)
        counted = runner.n_products - before
        equal: bool | None = None
        if graphs:
            runner.capture(1, m, n_steps)
            replays = [runner.run(state, embedding, n_steps, graph=True) for _ in range(2)]
            equal = all(torch.equal(replay, eager) for replay in replays)
        one = runner.run(state, embedding, 1)
        records.append(
            {
                "tokens": m,
                "n_steps": n_steps,
                "n_products": counted,
                "replay_equals_eager": equal,
                "from_eager_loop": relative_l2(one, EagerLoop(parts).run(state, embedding, 1)),
            }
        )
    return records


def same_bits_overlapping(
    plain: Backend, overlapping: Backend, *, size: LoopSize, n_steps: int, tokens: int = 7, seeds: int = 3
) -> bool:
    """Whether graphs of overlapping launches give the bits of ordinary ones."""
    parts = random_parts(size, plain.device, quantized=True)
    results: list[list[torch.Tensor]] = []
    for backend in (plain, overlapping):
        runner = RolloutRunner(parts, backend)
        runner.capture(1, tokens, n_steps)
        inputs = [random_inputs(size, tokens, plain.device, seed) for seed in range(seeds)]
        results.append([runner.run(*given, n_steps, graph=True) for given in inputs])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def compare_rollouts(
    backends: dict[str, Backend],
    *,
    size: LoopSize,
    n_steps: int = 32,
    tokens: Sequence[int] = TOKENS,
    procedure: Procedure | None = None,
) -> list[dict[str, Any]]:
    """Paired trials of int4 against bfloat16: the same graph and fusions, and the eager way.

    Parameters
    ----------
    backends : dict of str to Backend
        "plain" launches, and optionally "overlap" for launches that overlap.
    size : LoopSize
    n_steps : int
    tokens : sequence of int
    procedure : Procedure or None
        That of Li, App. D by default.

    Returns
    -------
    list of dict
        Per number of tokens the milliseconds of every variant, and ratios with a 95 % interval from paired
        resampling.
    """
    procedure = procedure or Procedure()
    plain = backends["plain"]
    int4 = random_parts(size, plain.device, quantized=True)
    dense = random_parts(size, plain.device, quantized=False)
    records = []
    for m in tokens:
        state, embedding = random_inputs(size, m, plain.device, seed=m)
        variants: dict[str, Callable[[], object]] = {}
        for name, parts in (("int4", int4), ("bf16", dense)):
            for launch, backend in backends.items():
                runner = RolloutRunner(parts, backend)
                runner.capture(1, m, n_steps)
                variants[f"{name}_graph_{launch}"] = _replay(runner, state, embedding, n_steps)
            variants[f"{name}_eager"] = _eager(EagerLoop(parts), state, embedding, n_steps)
        # The same launches with other weights; and against the way published code runs.
        pairs = [(f"bf16{fast[4:]}", fast) for fast in variants if fast.startswith("int4")]
        pairs.append(("bf16_eager", "int4_graph_plain"))
        records.append({"tokens": m, "n_steps": n_steps, **_compare(plain, variants, pairs, procedure)})
    return records


def _replay(
    runner: RolloutRunner, state: torch.Tensor, embedding: torch.Tensor, n_steps: int
) -> Callable[[], object]:
    return lambda: runner.run(state, embedding, n_steps, graph=True)


def _eager(
    loop: EagerLoop, state: torch.Tensor, embedding: torch.Tensor, n_steps: int
) -> Callable[[], object]:
    return lambda: loop.run(state, embedding, n_steps)


def _compare(
    backend: Backend,
    variants: dict[str, Callable[[], object]],
    pairs: Sequence[tuple[str, str]],
    procedure: Procedure,
) -> dict[str, Any]:
    milliseconds: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for slow, fast in pairs:
        times = paired_trials(backend, variants[slow], variants[fast], procedure)
        ratios[f"{slow} / {fast}"] = ratio_of(*times)
        for name, samples in zip((slow, fast), times, strict=True):
            milliseconds[name] = Timing.of([t / 1000.0 for t in samples]).__dict__
    return {"milliseconds": milliseconds, "ratios": ratios}
