"""State-space controls on a toy scan with known behaviour and on the real Mamba class, tiny."""

import math

import numpy as np
import pytest
import torch
import transformers

from loopq.errors import ConfigError, SystemContractError
from loopq.paper.controls import ssm


def toy_scan(n_tokens=128, width=32, n_modes=16, seed=0):
    """Draw a selective scan with the usual initialisation: A = -(1..n_modes), dt log-uniform in 1e-3..0.1."""
    rng = np.random.default_rng(seed)
    base = np.exp(rng.uniform(math.log(1e-3), math.log(0.1), size=width))
    return ssm.Scan(
        x=rng.normal(size=(n_tokens, width)),
        dt=base * np.exp(0.3 * rng.normal(size=(n_tokens, width))),
        A_log=np.log(np.arange(1.0, n_modes + 1)) * np.ones((width, 1)),
        B=rng.normal(size=(n_tokens, n_modes)),
        C=rng.normal(size=(n_tokens, n_modes)),
        D=np.ones(width),
    )


def perturb(scan, component, error):
    fields = {name: getattr(scan, name) for name in ("x", "dt", "A_log", "B", "C", "D")}
    fields[component] = fields[component] + error
    return ssm.Scan(**fields)


def test_states_follow_the_recurrence_written_out():
    scan = toy_scan(n_tokens=4, width=2, n_modes=3)
    h = np.zeros((2, 3))
    for t, state in enumerate(scan.states()):
        for w in range(2):
            for m in range(3):
                step = np.exp(-scan.dt[t, w] * np.exp(scan.A_log[w, m]))
                h[w, m] = step * h[w, m] + scan.dt[t, w] * scan.x[t, w] * scan.B[t, m]
        np.testing.assert_allclose(state, h, rtol=1e-13)


def test_decay_lies_between_zero_and_one():
    decay = toy_scan().decay()
    assert (decay > 0).all()
    assert (decay < 1).all()


def test_transition_error_is_zero_at_the_first_token_only():
    scan = toy_scan()
    error = ssm.rounding_error(scan.A_log, "A_log")
    divergence = ssm.diverge(perturb(scan, "A_log", error).states(), scan.states())
    assert divergence.absolute[0] == 0.0
    assert (divergence.absolute[1:] > 0).all()


def test_input_error_is_there_at_once_and_output_error_never():
    scan = toy_scan()
    assert ssm.diverge(perturb(scan, "B", 0.1).states(), scan.states()).absolute[0] > 0
    assert (ssm.diverge(perturb(scan, "C", 0.1).states(), scan.states()).absolute == 0).all()


def test_identity_injection_grows_states_at_equal_relative_error():
    scans = [toy_scan(seed=s) for s in range(3)]
    rows = ssm.identity_sweep(scans, error_norm=2.0)
    plain, most = rows[0], rows[-1]
    assert (plain["alpha"], most["alpha"]) == (0.0, 0.5)
    # Slow channels have a multiplier near 1: with alpha they are unstable and everything grows.
    assert plain["largest_multiplier"] < 1 < most["largest_multiplier"]
    assert most["norm"] / plain["norm"] > 1e10
    assert most["absolute"] / plain["absolute"] > 1e10
    assert most["relative"] < 50 * plain["relative"]


def test_gaussian_error_has_its_norm():
    assert np.linalg.norm(ssm.gaussian_error(np.zeros((7, 9)), 22.84, 1)) == pytest.approx(22.84)


@pytest.fixture(scope="module")
def mamba():
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=64,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=3,
        intermediate_size=64,
        time_step_rank=4,
    )
    return transformers.MambaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(0).integers(0, 64, size=(2, 40)).tolist()


def test_captured_scan_gives_the_real_class_its_output(mamba, prompts):
    # `capture` compares with the model's own scan and refuses another one; here that it is exact.
    seen = []
    hook = mamba.backbone.layers[1].mixer.out_proj.register_forward_pre_hook(
        lambda m, i: seen.append(i[0][0])
    )
    gate = []
    other = mamba.backbone.layers[1].mixer.in_proj.register_forward_hook(
        lambda m, i, o: gate.append(o[0, :, 64:])
    )
    scan = ssm.capture(mamba, 1, prompts[0])
    hook.remove()
    other.remove()
    output = torch.as_tensor(scan.outputs()) * torch.nn.functional.silu(gate[0].double())
    torch.testing.assert_close(output, seen[0].double(), rtol=1e-4, atol=1e-6)


def test_another_recurrence_is_refused(mamba, prompts, monkeypatch):
    monkeypatch.setattr(ssm.Scan, "decay", lambda self: np.full((len(self.x), *self.A_log.shape), 0.5))
    with pytest.raises(SystemContractError, match="layer 1: the recomputed scan differs"):
        ssm.capture(mamba, 1, prompts[0])


def test_component_study_on_the_real_class(mamba, prompts):
    before = {n: p.detach().clone() for n, p in mamba.named_parameters()}
    rows = ssm.component_study(mamba, prompts, layers=[0, 2], seeds=(0,), early_late=(4, 32))
    assert len(rows) == 2 * 4 * 2
    for row in rows:
        first = [p["absolute"][0] for p in row["prompts"]]
        whole = np.concatenate([p["absolute"] for p in row["prompts"]])
        if row["component"] == "A_log":
            assert first == [0.0, 0.0]
            assert whole.max() > 0
        elif row["component"] == "out_proj":
            assert whole.max() == 0.0
            assert row["growth"] is None
        else:
            assert min(first) > 0
        assert {"absolute", "relative", "norm"} == set(row["prompts"][0])
    assert len({round(r["error_norm"], 9) for r in rows if r["perturbation"] != "int4"}) == 1
    for name, parameter in mamba.named_parameters():
        assert (parameter == before[name]).all(), name


def test_weights_are_put_back_after_an_error(mamba):
    mixer = mamba.backbone.layers[0].mixer
    before = mixer.A_log.detach().clone()
    with pytest.raises((IndexError, RuntimeError)):
        ssm.perturbed_capture(mamba, 0, "A_log", np.ones_like(before.numpy()), [10_000])
    assert (mixer.A_log == before).all()


def test_sweep_runs_on_captured_scans(mamba, prompts):
    scans = [ssm.capture(mamba, 1, p) for p in prompts]
    rows = ssm.identity_sweep(scans, error_norm=1.0, alphas=(0.0, 0.5), seeds=(0, 1))
    assert all(r["relative"] > 0 and r["absolute"] > 0 and r["norm"] > 0 for r in rows)


def test_bad_input_says_what_is_wrong(mamba, prompts):
    with pytest.raises(ConfigError, match="layers 0 to 2"):
        ssm.capture(mamba, 9, prompts[0])
    with pytest.raises(ConfigError, match="more than 32 tokens"):
        ssm.component_study(mamba, [[1, 2, 3]], layers=[0])
    with pytest.raises(ConfigError, match="A_log, in_proj"):
        ssm.component_weight(mamba.backbone.layers[0].mixer, "conv1d")
    with pytest.raises(SystemContractError, match="no selective-scan layer"):
        ssm.find_mixers(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="at least one scan"):
        ssm.identity_sweep([], error_norm=1.0)


def test_a_layer_that_is_not_called_is_noticed(mamba, prompts, monkeypatch):
    monkeypatch.setattr(mamba.backbone.layers[1].mixer, "forward", lambda hidden, *_, **__: hidden)
    with pytest.raises(SystemContractError, match="layer 1: x_proj or out_proj was bypassed"):
        ssm.capture(mamba, 1, prompts[0])
