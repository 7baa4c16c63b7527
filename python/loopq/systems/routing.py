"""Experts in lists and stacks, and the modules that route rows to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def routing_module(model: nn.Module, name: str, layer: str = "") -> str | None:
    """Name of the module that holds this module in a list of experts (`nn.ModuleList`). None without such a list.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    name : str
        Name of the module.
    layer : str
        Module around it. Lists that also hold this one are not lists of experts.
    """
    from torch import nn  # lazy: loopq imports without torch

    def is_list(module: str) -> bool:
        return module != layer and isinstance(model.get_submodule(module), nn.ModuleList)

    while name != layer:
        name = name.rpartition(".")[0]
        if is_list(name):
            while is_list(name):
                name = name.rpartition(".")[0]
            return name
    return None


def gates(model: nn.Module, routing: Iterable[str]) -> dict[str, str]:
    """Weights that choose or weigh experts, with the reason why they stay unchanged.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    routing : iterable of str
        Modules that choose experts. A child besides the experts is a gate if it has one output, or one per expert.
    """
    from torch import nn  # lazy: loopq imports without torch

    reasons = {}
    for name in routing:
        block = model.get_submodule(name)
        n_experts = max((len(m) for m in block.children() if isinstance(m, nn.ModuleList)), default=0)
        for child, module in block.named_children():
            weight = module._parameters.get("weight")
            if weight is not None and weight.ndim == 2 and weight.shape[0] in (1, n_experts):
                reasons[f"{name}.{child}.weight".lstrip(".")] = "a gate, which chooses or weighs experts"
            # A router with other parts besides its one matrix.
            inner = [part for part, m in module.named_modules() if part and isinstance(m, nn.Linear)]
            if len(inner) == 1 and module.get_submodule(inner[0]).out_features == n_experts:
                reasons[f"{name}.{child}.{inner[0]}.weight".lstrip(".")] = (
                    "a gate, which chooses or weighs experts"
                )
    return reasons


def stacked_experts(model: nn.Module) -> dict[str, str]:
    """Experts stored in three-dimensional tensors that no module is called with, with advice."""
    return {
        name: "experts in one tensor of three dimensions: `loopq.models.experts.unfuse(model)` takes apart those of "
        "classes of transformers 5 that use its interface of experts; no other layout can be quantized"
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and name.rpartition(".")[0].endswith("experts")
    }
