"""The adapter of any model, by discovery."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loopq
from loopq.calibrate.collect import collect_rows
from loopq.calibrate.data import TokenSet
from loopq.calibrate.hessian_dump import collect_hessians
from loopq.errors import CalibrationError, CheckpointError, ConfigError, SystemContractError
from loopq.models.check import check_model
from loopq.models.from_python import wrap
from loopq.models.load import choose_system, load_model
from loopq.models.systems.generic import Generic
from tests.support import vendors
from tests.support.interop import models
from tests.support.odd_loop import Odd, Settling, UniversalTransformer, _ids
from tests.support.runs import job_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*",
)


def test_selected_but_never_observed_is_an_error() -> None:
    model = Odd()
    with pytest.raises(SystemContractError, match=r"parts: selected but never observed"):
        Generic(model, select=("parts*",)).shared_parameters(5)
    with pytest.raises(SystemContractError, match=r"selects no matrix"):
        Generic(model, select=("nothing*",)).shared_parameters(5)
    chosen = Generic(model, select=("loop*",)).shared_parameters(5)
    assert [p.name for p in chosen] == ["loop.weight"]
    assert chosen[0].owners == ("loop", "twin")


class _Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.idle = nn.Embedding(64, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.parts = nn.Parameter(torch.randn(8, 8))
        self.wide = nn.Conv1d(8, 64, 3, padding=1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](self.embed(ids)))
        x = x + F.linear(x, self.parts[:4]).repeat(1, 1, 2)
        return self.wide(x.transpose(1, 2)).transpose(1, 2)


def test_a_model_without_a_loop_is_refused_with_all_reasons() -> None:
    with pytest.raises(SystemContractError, match=r"no parameter is called more than once") as caught:
        _ = Generic(_Once()).n_steps
    lines = [line.strip().partition(": ") for line in str(caught.value).splitlines()[1:]]
    assert {name: reason for name, _, reason in lines} == {
        "embed.weight": "looked up, never multiplied",
        "idle.weight": "not used by this run",
        "layers.*.weight (2 weights)": "called 1 time(s)",
        "parts": "multiplied in parts, without a call of its module",
        "wide.weight": "called 1 time(s)",
    }


class _Blocks(nn.Module):
    """The loop takes two tokens at a time, so that a longer prompt has more steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.core, self.head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, state, out = self.embed(ids), torch.zeros(()), []
        for i in range(0, x.shape[1], 2):
            state = torch.tanh(self.core(x[:, i : i + 2] + state))[:, -1:]
            out.append(state.expand(-1, x[:, i : i + 2].shape[1], -1))
        return self.head(torch.cat(out, 1))


def test_a_loop_over_token_blocks_has_the_steps_of_its_prompts() -> None:
    model = wrap(_Blocks())
    prompts = [[i, *range(22)] for i in range(8)]
    result = loopq.quantize(model, prompts, group_size=8, threads=1)
    assert list(result.layers) == ["core.weight"]
    assert result.settings["n_steps"] == 12
    fresh = wrap(model.model)
    assert loopq.evaluate(fresh, {"q": result}, [range(9)] * 3, n_steps=12, threads=1)[1].kl.max() < 0.1
    # A shorter prompt has fewer steps. The sums run over all of them.
    mixed = loopq.quantize(model, [*prompts, list(range(9))], group_size=8, threads=1)
    assert mixed.layers["core.weight"].report["n_rows"] == 8 * 23 + 9


