"""Plain parts in vLLM's place, small models, and their logits by loopq."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from loopq.models.load import load_model
from loopq.runtime.vllm.configs import CONFIGS
from loopq.systems.base import Batch
from tests.support import vllm_parts
from tests.support.interop import vllm

#: Sizes of `tests.support.interop.vllm`, an eighth of each width.
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "n_embd": 32, "intermediate_size": 64, "head_dim": 8, "block_size": 48,
    "max_position_embeddings": 48, "sliding_window": 6,
}  # fmt: skip
IDS = (5, 9, 1, 33, 60, 2, 2, 17, 40, 8)


@pytest.fixture
def parts(monkeypatch):
    """Import a module of `loopq.runtime.vllm` over plain parts."""
    yield from vllm_parts.installed(monkeypatch)


@pytest.fixture
def configured():
    """Make vLLM's configuration from a `config.json`."""

    def make(config, architecture=None, **parallel):
        name = architecture or config["architectures"][0]
        hf_config = CONFIGS[name][0](**config) if name in CONFIGS else SimpleNamespace(**config)
        hf_config.rope_theta = config.get("rope_theta", 10_000.0)
        if getattr(hf_config, "rope_parameters", None) is None:
            hf_config.rope_parameters = {"rope_type": "default", "rope_theta": hf_config.rope_theta}
        sizes = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1} | parallel
        return SimpleNamespace(
            model_config=SimpleNamespace(hf_config=hf_config, max_model_len=48), quant_config=None, cache_config=None,
            parallel_config=SimpleNamespace(**sizes),
        )  # fmt: skip

    return make


@pytest.fixture
def beside(tmp_path, configured):
    """Give the logits of a class over plain parts, and of the same weights by loopq."""

    def compare(cls, config, **changes):
        sized = {k: v for k, v in SMALL.items() if k in config}
        settings = config | sized | changes
        vllm.known()
        vllm.make(tmp_path / "m", settings)
        stored = json.loads((tmp_path / "m" / "config.json").read_text())
        system = load_model(str(tmp_path / "m")).system
        ids = torch.tensor(IDS)
        with torch.no_grad():
            expected = system.rollout(Batch(ids[None], (0,), by_token=True), system.n_steps)[0]
            model = cls(vllm_config=configured(stored))
            model.load_weights(load_file(tmp_path / "m" / "model.safetensors").items())
            logits = model.compute_logits(model(ids, torch.arange(len(ids))))
        return logits, expected, model

    return compare
