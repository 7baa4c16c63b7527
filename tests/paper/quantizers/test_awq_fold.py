"""AWQ scales that fold: found places, refusals, and equal logits bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

from loopq.errors import CheckpointError
from loopq.layers.grids import even
from loopq.layers.layer import QuantizedLayer
from loopq.layers.transforms import ChannelScale
from loopq.paper.quantizers.awq_fold import find_folds, fold
from loopq.quantizers import Problem
from loopq.quantizers.config import LayerConfig, quantize_all
from loopq.storage.model_files import model_tensors, to_torch
from tests.support.problems import solve

WIDTH = 16
X = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


class Centered(nn.Module):
    """A norm whose factor is one more than its weight, as Gemma has it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return nn.functional.rms_norm(x, (WIDTH,)) * (1 + self.weight)


class Block(nn.Module):
    """A step of a loop: a norm, and layers that read it as a decoder's do."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm(WIDTH) if norm is not Centered else Centered()
        for name in ("gate", "up", "down", "router", "adapter"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()

    def read(self, x):
        """The other value that is read."""
        return 0.0

    def forward(self, x):
        for _ in range(2):
            y = self.norm(x)
            x = x + self.down(torch.tanh(self.gate(y)) * self.up(y)) + self.read(y)
        return x


class Heads(Block):
    """Channels of the last layer that share those of a layer beside."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x):
        return x + self.down(self.gate(x) * self.up(x).repeat(1, 2))


class Routed(Block):
    def read(self, x):
        return self.router(x)


class Branched(Block):
    def read(self, x):
        return x


class Injected(Block):
    """An adapter reads the state beside the norm."""

    def forward(self, x):
        for _ in range(2):
            x = super().forward(self.adapter(self.norm(x) + x))
        return x


class Gated(Block):
    """The other value passes a function before it is read."""

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.tanh(self.up(self.gate(y))))


class TwoNorms(Block):
    """Another module has the weight of the norm."""

    def __init__(self):
        super().__init__()
        self.other = nn.LayerNorm(WIDTH)
        self.other.weight = self.norm.weight

    def read(self, x):
        return self.other(x.detach().clone())


READERS = {f"{name}.weight": [name] for name in ("gate", "up", "down")}


def find(model, *names):
    readers = {f"{n}.weight": [n] for n in names} or READERS
    with torch.no_grad():
        return find_folds(model, readers, lambda: model(X.to(model.up.weight.dtype)))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_and_the_layer_beside_take_scales(norm, dtype):
    assert find(Block(norm).to(dtype)) == {"norm": ["gate.weight", "up.weight"], "up": ["down.weight"]}


@pytest.mark.parametrize(
    ("model", "names", "match"),
    [
        (Block(), ("gate", "down"), r"layer gate.weight: .*: up reads the output of norm too, and is not scaled"),
        (Routed(), ("gate", "up"), r"router reads the output of norm too, and is not scaled"),
        (Branched(), ("gate", "up"), r"something else reads the output of norm too"),
        (Injected(), ("adapter",), r"layer adapter.weight: .*no norm with a weight and no linear layer"),
        (Injected(), ("gate", "up"), r"something else reads the output of norm too"),
        (Gated(), ("down",), r"something else reads the output of up too, or its input is not that output"),
        (Block(Centered), ("gate", "up"), r"the weight of norm is no factor of its output"),
        (Heads(), ("down",), r"up has 8 outputs, which are not its input channel by channel"),
        (TwoNorms(), ("gate", "up"), r"another module has the weight of norm"),
        (Block(lambda n: nn.LayerNorm(n, elementwise_affine=False)), ("gate", "up"), "no norm with a weight"),
        (Block(), ("gate", "up", "router"), r"layer router.weight: .*: it is not called"),
    ],
)  # fmt: skip
def test_a_scale_without_a_place_is_refused_by_name(model, names, match):
    with pytest.raises(CheckpointError, match=match):
        find(model, *names)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_without_scales_is_not_run():
    assert find_folds(Block(), {}, lambda: pytest.fail("ran")) == {}


