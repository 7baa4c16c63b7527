"""Batches of modules that take no token ids."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import loopq
from loopq.calibrate.prompts import calibration_tokens
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.errors import CalibrationError, ConfigError, NonFiniteError, SystemContractError
from loopq.models.from_python import wrap

_OPTIONS = {"bits": 3, "group_size": 16, "threads": 1}
_STEPS, _ROWS = 5, 12


class Flow(nn.Module):
    """Euler steps of a small network: one call of it for each time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 32), nn.Linear(32, 2)

    def forward(self, x, scale=1.0):
        for i in range(_STEPS):
            t = torch.full_like(x[:, :1], i / _STEPS)
            x = x + scale * self.last(torch.tanh(self.first(torch.cat([x, t], 1))))
        return {"time": _STEPS, "x": x}


def _batches(n=6, seed=0):
    return [*torch.randn(n, _ROWS, 2, generator=torch.Generator().manual_seed(seed))]


_KINDS = {
    "tensors": lambda x: x,
    "tuples": lambda x: [(b,) for b in x],
    "arguments": lambda x: [(b, 1.0) for b in x],
    "dicts": lambda x: [{"x": b, "scale": 1.0} for b in x],
    "arrays": lambda x: [b.numpy() for b in x],
    "a tuple": lambda x: tuple((b,) for b in x),
    "a generator": lambda x: ({"x": b} for b in x),
    "a DataLoader": lambda x: DataLoader(TensorDataset(torch.cat(x)), batch_size=_ROWS),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_batches_of_every_kind_are_calls(kind):
    batches = _batches()
    want = loopq.quantize(Flow(), batches, method="gptq", **_OPTIONS)
    given = loopq.quantize(Flow(), _KINDS[kind](batches), method="gptq", **_OPTIONS)
    assert given.settings["calibration"]["n_prompts"] == len(batches)
    assert given.settings["n_steps"] == _STEPS
    assert list(given.layers) == ["first.weight", "last.weight"]
    for name, layer in want.layers.items():
        assert layer.report["n_rows"] == len(batches) * _ROWS * _STEPS
        np.testing.assert_array_equal(given.layers[name].codes, layer.codes)


@pytest.mark.parametrize(("given", "said"), [
    ([], "no token sequences"),
    ((_batches()[0], _batches()[1]), "this is one batch; give a list of batches"),
    ({"x": _batches()[0]}, "this is one batch; give a list of batches"),
    (_batches()[0], "token ids are whole numbers"),
    ([(_batches()[0],), "text"], "batch 1: got str"),
    ([(_batches()[0], object())], "batch 0, argument 1: got object"),
    ([{"x": _batches()[0], "scale": [{1}]}], "batch 0, 'scale': got set"),
    ([{"x": _batches()[0]}, {"y": _batches()[0]}], "batch 1, .*: the model raises TypeError"),
    ([_batches()[0], _batches()[0], torch.rand(4, 3)], "batch 2, .*: the model raises RuntimeError"),
    ([_batches()[0].double()], "the model raises RuntimeError"),
])  # fmt: skip
def test_what_is_no_list_of_batches_is_refused(given, said):
    with pytest.raises(CalibrationError, match=said):
        loopq.quantize(Flow(), given, method="gptq", **_OPTIONS)


def test_a_batch_that_holds_nan_is_named_as_the_cause():
    batches = _batches()
    batches[1][2, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"\(batch 1, position 2\).*the batch itself holds NaN"):
        loopq.quantize(Flow(), batches, method="gptq", **_OPTIONS)


def test_a_model_of_token_ids_refuses_floats(loaded):
    floats = [torch.rand(3, 8)]
    with pytest.raises(CalibrationError, match=r"batch 0: .* takes token ids, which are whole numbers"):
        loopq.quantize(loaded, floats, **_OPTIONS)
    with pytest.raises(CalibrationError, match=r"batch 0: Flow takes token ids"):
        loopq.quantize(Flow(), floats, tokenizer=lambda text: [1], **_OPTIONS)
    with pytest.raises(SystemContractError, match="gives no floating tensor"):
        loopq.quantize(nn.Sequential(nn.Linear(8, 8), _Whole()), floats, **_OPTIONS)


class _Whole(nn.Module):
    def forward(self, x):
        return x.argmax(-1)


def test_the_key_of_a_run_depends_on_the_batches():
    model = wrap(Flow())

    def key(batches):
        tokens = calibration_tokens(model, batches)
        return Collection(model.system, tokens, select(model.system, tokens)).fingerprint()

    batches = _batches()
    moved = [b.clone() for b in batches]
    moved[-1][0, 0] += 1e-6
    keys = [
        key(b) for b in (batches, moved, batches[:-1], batches[::-1], [(b, 2.0) for b in batches])
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key([b.clone() for b in batches]) == keys[0]


def test_batches_are_measured_by_relative_error_and_an_own_score(tmp_path):
    held, other = _batches(4, seed=1), Flow()
    result = loopq.quantize(Flow(), _batches(), out=tmp_path / "q", **_OPTIONS)
    seen = []

    def score(output, batch):
        seen.append(batch)
        return output["x"].mean()

    full, quantized = loopq.evaluate(Flow(), result, held, score=score, threads=1)
    assert quantized.name == "quantized"
    assert all(any(batch is b for b in held) for batch in seen)
    loaded = loopq.load(tmp_path / "q", other).model
    with torch.no_grad():
        outputs = [(Flow().eval()(x)["x"], loaded(x)["x"]) for x in held]
    errors = [float((a - b).square().sum() / a.square().sum()) for a, b in outputs]
    np.testing.assert_allclose(quantized.error[0], errors, rtol=1e-3)
    np.testing.assert_allclose(full.score[0], [float(a.mean()) for a, _ in outputs], rtol=1e-5)
    np.testing.assert_allclose(quantized.score[0], [float(b.mean()) for _, b in outputs], rtol=1e-5)
    assert full.error.max() == 0 < quantized.error.min()
    summary = quantized.summary()
    assert (summary["error"], summary["worst_error"]) == (quantized.error.mean(), quantized.error.max())
    assert summary["steps"] == {"mean": _STEPS, "least": _STEPS, "most": _STEPS}
    with pytest.raises(ConfigError, match="score of batch 0: the function gives nan"):
        loopq.evaluate(Flow(), result, held, score=lambda output, batch: math.nan, threads=1)
    with pytest.raises(ConfigError, match="score of batch 0: the function raises KeyError"):
        loopq.evaluate(Flow(), result, held, score=lambda output, batch: output["y"], threads=1)


def test_batches_of_the_calibration_are_noticed(recwarn):
    batches = _batches()
    result = loopq.quantize(Flow(), batches, method="rtn", **_OPTIONS)
    measured = loopq.evaluate(Flow(), result, [*_batches(2, seed=1), (batches[2],), batches[1]], threads=1)
    assert measured[1].overlap.n_shared == 1 + 1


def test_a_score_is_for_batches(loaded, checkpoint_folder):
    with pytest.raises(ConfigError, match="score: it is for batches"):
        loopq.evaluate(loaded, [checkpoint_folder], [[1, 2, 3]], score=lambda output, batch: 0.0)
