"""Views of a model: modules over the same parameters, in which some objects are others.

A rollout at another depth needs another count in the configuration, or other layers in a list. Changing these in the
model would change it for every thread. A view is made for one call instead. It copies only the modules that lead to a
changed object. All others, their hooks, and every parameter are those of the model.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from torch import nn

System = TypeVar("System", bound=LoopedSystem)
#: Tables of a module that a copy has for itself: hooks set on a copy do not reach the original.
_OWN = (
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def view(module: nn.Module, *others: tuple[Any, Any]) -> Any:
    """Return a module over the same parts, with other objects in place of some.

    Parameters
    ----------
    module : nn.Module
        The original. It does not change.
    *others : tuple of (object, object)
        A submodule, a parameter or a configuration (attribute ``config`` of any module), and what stands in its place.

    Returns
    -------
    nn.Module
        The module itself where nothing in it is replaced. A shared submodule stays one object.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> other = view(model, (model[1], nn.Identity()))
    >>> other[0] is model[0], type(other[1]).__name__, type(model[1]).__name__
    (True, 'Identity', 'ReLU')
    """
    return _seen(module, {id(old): new for old, new in others}, {})


def system_of(system: System, *others: tuple[nn.Parameter, nn.Parameter]) -> System:
    """Return the adapter of a copy of its model with other parameters in place of some.

    Every module is copied, so hooks set on either model do not reach the other. All other tensors are shared.
    """
    from torch import nn  # lazy: loopq imports without torch

    adapters = [system, *(a for a in vars(system).values() if isinstance(a, LoopedSystem))]
    held = [m for a in adapters for m in vars(a).values() if isinstance(m, nn.Module)]
    modules = {id(m): m for one in held for m in one.modules()}
    links: dict[int, Any] = {id(old): new for old, new in others}
    for one in (*modules.values(), *adapters):
        links[id(one)] = object.__new__(type(one))
    for one in (*modules.values(), *adapters):
        vars(links[id(one)]).update({name: _deep(value, links) for name, value in vars(one).copy().items()})
    adapter: System = links[id(system)]
    return adapter


def changed(config: Any, **values: Any) -> Any:
    """Return a copy of a configuration with other values."""
    new = copy.copy(config)
    for name, value in values.items():
        setattr(new, name, value)
    return new


def copied(module: nn.Module, **values: Any) -> Any:
    """Return a copy of a module over the same parameters, buffers and submodules, with other attributes."""
    new = object.__new__(type(module))
    # Another thread may set an attribute or a hook meanwhile, so tables are copied before they are read.
    attributes = vars(module).copy()
    vars(new).update({name: _linked(value, {id(module): new}) for name, value in attributes.items()})
    vars(new).update({name: attributes[name].copy() for name in _OWN})
    vars(new).update(values)
    return new


def _linked(value: Any, links: Mapping[int, Any]) -> Any:
    """A value with other objects in place of some: itself, the owner of a method, an argument of a partial call."""
    if id(value) in links:
        return links[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, links.get(id(value.__self__), value.__self__))
    if type(value) is functools.partial:
        args = [_linked(a, links) for a in value.args]
        return functools.partial(_linked(value.func, links), *args, **value.keywords)
    return value


def _deep(value: Any, links: Mapping[int, Any]) -> Any:
    """As `_linked`, also within tables and lists, which are copied."""
    if type(value) in (dict, OrderedDict):
        return type(value)((name, _linked(v, links)) for name, v in value.copy().items())
    if type(value) in (list, tuple):
        return type(value)(_linked(v, links) for v in value)
    return _linked(value, links)


def _seen(module: Any, others: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if id(module) in others:
        return others[id(module)]
    if id(module) not in done:
        tables = {
            "_modules": {
                n: None if m is None else _seen(m, others, done) for n, m in module._modules.items()
            },
            "_parameters": {n: others.get(id(p), p) for n, p in module._parameters.items()},
        }
        new = {n: t for n, t in tables.items() if any(t[k] is not v for k, v in getattr(module, n).items())}
        config = vars(module).get("config")
        if config is not None and id(config) in others:
            new["config"] = others[id(config)]
        done[id(module)] = copied(module, **new) if new else module
    return done[id(module)]
