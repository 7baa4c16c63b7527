"""The fused small operations and the rollout runner, run through the emulation and compared with torch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loopq.cuda.rollout import LoopParts, RolloutRunner
from loopq.errors import ConfigError, KernelError
from tests.support.cuda.backend import EmulatedBackend
from tests.support.cuda.rollout import (
    WIDTH,
    draw,
    exact_rollout,
    huginn_like,
    relative,
)
from tests.support.cuda.twins import reference_rollout
from tests.support.linear import linear_of

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (1, 7), (2, 3)])
def test_rollout_is_as_good_as_the_reference(sequences: int, tokens: int, quantized: bool) -> None:
    model = huginn_like(quantized)
    parts = LoopParts.from_model(model)
    backend = EmulatedBackend()
    runner = RolloutRunner(parts, backend)
    state, embedding = draw(sequences, tokens, WIDTH), draw(sequences, tokens, WIDTH, seed=1)
    exact = exact_rollout(model, state, embedding, 3)
    error = relative(runner.run(state, embedding, 3), exact)
    assert error < 1.25 * relative(reference_rollout(parts, state, embedding, 3), exact)
    assert error < 0.05
    assert relative(exact_rollout(model, state, embedding, 2), exact) > 0.1, "a missing step would show"
    assert runner.n_products == 3 * 9
    small = backend.launches.total() - backend.launches["loopq_w4a16_gemm"]
    assert small == 3 * (1 + 2 * 4)
    assert backend.launches["loopq_w4a16_gemm"] == (runner.n_products if quantized else 0)


def test_reference_rollout_is_the_model() -> None:
    model = huginn_like(quantized=False, dtype=torch.float32)
    state, embedding = draw(1, 5, WIDTH, dtype=torch.float32), draw(1, 5, WIDTH, seed=1, dtype=torch.float32)
    out = reference_rollout(LoopParts.from_model(model), state, embedding, 3)
    assert relative(out, exact_rollout(model, state, embedding, 3)) < 1e-5


def test_rows_behind_a_short_sequence_change_nothing() -> None:
    parts = LoopParts.from_model(huginn_like(quantized=True))
    state, embedding = draw(1, 8, WIDTH), draw(1, 8, WIDTH, seed=1)
    runner = RolloutRunner(parts, EmulatedBackend())
    full = runner.run(state, embedding, 2)
    part = runner.run(state[:, :5], embedding[:, :5], 2)
    assert torch.equal(part, full[:, :5])


def test_runner_refuses() -> None:
    with pytest.raises(ConfigError, match=r"Huginn's module names.*adapter"):
        LoopParts.from_model(
            SimpleNamespace(config=SimpleNamespace(n_heads=1), transformer=SimpleNamespace(core_block=[]))
        )
    model = huginn_like(quantized=True)
    model.transformer.adapter = linear_of(np.zeros((96, 192), np.int8), np.ones((96, 3), np.float32), 64, 3)
    with pytest.raises(ConfigError, match="not in the kernel's layout"):
        RolloutRunner(LoopParts.from_model(model), EmulatedBackend())
    model.transformer.adapter = torch.nn.Linear(192, 96)
    with pytest.raises(ConfigError, match="linear layers without bias"):
        RolloutRunner(LoopParts.from_model(model), EmulatedBackend())
    runner = RolloutRunner(LoopParts.from_model(huginn_like(quantized=True)), EmulatedBackend())
    for tokens in (0, 65):
        with pytest.raises(KernelError, match="sequences of 1 up to 64"):
            runner.run(draw(1, tokens, WIDTH), draw(1, tokens, WIDTH), 1)
    with pytest.raises(KernelError, match=r"call capture\(1, 3, 2\) first"):
        runner.run(draw(1, 3, WIDTH), draw(1, 3, WIDTH), 2, graph=True)


@pytest.mark.parametrize(
    ("state", "embedding", "n_steps", "message"),
    [
        (draw(1, 3, WIDTH), draw(1, 1, WIDTH), 1, r"embedding has shape \(1, 1, 96\)"),
        (draw(3, WIDTH), draw(3, WIDTH), 1, r"state has shape \(3, 96\)"),
        (draw(1, 3, 95), draw(1, 3, 95), 1, r"both \(sequences, tokens, 96\)"),
        (draw(1, 3, WIDTH).float(), draw(1, 3, WIDTH), 1, "state is torch.float32 on cpu"),
        (draw(1, 3, WIDTH), draw(1, 3, WIDTH).to("meta"), 1, "embedding is torch.bfloat16 on meta"),
        (draw(1, 3, WIDTH), draw(1, 3, WIDTH), 0, "a rollout of 0 steps"),
    ],
)
def test_inputs_that_would_need_a_conversion_are_refused(
    state: torch.Tensor, embedding: torch.Tensor, n_steps: int, message: str
) -> None:
    runner = RolloutRunner(LoopParts.from_model(huginn_like(quantized=True)), EmulatedBackend())
    with pytest.raises(KernelError, match=message):
        runner.run(state, embedding, n_steps)


def test_a_model_elsewhere_or_of_another_type_is_refused() -> None:
    backend = EmulatedBackend()
    parts = LoopParts.from_model(huginn_like(quantized=True))
    parts.blocks[0].fc = parts.blocks[0].fc.to("meta")
    with pytest.raises(KernelError, match=r"a tensor on meta, the backend runs on cpu: model.to\('cpu'\)"):
        RolloutRunner(parts, backend)
    parts = LoopParts.from_model(huginn_like(quantized=False, dtype=torch.float32))
    with pytest.raises(KernelError, match=r"the norms are torch\.float32"):
        RolloutRunner(parts, backend)
