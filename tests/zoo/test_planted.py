"""Planted variants: the same logits, and the disease they are made to carry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benches.zoo import folders
from benches.zoo.measure import rows_of
from benches.zoo.planted import plant_adapter_outlier, plant_kappa_spike
from benches.zoo.store import save_model
from loopq import zoo
from loopq.errors import ConfigError
from loopq.models.load import load_model
from loopq.systems import find_system
from loopq.systems.base import Batch
from tests.support.marks import slow_unless
from tests.support.systems import CASES, build, small

IDS = torch.arange(4 * 12).reshape(4, 12) * 7 % 251


def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Return the rollout at the model's own depth from seed 1."""
    system = find_system(model)
    return system.rollout(Batch(ids, tuple(range(len(ids))), 1), system.n_steps)


def trained(name: str) -> nn.Module:
    """Return a trained model by its name."""
    places = {Path(folder).name: folder for folder in folders()}
    if name not in zoo.available() and name not in places:
        pytest.skip(f"NOT RUN: {name} is not trained here; run `make zoo`")
    return load_model(places.get(name, name)).model


def spectra(model: nn.Module, linear: str, ids: torch.Tensor = IDS) -> list[torch.Tensor]:
    """Return the eigenvalues of the linear's input Hessian at every step, ascending."""
    eigenvalues = []

    def hook(_: object, args: tuple[torch.Tensor]) -> None:
        x = args[0].flatten(0, 1).double()
        eigenvalues.append(torch.linalg.eigvalsh(x.T @ x))

    handle = model.get_submodule(linear).register_forward_pre_hook(hook)
    logits(model, ids)
    handle.remove()
    return eigenvalues


def stable_ranks(model: nn.Module, linear: str) -> list[float]:
    """Return trace over largest eigenvalue of the linear's input Hessian at every step."""
    return [float(values.sum() / values[-1]) for values in spectra(model, linear)]


def rank(values: torch.Tensor) -> int:
    """Return how many eigenvalues exceed a thousandth of the largest, the threshold of the rank survey."""
    return int((values > 1e-3 * values[-1]).sum())


# One trained model of each class with a loop MLP that can be scaled, and one of each with an adapter.
SPIKED = slow_unless(
    lambda name: name not in ("nanbeige_small", "parcae_small"),
    ["huginn_small", "rllama_small", "ouro_small", "nanbeige_small", "parcae_small"],
)
ADAPTED = ["huginn_small", "rllama_small"]
TEXT = torch.from_numpy(rows_of(zoo.calibration_text(), 4, 64))


@pytest.mark.parametrize("name", ["Huginn", "R-Llama", "Ouro", "Nanbeige", "Parcae"])
@torch.no_grad()
def test_spike_keeps_the_function(name: str) -> None:
    model = build(CASES[name])
    before = logits(model)
    exact, units = plant_kappa_spike(model, IDS, kappa=256.0)
    assert torch.equal(logits(exact), before)
    rounded, _ = plant_kappa_spike(model, IDS, kappa=300.0)
    torch.testing.assert_close(logits(rounded), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits(model), before)
    n_mlps = {"Nanbeige": 3}.get(name, 2)
    assert len(units) == n_mlps
    changed = {
        n for (n, a), b in zip(model.named_parameters(), exact.parameters(), strict=True) if (a != b).any()
    }
    assert len(changed) == 2 * n_mlps
    assert not any("prelude" in n or "coda" in n for n in changed)


def test_spike_makes_step_zero_nearly_rank_one() -> None:
    model = build(CASES["Huginn"])
    planted, units = plant_kappa_spike(model, IDS, kappa=4096.0)
    for mlp in units:
        assert stable_ranks(model, f"{mlp}.proj")[0] > 1.5
        assert stable_ranks(planted, f"{mlp}.proj")[0] < 1.001


@pytest.mark.parametrize("name", SPIKED)
@torch.no_grad()
def test_spike_blinds_step_zero_of_a_trained_model(name: str) -> None:
    model = trained(name)
    planted, units = plant_kappa_spike(model, TEXT, kappa=1024.0)
    assert torch.equal(logits(planted, TEXT), logits(model, TEXT))
    assert units
    for mlp in units:
        out = next(n for n in ("proj", "down_proj") if hasattr(model.get_submodule(mlp), n))
        # Trained, tens of directions are seen at step 0; planted, the spike's alone.
        assert rank(spectra(model, f"{mlp}.{out}", TEXT)[0]) > 20
        assert rank(spectra(planted, f"{mlp}.{out}", TEXT)[0]) == 1


