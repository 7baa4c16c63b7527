"""Turn the stacked experts of a transformers 5 class into separate modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopq.models.files import conversions

if TYPE_CHECKING:
    from torch import Tensor

#: The layout of a class of experts in transformers.
_FLAGS = ("is_transposed", "is_concatenated", "has_gate", "has_bias", "has_post_expert_norm")
#: Names of an expert's layers, where the files have no names for them: in general, and as engines look for Granite's.
_NAMES, _SPARSE_NAMES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


class Experts(nn.ModuleList):  # type: ignore[misc, unused-ignore]
    """Experts of one block with separate linear layers. Replaces a module with stacked matrices.

    Their weights are views of the stacks if these store the rows of a linear layer contiguously.

    Parameters
    ----------
    stacks : nn.Module
        Module with ``gate_up_proj`` (n_experts, 2 * inner, width) and ``down_proj`` (n_experts, width, inner). Experts
        without a gate have ``up_proj`` instead of the first. The matrices may be transposed, have biases, or alternate
        the rows of gate and up.
    names : tuple of str
        Names of the layers for gate, up and down.
    """

    def __init__(self, stacks: Any, names: tuple[str, str, str]) -> None:
        self.gated, self.alternate = bool(stacks.has_gate), not stacks.is_concatenated
        self.transposed = bool(stacks.is_transposed)
        both = "gate_up_proj" if self.gated else "up_proj"
        first, down = (self._matrices(stacks, name) for name in (both, "down_proj"))
        experts = []
        for (up, up_bias), (weight, bias) in zip(first, down, strict=True):
            parts = list(zip(self._halves(up), self._halves(up_bias), strict=True))
            layers = [_linear(*part) for part in parts] + [_linear(weight, bias)]
            experts.append(nn.ModuleDict(dict(zip(names[-len(layers) :], layers, strict=True))))
        super().__init__(experts)
        self.names = names[-len(experts[0]) :]
        stacks._parameters.clear()
        # The remaining module computes without parameters. If registered, it would count as an expert.
        self.__dict__["act"] = stacks._apply_gate if self.gated else stacks.act_fn

    def _matrices(self, stacks: Any, name: str) -> list[tuple[Tensor, Tensor | None]]:
        """Weight (outputs first) and bias of each expert."""
        weights = getattr(stacks, name).detach()
        weights = weights.transpose(1, 2).contiguous() if self.transposed else weights
        biases = getattr(stacks, f"{name}_bias").detach() if stacks.has_bias else [None] * len(weights)
        return list(zip(weights, biases, strict=True))

    def fill(self, name: str, stack: Tensor) -> None:
        """Fill the layers from a stack, given its name in the module of transformers."""
        stem = name.removesuffix("_bias")
        layers = self.names[-1:] if stem == "down_proj" else self.names[:-1]
        if stem == name and self.transposed:
            stack = stack.transpose(1, 2).contiguous()
        for expert, matrix in zip(self, stack, strict=True):
            parts = [matrix] if stem == "down_proj" else self._halves(matrix)
            for layer, part in zip(layers, parts, strict=True):
                getattr(expert[layer], "weight" if stem == name else "bias").data = part

    def _halves(self, both: Tensor | None) -> list[Tensor | None]:
        if both is None or not self.gated:
            return [both] * (1 + self.gated)
        if self.alternate:
            return [both[0::2].contiguous(), both[1::2].contiguous()]
        return list(both.chunk(2))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Add the experts' outputs for the rows routed to them, in float32.

        The index and the weights, of shape (n_rows, k), are the experts of each row and their shares.
        """
        *first, down = self.names
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for number, expert in enumerate(self):
            row, choice = torch.where(top_k_index == number)
            if row.numel():
                mine = hidden_states[row]
                parts = [expert[name](mine) for name in first]
                both = torch.stack(parts, -1).flatten(-2) if self.alternate else torch.cat(parts, -1)
                part = expert[down](self.act(both)) * top_k_weights[row, choice, None]
                out.index_add_(0, row, part.float())
        return out.to(hidden_states.dtype)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def unfuse(model: nn.Module) -> list[str]:
    """Turn each stacked expert of a transformers 5 model into a module, in place, and return the changes in words.

    Experts that are modules already stay unchanged. So do experts in an unknown layout
    (`loopq.systems.routing.stacked_experts` lists them).
    """
    stacked = [name for name, module in model.named_modules() if _is_known(name, module)]
    names = _names(model) if stacked else _NAMES
    for name in stacked:
        parent, _, child = name.rpartition(".")
        sparse = names == _NAMES and "block_sparse_moe" in parent
        block = model.get_submodule(parent)
        setattr(block, child, Experts(block.get_submodule(child), _SPARSE_NAMES if sparse else names))
    return [f"experts of {len(stacked)} blocks: linear layers"] * bool(stacked)


def _is_known(name: str, module: nn.Module) -> bool:
    flags = {flag: getattr(module, flag, None) for flag in _FLAGS}
    if None in flags.values() or flags["has_post_expert_norm"] or not name.endswith("experts"):
        return False
    stacks = {"gate_up_proj" if flags["has_gate"] else "up_proj", "down_proj"}
    needed = stacks | ({f"{stack}_bias" for stack in stacks} if flags["has_bias"] else set())
    return {key for key, _ in module.named_parameters()} == needed and not list(module.buffers())


def _names(model: nn.Module) -> tuple[str, str, str]:
    """An expert's layer names in the files if loading stacks them, else the usual names."""
    names: dict[str, list[str]] = {}
    for rule in conversions(model):
        steps = [type(step).__name__ for step in getattr(rule, "operations", None) or ()]
        target = rule.target_patterns[0]
        if target.endswith("experts.gate_up_proj") and steps == ["MergeModulelist", "Concatenate"]:
            names["both"] = [pattern.split(".")[-2] for pattern in rule.source_patterns]
        elif target.endswith("experts.down_proj") and steps == ["MergeModulelist"]:
            names["down"] = [pattern.split(".")[-2] for pattern in rule.source_patterns]
    both, down = names.get("both", []), names.get("down", [])
    return (both[0], both[1], down[0]) if len(both) == 2 and len(down) == 1 else _NAMES