def test_the_advice_names_the_layers_of_all_blocks():
    model = nn.ModuleList([Branched()])
    with torch.no_grad(), pytest.raises(CheckpointError, match=r"--layer '0.up.weight=>method=rtn'"):
        find_folds(model, {"0.up.weight": ["0.up"], "0.gate.weight": ["0.gate"]}, lambda: model[0](X))
    model = nn.ModuleDict({"layers": model})
    with torch.no_grad(), pytest.raises(CheckpointError, match=r"'layers.\*.up.weight=>method=rtn'"):
        find_folds(
            model,
            {f"layers.0.{n}.weight": [f"layers.0.{n}"] for n in ("up", "gate")},
            lambda: model["layers"][0](X),
        )


def coded(model, scales):
    """Layers of a model in INT4, and its other tensors."""
    tensors, layers = dict(model_tensors(model)[0]), {}
    for name, scale in scales.items():
        weight = tensors.pop(name).float32()
        plain = QuantizedLayer(
            name, even(bits=4, group_size=8, symmetric=True, scale_dtype="float16"),
            *_rounded(weight if scale is None else weight * scale), None,
        )  # fmt: skip
        layers[name] = plain if scale is None else plain.with_transform(ChannelScale(scale))
    return layers, tensors


def _rounded(weight):
    groups = weight.reshape(len(weight), -1, 8)
    scales = (np.abs(groups).max(-1) / 7).astype(np.float16).astype(np.float32)
    return np.rint(groups / scales[..., None]).clip(-8, 7).astype(np.int8).reshape(weight.shape), scales


def put(model, layers, tensors):
    state = {n: torch.from_numpy(x.dequantize()) for n, x in layers.items()}
    model.load_state_dict(state | {n: to_torch(t) for n, t in tensors.items()})
    with torch.no_grad():
        return model(X.to(model.up.weight.dtype))


@pytest.fixture
def scales():
    rng = np.random.default_rng(0)
    both, single = (np.exp2(rng.integers(-3, 4, WIDTH)).astype(np.float32) for _ in range(2))
    return {"gate.weight": both, "up.weight": both, "down.weight": single}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_logits_are_equal_bit_for_bit_after_a_fold(norm, dtype, scales):
    model = Block(norm).to(dtype)
    folds = find(model)
    layers, tensors = coded(model, scales)
    before = put(model, layers, tensors)
    done, dense = fold(layers, tensors, folds, model)
    assert all(layer.transform is None for layer in done.values())
    assert done["gate.weight"].report["folded_into"] == "norm"
    assert not np.array_equal(dense["norm.weight"].data, tensors["norm.weight"].data)
    assert not np.array_equal(dense["up.bias"].data, tensors["up.bias"].data)
    assert torch.equal(put(model, done, dense), before)


def test_a_layer_without_codes_takes_a_scale(scales):
    model = Block()
    folds = find(model, "down")
    layers, tensors = coded(model, {"down.weight": scales["down.weight"]})
    before = put(model, layers, tensors)
    assert torch.equal(put(model, *fold(layers, tensors, folds, model)), before)


def test_scales_that_are_not_exact_are_refused(scales):
    model = Block()
    folds = find(model)
    ones = np.ones(WIDTH, np.float32)
    for change, match in (
        (
            {"up.weight": ones},
            "layer up.weight: .*: its scale is not that of gate.weight, which reads the same",
        ),
        ({"up.weight": None}, "layer up.weight: .*: its scale is not that of gate.weight"),
        (
            {"down.weight": 1.5 * ones},
            "layer down.weight: .*: its scale has other numbers than powers of two",
        ),
        (
            {"down.weight": 2.0**14 * ones},
            "layer down.weight: .*: the scales of up.weight, float16, cannot take it",
        ),
    ):
        with pytest.raises(CheckpointError, match=match):
            fold(*coded(model, scales | change), folds, model)
    half = Block().half()
    layers, tensors = coded(half, scales | dict.fromkeys(("gate.weight", "up.weight"), 2.0**14 * ones))
    with pytest.raises(
        CheckpointError, match=r"gate.weight: .*the numbers of norm.weight, F16, cannot take it"
    ):
        fold(layers, tensors, folds, half)