@pytest.mark.parametrize("name", SPIKED)
@torch.no_grad()
def test_spike_at_a_token_stands_there(name: str) -> None:
    model, space = trained(name), ord(" ")
    at = space == TEXT
    planted, units = plant_kappa_spike(model, TEXT, kappa=1024.0, token=space)
    assert torch.equal(logits(planted, TEXT), logits(model, TEXT))
    for mlp, unit in units.items():
        out = next(n for n in ("proj", "down_proj") if hasattr(model.get_submodule(mlp), n))
        seen: list[torch.Tensor] = []
        handle = planted.get_submodule(f"{mlp}.{out}").register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].square())
        )
        logits(planted, TEXT)
        handle.remove()
        energy = torch.stack(seen).mean(0)
        assert energy[..., unit][at].sum() > 0.75 * energy[..., unit].sum()
        # Massive: nearly all that the layer reads there.
        assert energy[..., unit][at].sum() > 0.9 * energy[at].sum()
    with pytest.raises(ConfigError, match="no token 1 in"):
        plant_kappa_spike(model, TEXT, token=1)


@pytest.mark.parametrize("name", ADAPTED)
@torch.no_grad()
def test_outlier_column_spoils_the_scales_of_a_trained_adapter(name: str) -> None:
    model = trained(name)
    planted, column = plant_adapter_outlier(model, factor=64.0)
    assert torch.equal(logits(planted, TEXT), logits(model, TEXT))

    def rounding_error(of: nn.Module) -> float:
        """Relative error of all other columns under one INT4 scale a row."""
        weight = of.transformer["adapter"].weight
        scale = weight.abs().amax(1, keepdim=True) / 7
        error = (torch.round(weight / scale) * scale - weight).square()
        keep = torch.arange(weight.shape[1]) != column
        return float((error[:, keep].sum() / weight[:, keep].square().sum()).sqrt())

    assert rounding_error(planted) > 5 * rounding_error(model)


@pytest.mark.parametrize("config", [{}, {"n_prelude": 1, "n_coda": 1}])
@torch.no_grad()
def test_outlier_column_keeps_the_function_of_huginn(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = small("huginn", mean_recurrence=3, **config)().eval()
    before = logits(model)
    planted, column = plant_adapter_outlier(model, factor=64.0)
    assert torch.equal(logits(planted), before)
    assert torch.equal(logits(model), before)
    old, new = model.transformer["adapter"].weight, planted.transformer["adapter"].weight
    assert column >= 32
    assert torch.equal(new[:, column], old[:, column] * 64)
    others = torch.arange(64) != column
    assert torch.equal(new[:, others], old[:, others])


@torch.no_grad()
def test_outlier_column_keeps_the_function_of_rllama() -> None:
    model = small("rllama", n_coda=1)().eval()
    planted, column = plant_adapter_outlier(model, factor=32.0, column=5)
    assert column == 32 + 5
    assert torch.equal(logits(planted), logits(model))


@torch.no_grad()
def test_planted_models_are_saved_and_loaded(tmp_path: Path) -> None:
    model = small("huginn")().eval()
    planted, _ = plant_adapter_outlier(model)
    save_model(planted, tmp_path)
    assert torch.equal(logits(load_model(tmp_path).model), logits(model))


def test_what_cannot_be_planted_is_refused() -> None:
    with pytest.raises(ConfigError, match="no spike can be planted"):
        plant_kappa_spike(build(CASES["Ponder"]), IDS)
    with pytest.raises(ConfigError, match="kappa must be positive"):
        plant_kappa_spike(build(CASES["Huginn"]), IDS, kappa=0.0)
    with pytest.raises(ConfigError, match="no linear adapter"):
        plant_adapter_outlier(build(CASES["Ouro"]))
    with pytest.raises(ConfigError, match=r"column must be in 0 \.\. 31"):
        plant_adapter_outlier(build(CASES["Huginn"]), column=32)
    model = small("rllama", n_prelude=1)()
    with pytest.raises(ConfigError, match="residual prelude"):
        plant_adapter_outlier(model)
