"""The runner: logits of a rollout, the same bits however a text comes, and what it leaves to the model's modules."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import numpy as np
import pytest
import torch
from torch import nn

import loopq._native as native
from loopq.errors import ConfigError, KernelError
from loopq.layers.grids.trellis import Trellis
from loopq.layers.transforms import ChannelScale, Rotation
from loopq.models.load import load_model
from loopq.runtime.generate import Decoder, Generation
from loopq.runtime.runner import Runner, _Threads
from loopq.systems.base import Batch
from loopq.systems.program import Branch
from tests.support import core
from tests.support.linear import coded, linear_of
from tests.support.looped import looped
from tests.support.systems import CASES, open_system, rolled_out

_KNOWN = (
    "Huginn", "R-Llama", "Ouro", "Nanbeige", "Nanbeige, weighted loops", "looped Llama", "transformers HRM-Text",
)  # fmt: skip
_TEXT = [5, 9, 7, 30, 11, 12, 8, 21, 4, 17, 3, 2, 40]


def extended(runner, ids):
    batch, start = Batch(torch.tensor([ids]), (0,), by_token=True), runner.program.start
    states = None if start is None else start(batch, runner.seen)[0]
    return runner.extend(batch.input_ids[0, runner.seen :], states)


@pytest.mark.parametrize("name", [*_KNOWN, "Qwen2", "Qwen3", "Mistral"])
def test_it_gives_the_logits_of_a_rollout_at_any_depth(name):
    settings = {"Mistral": {"sliding_window": None}}.get(name, {})
    system = coded(open_system(CASES[name]) if name in CASES else looped(name, **settings))
    if name == "transformers HRM-Text":
        system.model.model.z_L_init.data.normal_()
    for n_steps in (1, 3):
        runner = Runner(system.program(n_steps))
        whole = rolled_out(system, _TEXT, n_steps)
        for n in range(1, len(_TEXT) + 1):
            logits = extended(runner, _TEXT[:n])
            torch.testing.assert_close(logits, whole[n - 1], rtol=2e-5, atol=2e-5)
        assert runner.seen == len(_TEXT)


@pytest.mark.parametrize("name", ["Huginn", "looped Llama"])
def test_bits_do_not_depend_on_threads_or_pieces_of_the_text(name):
    system = coded(open_system(CASES[name]))
    n_threads = torch.get_num_threads()
    all_logits = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for parts in ((13,), (4, 13), (1, 2, 3, 13), (12, 13)):
                runner = Runner(system.program(2))
                for last in parts:
                    logits = extended(runner, _TEXT[:last])
                all_logits.append(logits)
                runner.restart()
                assert torch.equal(extended(runner, _TEXT), logits)
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(logits, all_logits[0]) for logits in all_logits)


def _same_as_a_rollout(system):
    """Checks the logits of every token, and their bits on any number of threads and in any pieces of the text."""
    whole = rolled_out(system, _TEXT, 2)
    n_threads = torch.get_num_threads()
    all_logits = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for parts in ((13,), (4, 13), range(1, 14)):
                runner = Runner(system.program(2))
                for last in parts:
                    logits = extended(runner, _TEXT[:last])
                    torch.testing.assert_close(logits, whole[last - 1], rtol=2e-5, atol=2e-5)
                all_logits.append(logits)
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(logits, all_logits[0]) for logits in all_logits)
    assert Decoder(system, 2, Generation()).backend.name == "runner"


_TRANSFORMS = {
    "Hadamard": lambda n: Rotation(n, "hadamard", n),
    "Hadamard in blocks": lambda n: Rotation(n, "hadamard", 12),
    "random in blocks": lambda n: Rotation(n, "random", 7),
    "scales": lambda n: ChannelScale(np.linspace(0.5, 2, n, dtype=np.float32)),
}


@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("name", ["Huginn", "looped Llama"])
def test_transformed_inputs_give_the_logits_of_a_rollout(name, transform):
    system = coded(open_system(CASES[name]), transform=_TRANSFORMS[transform])
    _same_as_a_rollout(system)


@pytest.mark.parametrize(
    ("name", "bits", "state_bits", "group_size", "transform"),
    [
        ("looped Llama", 3, 12, -1, "Hadamard"),
        ("looped Llama", 4, 14, 16, None),
        ("Huginn", 3, 10, 7, None),
        ("Huginn", 2, 16, -1, "Hadamard in blocks"),
    ],
)
def test_codes_on_a_trellis_give_the_logits_of_a_rollout(name, bits, state_bits, group_size, transform):
    given = {"transform": _TRANSFORMS.get(transform), "group_size": group_size}
    system = coded(open_system(CASES[name]), bits, trellis=Trellis(state_bits, 24), **given)
    _same_as_a_rollout(system)


def test_layers_with_one_input_may_have_unlike_transforms_and_codes():
    system = coded(open_system(CASES["looped Llama"]), transform=_TRANSFORMS["Hadamard"])
    layer = system.model.model.layers[0].self_attn
    for name, transform in (("q_proj", "scales"), ("v_proj", "random in blocks")):
        weight = getattr(layer, name).dequantize().numpy()
        solved = core.rtn(weight, bits=4, group_size=16)
        basis = _TRANSFORMS[transform](weight.shape[1])
        setattr(
            layer,
            name,
            linear_of(solved["codes"], solved["scales"], 16, 4, transform=basis, layout="lq-cpu"),
        )
    # Up and gate have one input and the same groups.
    mlp = system.model.model.layers[0].mlp
    shape = (mlp.up_proj.out_features, mlp.up_proj.in_features)
    mlp.up_proj = linear_of(
        np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8),
        np.full((shape[0], shape[1] // 16), 0.05, np.float32),
        16,
        4,
        transform=_TRANSFORMS["Hadamard"](shape[1]),
        trellis=Trellis(8, 512),
        layout="lq-cpu",
    )
    whole, n_threads = rolled_out(system, _TEXT, 2)[-1], torch.get_num_threads()
    all_logits = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            all_logits.append(extended(Runner(system.program(2)), _TEXT))
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(logits, all_logits[0]) for logits in all_logits)
    torch.testing.assert_close(all_logits[0], whole, rtol=2e-5, atol=2e-5)


def test_threads_do_not_overtake_each_other():
    """A core of two blocks behind an adapter, on more threads than there are processors, again and again."""
    system = coded(load_model("huginn_small").system)
    n_threads = torch.get_num_threads()
    ids = list(b"The sea was calm")
    try:
        torch.set_num_threads(1)
        expected = extended(Runner(system.program(8)), ids)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            runner = Runner(system.program(8))
            for _ in range(10):
                assert torch.equal(extended(runner, ids), expected)
                runner.restart()
    finally:
        torch.set_num_threads(n_threads)


def test_a_long_text_in_pieces_has_angles_for_all_positions():
    system = coded(looped("Llama"))
    long = [(7 * i) % 50 for i in range(700)]
    runner = Runner(system.program(1))
    torch.testing.assert_close(extended(runner, long), rolled_out(system, long, 1)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_models_in_sixteen_bits_differ_by_their_own_rounding(dtype, tolerance):
    system = coded(open_system(CASES["looped Llama"]))
    system.model.to(dtype)
    whole = rolled_out(system, _TEXT, 2)
    logits = extended(Runner(system.program(2)), _TEXT)
    assert (logits - whole[-1]).norm() < tolerance * whole[-1].norm()


@pytest.mark.parametrize("transform", [None, lambda n: Rotation(n, "hadamard", n)])
def test_eight_bit_activations_are_those_of_the_layers(transform):
    system = coded(open_system(CASES["looped Llama"]), transform=transform, activations="int8")
    exact = coded(open_system(CASES["looped Llama"]), transform=transform)
    whole = rolled_out(system, _TEXT, 2)[-1]
    logits = extended(Runner(system.program(2)), _TEXT)
    torch.testing.assert_close(logits, whole, rtol=2e-3, atol=2e-3)
    assert (logits - whole).norm() < 0.2 * (whole - rolled_out(exact, _TEXT, 2)[-1]).norm()


@pytest.mark.parametrize("name", ["Huginn", "looped Llama", "transformers HRM-Text"])
def test_caches_in_fewer_bits_change_logits_little_on_any_thread(name):
    system = coded(open_system(CASES[name]))
    whole = rolled_out(system, _TEXT, 2)[-1]
    n_threads = torch.get_num_threads()
    off = {}
    try:
        for kv in (8, 4):
            all_logits = []
            for threads, parts in ((1, (13,)), (2, (1, 2, 3, 13))):
                torch.set_num_threads(threads)
                runner = Runner(system.program(2), kv)
                for last in parts:
                    logits = extended(runner, _TEXT[:last])
                all_logits.append(logits)
            assert torch.equal(*all_logits)
            off[kv] = float((all_logits[0] - whole).norm() / whole.norm())
    finally:
        torch.set_num_threads(n_threads)
    assert 1e-6 < off[8] < 2e-2
    assert off[8] < off[4] < 0.3


def test_text_is_generated_by_it_and_not_by_a_wrong_description(monkeypatch):
    system = coded(open_system(CASES["Ouro"]))
    decoder = Decoder(system, 3, Generation())
    assert (decoder.backend.name, decoder.declined) == ("runner", {})
    for n in range(6, len(_TEXT) + 1):
        torch.testing.assert_close(
            decoder(_TEXT[:n]), rolled_out(system, _TEXT[:n], 3)[-1], rtol=2e-5, atol=2e-5
        )
    other = [3, *_TEXT[1:]]
    for text in (other, other[:9], other[:9]):
        torch.testing.assert_close(decoder(text), rolled_out(system, text, 3)[-1], rtol=2e-5, atol=2e-5)
    right = system.program

    def without_branch_norms(n_steps):
        program = right(n_steps)
        order = [
            (name, dataclasses.replace(what, norms=tuple(Branch(n.input) for n in what.norms)))
            if name == "block"
            else (name, what)
            for name, what in program.order
        ]
        return dataclasses.replace(program, order=order)

    monkeypatch.setattr(system, "program", without_branch_norms)
    wrong = Decoder(system, 3, Generation())
    assert wrong.declined["runner"] == "the runner gives other logits"
    torch.testing.assert_close(wrong(_TEXT), rolled_out(system, _TEXT, 3)[-1])


def test_a_text_without_new_tokens_is_refused_by_the_runner():
    system = coded(open_system(CASES["Ouro"]))
    runner = Runner(system.program(2))
    extended(runner, _TEXT)
    with pytest.raises(ConfigError, match="no tokens to go on by, after 13"):
        extended(runner, _TEXT)


def test_tokens_run_on_one_thread_where_more_take_longer(monkeypatch):
    clock, most = [0.0], 4
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: most)
    threads = _Threads()

    def ran(n_calls, seconds, n_tokens=1):
        given = []
        for _ in range(n_calls):
            with threads.of(n_tokens) as n:
                clock[0] += seconds[n]
            given.append(n)
        return given

    assert ran(3, {4: 1.0}, n_tokens=2) == [4] * 3
    assert ran(64, {4: 1.0, 1: 0.5}) == [4, 4] + [1] * 62
    # They are timed anew, since other work may have ended.
    assert ran(64, {4: 0.2, 1: 0.5}) == [4, 4, 1, 1] + [4] * 60
    # One slow call does not decide.
    assert ran(1, {4: 9.0}) + ran(63, {4: 0.2, 1: 0.5}) == [4, 4, 1, 1] + [4] * 60
    most = 1
    assert ran(5, {1: 1.0}) == [1] * 5


def test_what_it_does_not_know_is_run_by_the_models_modules():
    plain = Decoder(open_system(CASES["Ouro"]), 2, Generation())
    assert plain.declined["runner"] == "the runner takes models with codes, on the processor"
    other = Decoder(coded(open_system(CASES["Parcae"])), 2, Generation())
    assert other.declined["runner"] == "the runner does not know the blocks of SmallParcae"

    system = coded(open_system(CASES["looped Llama"]))
    layer = system.model.model.layers[0].mlp
    shape = (layer.down_proj.out_features, layer.down_proj.in_features)
    layer.down_proj = linear_of(
        np.zeros(shape, np.int8), np.ones((shape[0], 1), np.float32), -1, 4, layout="codes"
    )
    assert "does not multiply by QuantLinear" in Decoder(system, 2, Generation()).declined["runner"]


def test_linear_layers_without_codes_and_unlike_activations():
    system = open_system(CASES["looped Llama"])
    with pytest.raises(KernelError, match="found none"):
        Runner(system.program(2))
    coded(system)
    layer = system.model.model.layers[1].self_attn
    weight = layer.q_proj.dequantize()
    layer.q_proj = nn.Linear(weight.shape[1], weight.shape[0])
    layer.q_proj.weight.data, layer.q_proj.bias.data = weight, torch.linspace(-1, 1, len(weight))
    logits = extended(Runner(system.program(2)), _TEXT)
    torch.testing.assert_close(logits, rolled_out(system, _TEXT, 2)[-1], rtol=2e-5, atol=2e-5)
    layer.k_proj.activations = "int8"
    with pytest.raises(KernelError, match="found float, int8"):
        Runner(system.program(2))
    layer.k_proj = nn.modules.linear.NonDynamicallyQuantizableLinear(*layer.k_proj.weight.shape[::-1])
    with pytest.raises(KernelError, match="the runner takes linear layers, no NonDynamically"):
        Runner(system.program(2))


def test_norms_of_another_kind_are_refused():
    system = open_system(CASES["looped Llama"])
    system.model.model.norm = nn.LayerNorm(32)
    with pytest.raises(KernelError, match="the runner takes RMS norms, no LayerNorm"):
        Runner(system.program(2))


def test_shapes_that_do_not_fit_are_refused_and_nothing_is_kept():
    weight, square = np.ones((3, 4), np.float32), np.ones((4, 4), np.float32)
    block = {
        "heads": 2, "kv_heads": 1, "head": 2, "neighbours": False, "scale": 1.0, "qkv": [1, 1], "out": 1,
        "gate_up": [1, 1], "down": 1, "norms": [[None] * 3] * 2, "qk_bias": [], "qk_norms": None,
        "gates": False,
    }  # fmt: skip

    def make(block=block, order=(("block", 0),), norms=(), head=0, transform=None):
        return native.CpuRunner(
            [(None, weight, None, None), (None, square, None, transform)], list(norms), [block], list(order), head,
            precision="fixed24", kept="float32",
        )  # fmt: skip

    runner = make()
    angles, logits = np.zeros((3, 2), np.float32), np.zeros((1, 3), np.float32)
    runner.run(np.ones((2, 4), np.float32), angles, logits)
    assert runner.seen == 2
    with pytest.raises(ConfigError, match="angles: expected 8, got 6"):
        runner.run(np.ones((2, 4), np.float32), angles, logits)
    assert runner.seen == 0
    with pytest.raises(ConfigError, match="tokens with logits: expected at most 1, got 2"):
        runner.run(np.ones((1, 4), np.float32), angles, np.zeros((2, 3), np.float32))
    for wrong in (
        {"heads": 3}, {"head": 3}, {"kv_heads": 0}, {"qkv": [1]}, {"out": 0}, {"gate_up": [1]}, {"down": 7},
        {"heads": 0, "qkv": []}, {"heads": 0, "kv_heads": 1 << 62, "qkv": []}, {"gate_up": [1, 1, 0]},
        {"qk_bias": [1.0]}, {"qk_norms": [0, 0]}, {"norms": [[0, None, None], [None] * 3]},
        {"gates": True},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="expected"):
            make({**block, **wrong})
    for order in (
        [("block", 1)],
        [("norm", 0)],
        [("adapter", 1)],
        [("keep", 2)],
        [("take", 2)],
        [("add", 2)],
    ):
        with pytest.raises(ConfigError, match="expected"):
            make(order=order)
    with pytest.raises(ConfigError, match="a norm: expected 4, got 3"):
        make(norms=[([1.0] * 3, 1e-6)], order=[("norm", 0)])
    with pytest.raises(ConfigError, match="states to begin with"):
        make(order=[("start", 0)]).run(np.ones((1, 4), np.float32), angles, logits)
    with pytest.raises(TypeError, match='no step of a program is called "walk"'):
        make(order=[("walk", 0)])
    for empty in ((4, 0), (0, 4)):
        with pytest.raises(ConfigError, match="a weight of a program: expected 1 or more outputs and inputs"):
            native.CpuRunner(
                [(None, np.ones(empty, np.float32), None, None)],
                [],
                [],
                [],
                0,
                precision="int8",
                kept="float32",
            )
    pair = np.ones((2, 2), np.float32)
    with pytest.raises(ConfigError, match="inputs of an input transform: expected 4, got 2"):
        make(transform=[(1, [pair])]).run(np.ones((1, 4), np.float32), angles, logits)
    for transform in (
        [(0, [pair])],
        [(1, [pair, pair[:1]])],
        [(1, [np.ones(0, np.float32)])],
        [(1 << 62, [pair])],
    ):
        with pytest.raises(ConfigError, match="an input transform"):
            make(transform=transform)
    with pytest.raises(
        TypeError, match="a factor of an input transform must be a 2-dimensional array of float32"
    ):
        make(transform=[(1, [pair.astype(float)])])
    with pytest.raises(ConfigError, match="outputs for the gate and what it multiplies: expected an even"):
        make({**block, "gate_up": [0, 1, 1]})


def test_a_runner_that_another_thread_uses_is_refused():
    runner = Runner(coded(open_system(CASES["looped Llama"])).program(2))
    ended, said = threading.Event(), []

    def work():
        while not ended.is_set():
            with contextlib.suppress(ConfigError):
                runner.restart()
                extended(runner, _TEXT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(1_000_000):
            try:
                _ = runner.seen
            except ConfigError as error:
                said.append(str(error))
                break
    finally:
        ended.set()
        thread.join()
    assert "computes for another thread" in said[0]
