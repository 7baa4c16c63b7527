"""Looped stacks of Llama-style layers."""

from __future__ import annotations

import pytest

from tests.support.systems import CASES, open_system


@pytest.mark.parametrize("name", ["Ouro", "Nanbeige"])
def test_the_program_runs_all_layers_and_the_norm_once_a_loop(name):
    system = open_system(CASES[name])
    layers = system.model.model.layers
    for n_steps in (1, 3):
        program = system.program(n_steps)
        assert [kind for kind, _ in program.order] == [*["block"] * len(layers), "norm"] * n_steps
        assert program.head is system.model.lm_head


def test_an_unknown_layer_leaves_the_loop_without_a_program():
    system = open_system(CASES["Ouro"])
    system.model.model.layers[1].another = system.model.model.norm
    assert system.program(2) is None


@pytest.mark.parametrize("name", ["Ouro", "Nanbeige"])
def test_seven_linears_of_every_layer_are_declared(name):
    system = open_system(CASES[name])
    declared = [p.name for p in system.shared_parameters(system.n_steps)]
    for i in range(len(system.model.model.layers)):
        assert sum(n.startswith(f"model.layers.{i}.") for n in declared) == 7
