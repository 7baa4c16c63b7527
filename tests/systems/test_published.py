"""The adapters on published code: checkouts of it in the folder that LOOPQ_PUBLISHED names, tiny random weights.

Nothing of that code is part of loopq, so these tests run where somebody has put it: see docs/check-your-checkpoint.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import loopq
from loopq.models.check import check_model
from loopq.systems import find_system
from loopq.systems.base import Batch
from loopq.systems.fixed import FixedCached
from tests.support.systems import as_loaded, loopus_config

_RAVEN = {
    "n_embd": 64, "n_heads": 4, "n_layers": 4, "block_size": 64, "vocab_size": 128, "intermediate_size": 96,
    "mean_recurrence": 4, "n_layers_in_recurrent_block": 2, "n_layers_in_prelude": 1, "n_layers_in_coda": 1,
}  # fmt: skip
_RETROFITTED = {
    **_RAVEN, "qk_bias": False, "tie_embeddings": False, "rope_scaling": None, "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
}  # fmt: skip
_LLAMA = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rope_theta": 10_000.0,
    "rope_scaling": None, "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "hidden_act": "silu",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Published:
    """A published class: folder and modules of its code, its settings in small, attributes set afterwards."""

    folder: str
    modules: tuple[str, str]
    config: str
    model: str
    settings: dict[str, Any]
    system: str
    n_shared: int
    after: dict[str, Any] = dataclasses.field(default_factory=dict)


def _raven(folder: str, module: str, system: str, settings: dict[str, Any], **after: Any) -> Published:
    modules = ("raven_config_minimal", module)
    return Published(folder, modules, "RavenConfig", "RavenForCausalLM", settings, system, 9, after)


_CONVERT = "retrofitting-recurrence/convert_pretrained_model"
CLASSES = {
    "Huginn": _raven("recurrent-pretraining/recpre", "raven_modeling_minimal", "huginn", _RAVEN),
    "R-Llama": _raven(
        _CONVERT, "raven_modeling_minimal_llama", "rllama", _RETROFITTED, num_key_value_heads=2
    ),
    "Recurrent-OLMo-2": _raven(_CONVERT, "raven_modeling_minimal_olmo", "rllama", _RETROFITTED),
    "Ouro": Published(
        "Ouro",
        ("configuration_ouro", "modeling_ouro"),
        "OuroConfig",
        "OuroForCausalLM",
        {**_LLAMA, "num_key_value_heads": 4, "total_ut_steps": 4, "early_exit_threshold": 1.0},
        "ouro",
        14,
    ),
    "IQuest-Coder-Loop": Published(
        "IQuest-Coder-V1-40B-Loop-Instruct",
        ("configuration_iquestloopcoder", "modeling_iquestloopcoder"),
        "IQuestLoopCoderConfig",
        "IQuestLoopCoderForCausalLM",
        {**_LLAMA, "loop_num": 2, "loop_window_size": 4},
        "iquest",
        14,
    ),
    "LoopUS": Published(
        "LoopUS/models",
        ("configuration_lds", "modeling_lds"),
        "LDSConfig",
        "LDSForCausalLM",
        {k: v for k, v in loopus_config().items() if k != "model_type"},
        "loopus",
        28,
        # Its forward stops where the exit head is this sure: never.
        {"q_threshold": 2.0},
    ),
}


@pytest.fixture(params=CLASSES, ids=CLASSES)
def published(request: pytest.FixtureRequest) -> tuple[Published, Any]:
    """A published class and the adapter on a tiny model of it."""
    case = CLASSES[request.param]
    folder = Path(os.environ.get("LOOPQ_PUBLISHED", os.devnull)) / case.folder
    if not (folder / f"{case.modules[1]}.py").is_file():
        pytest.skip("NOT RUN: LOOPQ_PUBLISHED names no folder with this code")
    package = types.ModuleType(f"published_{case.system}")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    try:
        model = _build(case, package.__name__)
    except Exception as error:  # noqa: BLE001  whatever a class raises under a version that it was not written for
        pytest.skip(f"NOT RUN: cannot be built under transformers {transformers.__version__}: {error!r:.100}")
    return case, find_system(model)


def _build(case: Published, package: str) -> torch.nn.Module:
    config_code, model_code = (importlib.import_module(f"{package}.{module}") for module in case.modules)
    config = getattr(config_code, case.config)(**case.settings)
    for name, value in case.after.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    built: torch.nn.Module = getattr(model_code, case.model)(config)
    return built.float().eval()


def test_checks_pass(published):
    case, system = published
    report = check_model(as_loaded(system))
    assert report.system == case.system
    assert report.ok, "\n".join(report.lines())


@torch.no_grad()
def test_layers_that_the_adapter_runs_give_what_the_class_gives(published):
    case, system = published
    if case.system != "loopus":
        pytest.skip(
            "the adapter's rollout is the class's forward, or the class has none that runs all tokens"
        )
    ids = torch.randint(0, 60, (2, 11), generator=torch.Generator().manual_seed(1))
    expected = system.model(ids).logits
    torch.testing.assert_close(system.rollout(Batch(ids, (0, 1)), system.n_steps), expected)


@pytest.mark.parametrize("fixed", [False, True])
@torch.no_grad()
def test_the_cache_gives_the_logits_of_a_rollout(published, fixed):
    _, system = published
    cache = None
    if fixed:
        if not isinstance(system, FixedCached):
            pytest.skip("the adapter has one cache")
        cache = system.new_cache()
    ids = torch.randint(0, 60, (2, 11), generator=torch.Generator().manual_seed(1))
    whole = Batch(ids, (0, 1), 0, by_token=True)
    first, cache = system.extend(Batch(ids[:, :8], (0, 1), 0, by_token=True), system.n_steps, 0, cache)
    rest = [first]
    for seen in range(8, 11):
        part = Batch(ids[:, : seen + 1], (0, 1), 0, by_token=True)
        logits, cache = system.extend(part, system.n_steps, seen, cache)
        rest.append(logits)
    expected = system.rollout(whole, system.n_steps)
    torch.testing.assert_close(torch.cat(rest, 1).float(), expected.float(), rtol=1e-4, atol=1e-4)


def test_all_its_weights_are_quantized_over_all_steps(published):
    case, system = published
    prompts = [np.random.default_rng(i).integers(0, 60, 16) for i in range(8)]
    result = loopq.quantize(system.model, prompts, group_size=16, rank_threshold=None)
    assert len(result.layers) == case.n_shared
