"""Dory over plain parts: its logits are those of transformers' class."""

from __future__ import annotations

import pytest
import torch

from loopq.errors import ConfigError
from tests.support.interop.vllm import DORY
from tests.support.vllm_parts import Attention


@pytest.mark.parametrize("n_loops", [1, 3])
def test_dory_computes_every_loop(parts, beside, n_loops):
    logits, expected, model = beside(parts("dory").Dory, DORY, n_recurrent_loops=n_loops)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    used = {m.prefix: (m.calls, m.sliding_window) for m in model.modules() if isinstance(m, Attention)}
    assert {calls for calls, _ in used.values()} == {1}
    assert {window for _, window in used.values()} <= {None, 6}
    assert model.embedding is model.backbone.embeddings
    assert model.inner is model.backbone


def test_other_caches_and_divided_heads_are_refused(parts, configured):
    settings = {"hidden_size": 16, "recurrent_kv_cache_mode": "shared"}
    with pytest.raises(ConfigError, match="recurrent_kv_cache_mode"):
        parts("dory").Dory(vllm_config=configured(settings, "DoryForCausalLM"))
    settings["recurrent_kv_cache_mode"] = "per_loop"
    with pytest.raises(ConfigError, match="--tensor-parallel-size 1"):
        parts("dory").Dory(vllm_config=configured(settings, "DoryForCausalLM", tensor_parallel_size=2))


def test_vectors_become_units(parts):
    unit = parts("dory")._unit
    torch.testing.assert_close(unit(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6, 0.8]]))
    assert unit(torch.zeros(2)).tolist() == [0, 0]
    # As long as 1e-3, the small number in the root makes half of it.
    assert float(unit(torch.tensor([1e-3, 0.0]))[0]) == pytest.approx(0.5**0.5)
    assert unit(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
