"""On a GPU: results against float64, and the operator itself (`make test-gpu`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benches.kernels.procedure import verify_products
from benches.kernels.shapes import HUGINN, Projection
from loopq.errors import KernelError
from loopq.quantizers.cuda.load import cuda_backend
from loopq.runtime.generate import Decoder, Generation
from loopq.systems.base import Batch
from tests.support.linear import linear_of
from tests.support.systems import CASES, open_system

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_products_of_huginn() -> None:
    records = verify_products(cuda_backend(0), HUGINN)
    assert len(records) == 51
    for r in records:
        assert r["error_float32"] <= 3e-6
        assert r["error_rounded"] <= 2e-4
        assert r["repeatable"]
        assert r["same_in_batch"]


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_edges(group_size: int) -> None:
    edges = [Projection("edge", k, n, 1) for k, n in ((32, 16), (96, 48), (1312, 336))]
    for r in verify_products(cuda_backend(0), edges, tokens=(1, 8, 9, 24, 33, 64), group_size=group_size):
        assert r["error_float32"] <= 3e-6


def test_the_operator_agrees_with_the_reference_and_refuses() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (48, 416)).astype(np.int8)
    layer = linear_of(codes, rng.uniform(0.5, 2, (48, 4)).astype(np.float32), 128, 4)
    for tokens in (1, 64, 65):
        x = torch.randn(tokens, 416, generator=torch.Generator().manual_seed(1)).bfloat16()
        expected = layer.cpu()(x).float()
        product = layer.cuda()(x.cuda()).float().cpu()
        # Above 64 tokens the weights are rounded to bfloat16 first.
        allowed = 4e-3 if tokens <= 64 else 8e-3
        assert torch.linalg.norm(product - expected) <= allowed * torch.linalg.norm(expected)
    with pytest.raises(KernelError, match="move the layer or the input"):
        layer.cuda()(torch.ones(1, 416).bfloat16())
    with pytest.raises(KernelError, match="takes bfloat16 and float16"):
        layer.cuda()(torch.ones(1, 416, device="cuda"))


def test_a_decoding_step_is_one_graph() -> None:
    system = open_system(CASES["looped Llama"])
    system.model.cuda().bfloat16()
    decoder = Decoder(system, 2, Generation())
    assert decoder.backend.name == "graph"
    text = [5, 9, 7, 30, 11, 12]
    for token in (8, 21, 4, 17):
        expected = system.rollout(Batch(torch.tensor([text]), (0,), by_token=True), 2)[0, -1].float().cpu()
        assert torch.linalg.norm(decoder(text) - expected) <= 5e-2 * torch.linalg.norm(expected)
        text = [*text, token]
