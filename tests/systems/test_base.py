"""The base of every adapter: parameters with values, and errors of the model's code."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loopq.errors import CalibrationError, ConfigError
from loopq.systems.base import MAX_STEPS, Batch, LoopedSystem, Published, differentiable
from tests.support.odd_models import quantized

from ..soak.inputs import Loop


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Loop(nn.LazyLinear(16)), r"core\.weight has no values \(lazy module"),
        (lambda: Loop().to("meta"), r"embed\.weight has no values \(device meta"),
    ],
)
def test_parameters_without_values(make, match):
    with pytest.raises(ConfigError, match=match):
        quantized(make())


class Fails(Loop):
    """Its core fails at a step, from a call on."""

    def __init__(self, first):
        super().__init__()
        self.calls, self.first = 0, first

    def step(self, x, t):
        self.calls += 1
        if self.calls > self.first:
            raise ValueError("boom\nand more")
        return x + self.core(x)


@pytest.mark.parametrize(
    ("first", "match"),
    [
        (0, r"trial run, before the first layer .*: the model raises ValueError: boom$"),
        (3, r"trial run, after layer core\.weight was called at step 2: the model raises ValueError: boom$"),
        (6, r"rollout of prompt 0, after layer core\.weight was called at step 1: the model raises"),
    ],
)
def test_what_a_forward_raises_names_the_step_and_the_layer(first, match):
    with pytest.raises(CalibrationError, match=match):
        quantized(Fails(first), method="gptq", inputs="open")


def batch(*prompts, n_tokens=5, **more):
    return Batch(torch.zeros(len(prompts), n_tokens, dtype=torch.long), prompts, **more)


def test_noise_of_a_prompt_is_the_same_in_every_batch():
    both = batch(3, 4, seed=2).noise(5, 6)
    assert (both.shape, both.dtype) == ((2, 5, 6), torch.float32)
    torch.testing.assert_close(batch(4, seed=2).noise(5, 6)[0], both[1], rtol=0, atol=0)
    generator = torch.Generator().manual_seed(2 * 1_000_003 + 4)
    torch.testing.assert_close(both[1], torch.randn(5, 6, generator=generator), rtol=0, atol=0)
    assert not torch.equal(batch(4, seed=3).noise(5, 6)[0], both[1])
    torch.testing.assert_close(batch(4, seed=2).noise(5, 6, std=0.5)[0], 0.5 * both[1])
    torch.testing.assert_close(batch(4, seed=2).noise(5, 6, first=2)[0], both[1, 2:], rtol=0, atol=0)


def test_noise_by_token_does_not_depend_on_the_length():
    whole = batch(3, by_token=True).noise(5, 6)
    torch.testing.assert_close(batch(3, n_tokens=2, by_token=True).noise(2, 6), whole[:, :2], rtol=0, atol=0)
    torch.testing.assert_close(batch(3, by_token=True).noise(5, 6, first=3), whole[:, 3:], rtol=0, atol=0)
    generator = torch.Generator().manual_seed(3 * 1_000_033 + 1 + 2)
    torch.testing.assert_close(whole[0, 2], torch.randn(6, generator=generator), rtol=0, atol=0)
    torch.testing.assert_close(batch(3, by_token=True).noise(5, 6, std=2.0), 2 * whole)


def test_truncated_noise_stays_within_its_cut():
    drawn = batch(0).noise(200, 10, cut=1.5)
    assert 1.3 < float(drawn.abs().max()) <= 1.5
    assert float(drawn.min()) < -1.3
    # A normal distribution cut at 1.5 has this standard deviation.
    assert float(drawn.std()) == pytest.approx(0.743, abs=0.03)
    assert float(batch(0).noise(200, 10, cut=1.5, std=4.0).abs().max()) > 5


def test_the_global_generator_does_not_change():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    batch(0).noise(5, cut=1.0)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("shape", "n"), [((2, 3), 1), ((2,), 2), ((1, 2, 3), 1)])
def test_a_batch_has_a_number_for_each_prompt(shape, n):
    with pytest.raises(ConfigError, match=rf"got shape .* and {n} numbers"):
        Batch(torch.zeros(shape), tuple(range(n)))


class Plain(LoopedSystem):
    """The smallest adapter."""

    name = "plain"

    @classmethod
    def matches(cls, model):
        return True

    n_steps = 2

    def shared_parameters(self, n_steps):
        return ()

    def rollout(self, batch, n_steps):
        return None


def test_an_adapter_has_bounds_of_its_depth_and_defaults():
    system = Plain(nn.Linear(2, 2, dtype=torch.float64))
    assert (system.check_depth(1), system.check_depth(MAX_STEPS)) == (1, MAX_STEPS)
    for bad, match in ((0, "at least 1; got 0"), (MAX_STEPS + 1, f"at most {MAX_STEPS}")):
        with pytest.raises(ConfigError, match=match):
            system.check_depth(bad)
    assert (system.left_out(), system.output, system.state_is_random) == ({}, "logits", False)
    assert (system.published, Published().checkpoints) == (Published(), {})
    assert system.device == torch.device("cpu")
    assert system.to_device(torch.zeros(1)).dtype == torch.float32
    assert system.to_device(torch.zeros(1), dtype=True).dtype == torch.float64


def test_graphs_are_kept_inside_a_block_and_in_one_thread():
    system, seen = Plain(nn.Linear(2, 2)), SimpleNamespace(there=None)
    assert system.keeps_graph is False
    with differentiable(system):
        assert system.keeps_graph is True
        with differentiable(system):
            pass
        assert system.keeps_graph is True
        thread = threading.Thread(target=lambda: setattr(seen, "there", system.keeps_graph))
        thread.start()
        thread.join()
    assert (system.keeps_graph, seen.there) == (False, False)
    with pytest.raises(ValueError, match="x"), differentiable(system):
        raise ValueError("x")
    assert system.keeps_graph is False
