"""A table of grids: what it says of each is what a quantization of that grid gives."""

from __future__ import annotations

import pytest

import loopq
from loopq.calibrate.prompts import CalibrationTake, Take, calibration_tokens
from loopq.errors import ConfigError
from loopq.models.load import load_model
from loopq.run.config import QuantConfig
from loopq.run.model_source import ModelSource
from loopq.run.trials import divide, try_grids

BITS = (2, 4)


@pytest.fixture(scope="module")
def tried():
    loaded = load_model("huginn_small")
    tokens = calibration_tokens(loaded, None, CalibrationTake(16, 64))
    plain = calibration_tokens(loaded, None, Take(16, 64))
    n_used, n_held = divide(tokens)
    assert (n_used, n_held) == (12, 4)
    config = QuantConfig.of(group_size=32)
    used, held = tokens.take(0, n_used), plain.take(n_used)
    return (
        loaded,
        used,
        held,
        config,
        try_grids(ModelSource.of(loaded.system, used, config, n_steps=4), config, BITS, held),
    )


def test_layers_and_bytes_are_those_of_a_quantization(tried):
    loaded, used, held, config, trials = tried
    for trial in trials:
        alone = loopq.quantize(loaded, used, config, bits=trial.bits, n_steps=4)
        assert all(alone.layers[name].same_as(layer) for name, layer in trial.checkpoint.layers.items())
        assert set(alone.layers) == set(trial.checkpoint.layers)
        assert trial.checkpoint.n_bytes == alone.n_bytes
        _, measured = loopq.evaluate(loaded, {"alone": alone}, held, n_steps=4)
        assert trial.measured.kl.mean() == pytest.approx(measured.kl.mean(), rel=1e-4)


def test_the_estimate_is_within_a_factor_of_1_5_on_other_text(tried):
    """On the evaluation text, with all prompts in use."""
    loaded, _, _, config, trials = tried
    results = {
        str(bits): loopq.quantize(loaded, None, config, bits=bits, n_prompts=16, seq_len=64, n_steps=4)
        for bits in BITS
    }
    _, *measured = loopq.evaluate(loaded, results, n_prompts=16, seq_len=64, n_steps=4)
    for trial, measurement in zip(trials, measured, strict=True):
        assert 1 / 1.5 < trial.measured.kl.mean() / measurement.kl.mean() < 1.5


def test_settings_that_a_table_cannot_have_are_refused(tried):
    loaded, used, held, config, _ = tried
    source = ModelSource.of(loaded.system, used, config)
    for wrong, match in (({"fit": 3.0}, "fit chooses the grids"), ({"outside": 8}, "outside rounds")):
        with pytest.raises(ConfigError, match=match):
            try_grids(source, config.changed(**wrong), BITS, held)
    with pytest.raises(ConfigError, match="two calibration prompts"):
        divide(used.take(0, 1))
