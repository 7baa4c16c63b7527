"""Views of a model: some objects are others, all else is shared, and the original stays as it was."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loopq.systems import views
from tests.support.looptoys import LinearLoop, LinearSystem


class Outer(nn.Module):
    """Two lists that share a module, beside one that nothing replaces."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(n=1)
        self.shared = nn.Linear(2, 2)
        self.left = nn.Sequential(self.shared, nn.ReLU())
        self.right = nn.Sequential(self.shared)
        self.apart = nn.Sequential(nn.Linear(2, 2))
        self.none = None
        self.bound = self.read
        self.partial = functools.partial(self.read, 3)

    def read(self, *more):
        return (self.config.n, *more)


def test_a_view_without_changes_is_the_module_itself():
    model = Outer()
    assert views.view(model) is model
    assert views.view(model, (nn.ReLU(), nn.Identity())) is model


def test_only_modules_on_the_way_to_a_change_are_copied():
    model, other = Outer(), nn.Linear(2, 2)
    view = views.view(model, (model.shared, other))
    assert view is not model
    assert type(view) is Outer
    assert (view.shared, view.left[0], view.right[0]) == (other, other, other)
    assert view.left is not model.left
    assert (view.left[1], view.apart, view.none) == (model.left[1], model.apart, None)
    assert model.left[0] is model.right[0] is model.shared


def test_parameters_and_configurations_can_be_replaced():
    model = Outer()
    weight, config = nn.Parameter(torch.ones(2, 2)), SimpleNamespace(n=5)
    view = views.view(model, (model.shared.weight, weight), (model.config, config))
    assert view.left[0] is view.right[0]
    assert view.shared.weight is weight
    assert view.shared.bias is model.shared.bias
    # Methods and partial calls kept as attributes belong to the copy.
    assert (view.read(), view.bound(), view.partial(4)) == ((5,), (5,), (5, 3, 4))
    assert (model.bound(), model.partial()) == ((1,), (1, 3))
    assert model.shared.weight is not weight


def test_hooks_of_a_copy_do_not_reach_the_original():
    model = Outer()
    view = views.copied(model.shared, extra=3)
    seen = []
    view.register_forward_hook(lambda *_: seen.append("after"))
    view.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.shared(torch.zeros(1, 2))
    assert seen == []
    view(torch.zeros(1, 2))
    assert seen == ["before", "after"]
    assert view.extra == 3
    assert not hasattr(model.shared, "extra")
    assert view.weight is model.shared.weight


def test_a_changed_configuration_is_another_one():
    config = SimpleNamespace(a=1, b=2)
    new = views.changed(config, b=3, c=4)
    assert (new.a, new.b, new.c) == (1, 3, 4)
    assert vars(config) == {"a": 1, "b": 2}


def test_an_adapter_of_a_copy_has_other_parameters():
    system = LinearSystem(LinearLoop())
    system.inner = LinearSystem(system.model)
    weight = nn.Parameter(torch.zeros_like(system.model.core.weight))
    adapter = views.system_of(system, (system.model.core.weight, weight))
    assert type(adapter) is LinearSystem
    assert adapter.model is adapter.inner.model
    assert adapter.model is not system.model
    assert adapter.model.core.weight is weight
    assert adapter.model.core is not system.model.core
    assert adapter.model.adapter.weight is system.model.adapter.weight
    assert system.model.core.weight is not weight
    adapter.model.adapter.register_forward_hook(lambda *_: pytest.fail("the original was hooked"))
    system.model.adapter(torch.zeros(1, system.model.adapter.in_features, dtype=weight.dtype))


def test_links_are_followed_into_calls_and_tables():
    old, new = object(), object()
    links = {id(old): new}
    assert views._linked(old, links) is new
    assert views._linked("x", links) == "x"
    linked = views._linked(functools.partial(max, old, key=3), links)
    assert (linked.func, linked.args, linked.keywords) == (max, (new,), {"key": 3})
    assert views._deep({"a": old, "b": 1}, links) == {"a": new, "b": 1}
    assert views._deep([old, 2], links) == [new, 2]
    assert views._deep((old, 2), links) == (new, 2)