@pytest.mark.parametrize("levels", ["q4_1", "q4_k", "iq4_nl", "nvfp4"])
def test_scales_of_other_grids_are_divided_exactly(levels):
    rng = np.random.default_rng(0)
    scale = np.exp2(rng.integers(0, 4, 32)).astype(np.float32)
    groups = {"nvfp4": {"bits": 4, "group_size": 16}}.get(levels, {})
    up = solve("rtn", rng.normal(size=(32, 256)).astype(np.float32), None, levels=levels, **groups)
    down = solve("rtn", rng.normal(size=(8, 32)).astype(np.float32), None, bits=4, group_size=16)
    layers = {"up.weight": up, "down.weight": down.with_transform(ChannelScale(scale))}
    done, _ = fold(layers, {}, {"up": ["down.weight"]}, nn.Module())
    np.testing.assert_array_equal(done["up.weight"].dequantize() * scale[:, None], up.dequantize())
    layers["down.weight"] = down.with_transform(ChannelScale(scale / 2**30))
    with pytest.raises(
        CheckpointError, match=r"layer down.weight: .*: the scales of layer.weight, .*, cannot take it"
    ):
        fold(layers, {}, {"up": ["down.weight"]}, nn.Module())


def test_other_threads_see_no_trial():
    model, outputs = Block(), []
    with torch.no_grad():
        plain = model.norm(X)

        def run():
            other = threading.Thread(target=lambda: outputs.append(model.norm(X)))
            other.start()
            other.join()
            return model(X)

        find_folds(model, READERS, run)
    assert len(outputs) == 2
    assert all(torch.equal(value, plain) for value in outputs)


def loud(rng, n_rows=200):
    return rng.normal(size=(n_rows, 48)) * np.exp(1.5 * rng.normal(size=48))


def test_layers_of_one_input_share_powers_of_two():
    rng = np.random.default_rng(3)
    x, shared = loud(rng), {}
    config = LayerConfig.of(method="awq-fold", bits=3, group_size=16)
    weights = [size * rng.normal(size=(16, 48)).astype(np.float32) for size in (1, 30)]
    # Columns of the first are small where inputs are loud, so that alone it takes another power.
    weights[0] /= np.sqrt((x**2).mean(0)).astype(np.float32)
    problems = [Problem(f"{i}.weight", w, x.T @ x, config.grid, shared=shared) for i, w in enumerate(weights)]
    layers = quantize_all([(config, p) for p in problems])
    one, two = (layer.transform.scale for layer in layers)
    np.testing.assert_array_equal(one, two)
    assert set(np.frexp(one)[0]) == {0.5}
    assert layers[0].report["awq_power"] == layers[1].report["awq_power"] > 0
    alone = config.quantize(dataclasses.replace(problems[0], shared={}))
    assert alone.report["awq_power"] != layers[0].report["awq_power"]

    def loss(quantized):
        errors = [layer.dequantize() - w for layer, w in zip(quantized, weights, strict=True)]
        return sum(np.trace(e @ x.T @ x @ e.T) for e in errors)

    plain = [solve("rtn", w, None, bits=3, group_size=16, scale_search="mse") for w in weights]
    assert loss(layers) < loss(plain)


def test_a_model_that_is_not_the_same_twice_is_refused():
    model, counted = Block(), itertools.count()

    def run():
        # Other numbers in the run with all scales alone.
        return model(X) + (next(counted) == 1)

    with (
        torch.no_grad(),
        pytest.raises(CheckpointError, match=r"one by one, but not together; .* the same twice"),
    ):
        find_folds(model, READERS, run)
