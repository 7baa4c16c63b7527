"""Layers solved by the core and by its twin in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from loopq.quantizers import Problem
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.loop_metric import LoopMetric
from loopq.quantizers.twin import beam
from loopq.quantizers.twin.descent import Rows, spread
from loopq.quantizers.twin.factor import Factors
from loopq.quantizers.twin.grid import Codes
from tests.support.problems import correlated

CPU = torch.device("cpu")


def problems(rows, columns, n=1, *, loop=False, block=512, seed=0, **settings):
    """Layers with one input, the settings that they are solved with, and a loop metric for each if asked for."""
    rng, config = np.random.default_rng(seed), LayerConfig.of(**{"rotation": "none"} | settings)
    hessian, layers = correlated(rng, columns), []
    for i in range(n):
        weight = rng.normal(size=(rows, columns)) * (1 + rng.random((rows, 1)))
        left = tuple(correlated(rng, min(block, rows - first)) for first in range(0, rows, block))
        metric = LoopMetric(left, correlated(rng, columns), 64) if loop else None
        weight = weight.astype(np.float32)
        layers.append(Problem(f"layer-{i}", weight, hessian, config.grid, threads=1, metric=metric))
    return config, layers


def loss(config, problem, layer):
    """tr(A D S D^T) as the solver counts it; without a loop metric tr(D S D^T)."""
    error = layer.dequantize().astype(np.float64) - problem.target
    s, blocks = problem.hessian, [np.eye(len(error))]
    if problem.metric is not None:
        s = problem.metric.combined(problem.hessian)
        blocks = problem.metric.floored(problem.target, s)
    s = s + np.diag(config.method.damping.vector(s))
    parts = np.split(error, np.cumsum([len(a) for a in blocks])[:-1])
    return sum(float(np.sum((a @ part @ s) * part)) for a, part in zip(blocks, parts, strict=True))


def compared(rows, columns, n=1, **settings):
    """Share of codes and scales that are the core's, how far the loss is from its, of the worst layer; and reports."""
    config, layers = problems(rows, columns, n, **settings)
    core = [config.quantize(p) for p in layers]
    twin = [p.layer(one, "twin") for p, one in zip(layers, config.method.twin(layers), strict=True)]
    pairs = list(zip(layers, core, twin, strict=True))
    return (
        min(float((a.codes == b.codes).mean()) for _, a, b in pairs),
        min(float((a.scales == b.scales).mean()) for _, a, b in pairs),
        max(abs(loss(config, p, b) / loss(config, p, a) - 1.0) for p, a, b in pairs),
        [(a.report, b.report) for _, a, b in pairs],
    )


def searched(d: int, n_paths: int, device: torch.device = CPU, **grid: Any) -> torch.Tensor:
    """Codes of seven rows of each of two layers."""
    rng = np.random.default_rng(d)
    s = torch.from_numpy(np.stack([correlated(rng, d) for _ in range(2)])).to(device)
    target = torch.from_numpy(rng.normal(size=(2, 7, d)).astype(np.float32)).to(device)
    settings = LayerConfig.of(method="gptq", **grid).grid
    codes = Codes.of(settings.make(), d, "mse", True, None, device)
    factors = Factors.of(s, torch.zeros_like(s[0, :2]), "conditional", ["", ""])
    known = codes.fit(codes.groups(target.double()), codes.groups(factors.energies()[:, None]))
    return beam.search(factors.in_order(target), factors, codes, known, n_paths)


def rounded(
    d: int, signed: bool, device: torch.device = CPU, **grid: Any
) -> tuple[torch.Tensor, Codes, Rows]:
    """Four rows of each of two layers, rounded to the nearest codes. One row is done."""
    rng = np.random.default_rng(d)
    s = torch.from_numpy(np.stack([correlated(rng, d) for _ in range(2)])).to(device)
    target = torch.from_numpy(rng.normal(size=(2, 4, d)).astype(np.float32)).to(device)
    settings = LayerConfig.of(method="gptq", **grid).grid
    codes = Codes.of(settings.make(), d, "mse", signed, None, device)
    scale, zero = codes.fit(codes.groups(target.double()), torch.ones(1, device=device))
    wide, offset = spread(codes, scale, d), spread(codes, zero, d)
    steps = codes.step(codes.code((target / wide).double(), offset.double()).float(), offset)
    values = (steps * wide).double()
    gradient = (values - target) @ s
    loss = ((values - target) * gradient).sum(-1)
    active = torch.ones_like(loss, dtype=torch.bool)
    active[0, 1] = False
    return s, codes, Rows(steps, values, gradient, scale.clone(), zero, loss, active)