class _Fixed(nn.Module):
    """Mixes tokens of a fixed number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(64, 8), nn.Conv1d(32, 32, 1), nn.Linear(8, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(2):
            x = torch.tanh(self.mix(x))
        return self.head(x)


def test_a_model_that_takes_one_length_alone_is_found() -> None:
    assert Generic(_Fixed()).discovery().n_tokens == 32
    with pytest.raises(
        CalibrationError, match=r"trial run, after layer 1\.weight was called at step 0: the model raises"
    ):
        _ = Generic(nn.Sequential(nn.Embedding(64, 8), nn.Linear(9, 8))).n_steps


class _Encoder(nn.Module):
    """Gives hidden states, or one row for each prompt, in one of the ways that models have."""

    def __init__(self, give: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.give, self.embed, self.core = give, nn.Embedding(64, 32), nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for _ in range(3):
            x = x + torch.tanh(self.core(x))
        return self.give(x)


@pytest.mark.parametrize(
    ("give", "output", "shape"),
    [
        (lambda x: x, "hidden", (3, 5, 32)),
        (lambda x: (x.mean(), {"last_hidden_state": x}, x), "hidden", (3, 5, 32)),
        (lambda x: {"loss": x.sum(), "last_hidden_state": x}, "hidden", (3, 5, 32)),
        (lambda x: x.mean(1), "hidden", (3, 1, 32)),
        (lambda x: (x, x.repeat(1, 1, 2))[1], "logits", (3, 5, 64)),
        (lambda x: {"hidden": x, "logits": x.repeat(1, 1, 2)}, "logits", (3, 5, 64)),
        (lambda x: (x.mean(), [x, x], x.repeat(1, 1, 2)), "logits", (3, 5, 64)),
    ],
)
def test_models_that_give_hidden_states_are_measured_by_them(
    give: Callable[[torch.Tensor], Any], output: str, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = wrap(_Encoder(give))
    assert model.system.rollout(_ids(), 3).shape == shape
    ids = _ids(8).input_ids.tolist()
    result = loopq.quantize(model, ids, group_size=16, threads=1)
    measured = loopq.evaluate(model, {"q": result}, ids, threads=1)[1]
    assert measured.output == output
    assert 0 < measured.kl.mean() < 0.05


def test_depth_is_what_the_model_runs() -> None:
    with pytest.raises(ConfigError, match=r"5 steps by itself"):
        Generic(Odd()).rollout(_ids(), 4)


class _Used(nn.Module):
    """A loop with a second weight used in some way, beside a linear layer that is called."""

    def __init__(self, part: nn.Module, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.called, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64)
        self.part, self.use = part, use

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = x + torch.tanh(self.called(x)) + 0.3 * self.use(self.part, x)
        return self.head(x)


def _bare() -> nn.Module:
    part = nn.Module()
    part.w = nn.Parameter(torch.randn(32, 32) / 6)
    return part


_USES: dict[
    str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], torch.Tensor], dict[str, str]]
] = {
    "F.linear": (lambda: nn.Linear(32, 32), lambda m, x: F.linear(x, m.weight), {"weight": "out_in"}),
    "x @ w": (_bare, lambda m, x: x @ m.w, {"w": "in_out"}),
    "einsum": (_bare, lambda m, x: torch.einsum("btd,ed->bte", x, m.w), {"w": "out_in"}),
    "Conv1d": (lambda: nn.Conv1d(32, 32, 1), lambda m, x: m(x.mT).mT, {"weight": "conv"}),
    "Conv1d of 3 tokens": (
        lambda: nn.Conv1d(32, 32, 3, padding=2, dilation=2, padding_mode="circular"),
        lambda m, x: m(x.mT).mT,
        {"weight": "conv3"},
    ),
    "Conv2d": (
        lambda: nn.Conv2d(2, 2, (3, 5), padding="same"),
        lambda m, x: m(x.reshape(-1, 2, 4, 4)).reshape(x.shape),
        {"weight": "conv3x5"},
    ),
    "attention": (
        lambda: nn.MultiheadAttention(32, 4, batch_first=True),
        lambda m, x: m(x, x, x, need_weights=False)[0],
        {"in_proj_weight": "out_in", "out_proj.weight": "out_in"},
    ),
}


@pytest.mark.parametrize("use", _USES)
def test_weights_outside_module_calls_are_quantized_like_others(use: str, tmp_path: Path) -> None:
    part, run, names = _USES[use]

    def made() -> Any:
        torch.manual_seed(0)
        return wrap(_Used(part(), run))

    ids, model = _ids(6).input_ids.tolist(), made()
    result = loopq.quantize(model, ids, group_size=16, threads=1, out=tmp_path / "q")
    stored = {name.removeprefix("part."): layer.orientation for name, layer in result.layers.items()}
    assert stored == {"called.weight": "out_in", **names}
    rounded = loopq.quantize(model, ids, group_size=16, threads=1, method="rtn")
    kl = [m.kl.mean() for m in loopq.evaluate(model, {"q": result, "rtn": rounded}, ids, threads=1)]
    assert 0 < kl[1] < kl[2]
    logits = [
        loopq.load(tmp_path / "q", made(), quantized=quantized).system.rollout(_ids(6), 3)
        for quantized in (False, True)
    ]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use", ["x @ w", "Conv1d", "Conv1d of 3 tokens"])
@pytest.mark.parametrize("target", ["gptq", "compressed-tensors"])
def test_other_formats_refuse_weights_of_no_linear_layer(use: str, target: str, tmp_path: Path) -> None:
    part, run, _ = _USES[use]
    result = loopq.quantize(_Used(part(), run), _ids(6).input_ids, group_size=16, threads=1, method="rtn")
    with pytest.raises(CheckpointError, match=r"layer part\.w.*of no linear layer"):
        loopq.export(result, tmp_path / "q", target, force=True)


class _Unfolded(nn.Module):
    """A layer called twice with given inputs: a convolution, or a linear layer with the same weight and its patches."""

    def __init__(self, conv: nn.Conv1d | nn.Conv2d, *, linear: bool) -> None:
        super().__init__()
        self.conv, self.core = conv, conv
        if linear:
            weight = conv.weight.detach().flatten(1)
            self.core = nn.Linear(*weight.shape[::-1])
            self.core.weight.data, self.core.bias.data = weight.clone(), conv.bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(x) + self._layer(x.square())

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        if self.core is self.conv:
            return self.conv(x).flatten(2).mT
        edges = self.conv._reversed_padding_repeated_twice
        x = F.pad(x, edges, "circular" if self.conv.padding_mode == "circular" else "constant")
        places = {"stride": self.conv.stride, "dilation": self.conv.dilation}
        kernel = self.conv.kernel_size
        if len(kernel) == 1:
            x, kernel, places = x[..., None], (*kernel, 1), {name: (*n, 1) for name, n in places.items()}
        return self.core(F.unfold(x, kernel, **places).mT)


@pytest.mark.parametrize("how", [
    {}, {"padding": 2, "stride": 2}, {"padding": 3, "dilation": 2, "padding_mode": "circular"},
    {"padding": "same", "dilation": 2},
])  # fmt: skip
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
def test_a_convolution_gets_the_codes_of_a_linear_layer_on_its_patches(
    kind: Any, how: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    conv = kind(5, 8, 3, **how)
    batches = [torch.randn(2, 5, 9) if kind is nn.Conv1d else torch.randn(2, 5, 6, 7) for _ in range(6)]
    settings: dict[str, Any] = {"bits": 3, "group_size": 8, "threads": 1}
    for method in ("gptq", "gptq-cd"):
        found = [
            next(iter(loopq.quantize(m, batches, method=method, **settings).layers.values()))
            for m in (_Unfolded(conv, linear=False), _Unfolded(conv, linear=True))
        ]
        assert found[0].same_as(found[1])
        assert found[0].report["n_rows"] == found[1].report["n_rows"]
        assert found[0].in_model_orientation().shape == conv.weight.shape


def test_all_weights_of_a_universal_transformer_are_quantized(tmp_path: Path) -> None:
    drawn = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(0))
    (ids, others), model = drawn.split((48, 16)), wrap(UniversalTransformer())
    result = loopq.quantize(model, ids, bits=3, group_size=64, threads=1, out=tmp_path / "q")
    looped = {name for name, p in model.model.named_parameters() if p.ndim > 1} - {
        "embed.weight",
        "head.weight",
    }
    assert (set(result.layers), len(looped)) == (looped, 6)
    assert check_model(model).ok
    assert all(layer.report["n_rows"] == 4 * ids.numel() for layer in result.layers.values())
    rounded = loopq.quantize(model, ids, bits=3, group_size=64, threads=1, method="rtn")
    measured = loopq.evaluate(model, {"q": result, "rtn": rounded}, others, threads=1)
    assert 0 < measured[1].kl.mean() < measured[2].kl.mean() / 2
    again = loopq.load(tmp_path / "q", UniversalTransformer()).model
    with torch.no_grad():
        logits = [m(others).double().log_softmax(-1) for m in (again, model.model)]
    kl = F.kl_div(*logits, reduction="none", log_target=True).sum(-1)
    assert kl.mean().item() == pytest.approx(measured[1].kl.mean(), rel=1e-3)
    tokens = TokenSet(tuple(ids.numpy()), "ids", "prompts")
    # The same rows from a dump, and the same sums.
    plain = loopq.quantize(model, ids, bits=3, group_size=64, threads=1, method="gptq")
    for collect in (collect_rows, collect_hessians):
        collect(job_of(model, tokens), tmp_path / collect.__name__)
        solved = loopq.solve(tmp_path / collect.__name__, bits=3, group_size=64, threads=1, method="gptq")
        assert solved is not None
        assert all(layer.same_as(solved.layers[name]) for name, layer in plain.layers.items())


def test_what_stays_dense_is_named_before_the_run() -> None:
    model = _Used(_bare(), lambda m, x: F.linear(x, m.w / 2))
    with pytest.warns(UserWarning, match=r"not quantized: part\.w: used by div"):
        result = loopq.quantize(model, _ids(6).input_ids.tolist(), group_size=16, threads=1, method="rtn")
    assert list(result.layers) == ["called.weight"]
    model = _Used(nn.Conv1d(32, 32, 3, padding=1, groups=32), lambda m, x: m(x.mT).mT)
    with pytest.warns(UserWarning, match=r"not quantized: part\.weight: a convolution in groups, which have"):
        result = loopq.quantize(model, _ids(6).input_ids.tolist(), group_size=16, threads=1, method="rtn")
    assert list(result.layers) == ["called.weight"]


def test_generic_is_taken_only_by_name() -> None:
    with pytest.raises(SystemContractError, match=r"no looped system fits"):
        choose_system(Odd(), None)
    assert choose_system(Odd(), "generic").name == "generic"


class _Steps(nn.Module):
    """A loop that is one function of the module and its state."""

    def __init__(self, step: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step, self.embed, self.core = step, nn.Embedding(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 64)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = self.step(self, x)
        return self.head(x)


def _names(model: nn.Module) -> list[str]:
    return list(loopq.quantize(model, _ids(6).input_ids, group_size=16, threads=1, method="gptq").layers)


def test_a_loop_may_call_no_module_at_all() -> None:
    weights = nn.ParameterList(nn.Parameter(torch.randn(32, 32) / 6) for _ in range(2))
    model = _Steps(lambda m, x: x + torch.tanh(torch.tanh(x @ m.w[0]) @ m.w[1]), w=weights)
    assert _names(model) == ["w.0", "w.1"]
    assert _names(_Steps(lambda m, x: x + m.core.forward(x))) == ["core.weight"]


def test_a_forward_in_inference_mode_is_observed() -> None:
    model = _Steps(lambda m, x: x + torch.tanh(m.core(x)))
    model.forward = torch.inference_mode()(model.forward)  # type: ignore[method-assign]
    assert _names(model) == ["core.weight"]


def test_a_table_that_the_loop_multiplies_with_is_named() -> None:
    model = _Steps(lambda m, x: m.core(x) + m.head(x).softmax(-1) @ m.embed.weight)
    with pytest.warns(UserWarning, match=r"not quantized: embed\.weight: .*other code multiplies"):
        assert _names(model) == ["core.weight", "head.weight"]
    model.head.weight = model.embed.weight
    with pytest.warns(UserWarning, match=r"not quantized: embed\.weight: .*would round the inputs"):
        assert _names(model) == ["core.weight"]


def test_a_loop_that_ends_by_its_state_is_summed_over_all_its_calls() -> None:
    ids = _ids(8).input_ids.tolist()
    steps = loopq.evaluate(Settling(), {}, ids, batch_size=1, threads=1)[0].steps
    assert steps is not None
    assert steps.min() < steps.max()
    result = loopq.quantize(Settling(), ids, group_size=16, threads=1, bits=3, method="gptq", batch_size=1)
    assert result.layers["core.weight"].report["n_rows"] == steps.sum() * len(ids[0])
    full, rounded = loopq.evaluate(Settling(), result, ids, batch_size=1, threads=1)
    assert full.steps is not None
    assert full.steps.tolist() == steps.tolist()
    assert rounded.steps is not None
    assert 0 < rounded.error.mean() < 0.1
    # Another tolerance is another number of steps, with the same weights.
    (slower,) = loopq.evaluate(Settling(0.002), {}, ids, batch_size=1, threads=1)
    assert slower.steps is not None
    assert (slower.steps > steps).all()


def test_torchscript_is_refused() -> None:
    class Script(torch.nn.Module):
        pass

    model = _Steps(lambda m, x: m.inner(x))
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(SystemContractError, match="module inner: TorchScript"),
    ):
        patch.setattr(torch.jit, "ScriptModule", Script)
        model.inner = Script()
        _names(model)


@pytest.mark.filterwarnings("ignore:not quantized. .*conv1d")
def test_sensenovas_shape_is_taken_and_its_routers_stay_float32(tmp_path: Path) -> None:
    """A looped middle, gated delta nets and attention, two streams and a float32 router, in small."""
    model, config, files = models.streams()
    model.to(torch.bfloat16)
    model.model.routers.float()
    model.save_pretrained(tmp_path / "m")
    for name, data in {**files, "config.json": json.dumps(config).encode()}.items():
        (tmp_path / "m" / name).write_bytes(data)
    opened: dict[str, Any] = {"system": "generic", "trust_remote_code": True, "dtype": "bfloat16"}
    loaded = load_model(tmp_path / "m", **opened)
    report = check_model(loaded)
    assert report.ok, report.lines()
    assert {p.invocations for p in loaded.system.shared_parameters(loaded.system.n_steps)} == {2}
    settings: dict[str, Any] = {"group_size": 16, "exclude": "*.routers.*"}
    ids = vendors.tokens(8, 16)
    result = loopq.quantize(loaded, ids, out=tmp_path / "q", descent=1, **settings)
    # Four layers run twice: three gated delta nets and one attention.
    assert len(result.layers) == 3 * 6 + 7
    assert result.dense["model.routers.3.weight"].dtype == "F32"
    loopq.quantize(loaded, ids, out=tmp_path / "rounded", method="rtn", **settings)
    measured = loopq.evaluate(loaded, [tmp_path / "q", tmp_path / "rounded"], ids)
    assert 0 < measured[1].kl.mean() < measured[2].kl.mean()
    again = loopq.load(tmp_path / "q", trust_remote_code=True)
    coded = loopq.load(tmp_path / "q", quantized=True, trust_remote_code=True)
    assert torch.allclose(vendors.logits(coded), vendors.logits(again), rtol=0.1, atol=0.1)


def test_a_depth_that_the_forward_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Odd: its forward has no argument 'loops' .*; it has "):
        Generic(Odd(), depth="loops")
