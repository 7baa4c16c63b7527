"""Planted variants: the same logits, and the disease they are made to carry."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from loopq import zoo  # noqa: E402
from loopq.errors import ConfigError  # noqa: E402
from loopq.zoo._model import ZooModel  # noqa: E402
from loopq.zoo.planted import plant_adapter_outlier, plant_kappa_spike  # noqa: E402

from .tiny import TINY, tiny  # noqa: E402

IDS = torch.arange(4 * 12).reshape(4, 12) * 7 % 251


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def spectra(model: ZooModel, linear: str, ids: torch.Tensor = IDS) -> list[torch.Tensor]:
    """Return the eigenvalues of the linear's input Hessian at every step, ascending."""
    found = []

    def hook(_: object, args: tuple[torch.Tensor]) -> None:
        x = args[0].flatten(0, 1).double()
        found.append(torch.linalg.eigvalsh(x.T @ x))

    handle = model.get_submodule(linear).register_forward_pre_hook(hook)
    with torch.no_grad():
        model(ids, seed=0)
    handle.remove()
    return found


def stable_ranks(model: ZooModel, linear: str) -> list[float]:
    """Return trace over largest eigenvalue of the linear's input Hessian at every step."""
    return [float(values.sum() / values[-1]) for values in spectra(model, linear)]


def rank(values: torch.Tensor) -> int:
    """Return how many eigenvalues exceed a thousandth of the largest, the threshold of the rank survey."""
    return int((values > 1e-3 * values[-1]).sum())


# Trained members whose loop has an MLP that can be scaled, and those with an adapter.
SPIKED = [n for n in zoo.available() if n.split("_")[0] in {"huginn", "rllama", "ouro", "nanbeige", "parcae"}]
ADAPTED = [n for n in zoo.available() if n.split("_")[0] in {"huginn", "rllama"}]
TEXT = torch.from_numpy(zoo.batches(zoo.calibration_text(), 4, 64))


@pytest.mark.parametrize("name", ["huginn", "rllama", "ouro", "nanbeige", "parcae"])
@torch.no_grad()
def test_spike_keeps_the_function(name: str) -> None:
    model = tiny(name)
    before = model(IDS, seed=1)
    exact, units = plant_kappa_spike(model, IDS, kappa=256.0)
    assert torch.equal(exact(IDS, seed=1), before)
    rounded, _ = plant_kappa_spike(model, IDS, kappa=300.0)
    torch.testing.assert_close(rounded(IDS, seed=1), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(model(IDS, seed=1), before)
    assert len(units) == 2
    changed = {
        n for (n, a), b in zip(model.named_parameters(), exact.parameters(), strict=True) if (a != b).any()
    }
    assert len(changed) == 4
    assert not any("prelude" in n or "coda" in n for n in changed)


def test_spike_makes_step_zero_nearly_rank_one() -> None:
    model = tiny("huginn")
    planted, units = plant_kappa_spike(model, IDS, kappa=4096.0)
    for mlp in units:
        assert stable_ranks(model, f"{mlp}.proj")[0] > 1.5
        assert stable_ranks(planted, f"{mlp}.proj")[0] < 1.001


@pytest.mark.parametrize("name", SPIKED)
@torch.no_grad()
def test_spike_blinds_step_zero_of_a_trained_model(name: str) -> None:
    model = zoo.load(name)
    planted, units = plant_kappa_spike(model, TEXT, kappa=1024.0)
    assert torch.equal(planted(TEXT, seed=1), model(TEXT, seed=1))
    assert units
    for mlp in units:
        out = next(n for n in ("proj", "down_proj") if hasattr(model.get_submodule(mlp), n))
        # Trained, tens of directions are seen at step 0; planted, the spike's alone.
        assert rank(spectra(model, f"{mlp}.{out}", TEXT)[0]) > 20
        assert rank(spectra(planted, f"{mlp}.{out}", TEXT)[0]) == 1


@pytest.mark.parametrize("name", ADAPTED)
@torch.no_grad()
def test_outlier_column_spoils_the_scales_of_a_trained_adapter(name: str) -> None:
    model = zoo.load(name)
    planted, column = plant_adapter_outlier(model, factor=64.0)
    assert torch.equal(planted(TEXT, seed=1), model(TEXT, seed=1))

    def rounding_error(of: ZooModel) -> float:
        """Relative error of all other columns under one INT4 scale a row."""
        weight = of.transformer["adapter"].weight
        scale = weight.abs().amax(1, keepdim=True) / 7
        error = (torch.round(weight / scale) * scale - weight).square()
        keep = torch.arange(weight.shape[1]) != column
        return float((error[:, keep].sum() / weight[:, keep].square().sum()).sqrt())

    assert rounding_error(planted) > 5 * rounding_error(model)


@pytest.mark.parametrize("config", [{}, {"n_prelude": 0, "n_coda": 0}])
@torch.no_grad()
def test_outlier_column_keeps_the_function_of_huginn(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = zoo.model_class("loopq-zoo-huginn").from_config({**TINY["huginn"].config, **config}).eval()
    before = model(IDS, seed=1)
    planted, column = plant_adapter_outlier(model, factor=64.0)
    assert torch.equal(planted(IDS, seed=1), before)
    assert torch.equal(model(IDS, seed=1), before)
    old, new = model.transformer["adapter"].weight, planted.transformer["adapter"].weight
    assert column >= 32
    assert torch.equal(new[:, column], old[:, column] * 64)
    others = torch.arange(64) != column
    assert torch.equal(new[:, others], old[:, others])


@torch.no_grad()
def test_outlier_column_keeps_the_function_of_rllama() -> None:
    model = tiny("rllama")
    planted, column = plant_adapter_outlier(model, factor=32.0, column=5)
    assert column == 32 + 5
    assert torch.equal(planted(IDS, seed=1), model(IDS, seed=1))


@torch.no_grad()
def test_planted_models_are_saved_and_loaded(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = zoo.model_class("loopq-zoo-huginn").from_config({"n_embd": 32, "n_heads": 2}).eval()
    planted, _ = plant_adapter_outlier(model)
    planted.save(tmp_path)
    assert torch.equal(zoo.load(tmp_path)(IDS, seed=1), model(IDS, seed=1))


def test_what_cannot_be_planted_is_refused() -> None:
    with pytest.raises(ConfigError, match="no spike can be planted"):
        plant_kappa_spike(tiny("ponder"), IDS)
    with pytest.raises(ConfigError, match="kappa must be positive"):
        plant_kappa_spike(tiny("huginn"), IDS, kappa=0.0)
    with pytest.raises(ConfigError, match="no linear adapter"):
        plant_adapter_outlier(tiny("ouro"))
    with pytest.raises(ConfigError, match=r"column must be in 0 \.\. 31"):
        plant_adapter_outlier(tiny("huginn"), column=32)
    model = zoo.model_class("loopq-zoo-rllama").from_config({**TINY["rllama"].config, "n_prelude": 1})
    with pytest.raises(ConfigError, match="residual prelude"):
        plant_adapter_outlier(model)
