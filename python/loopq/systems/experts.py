"""Experts of transformers 5, which keeps those of a block as two tensors: each a module of its own, as in the files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from loopq.errors import MissingExtraError
from loopq.lazy import require

if TYPE_CHECKING:
    from torch import Tensor

#: What transformers says of a class of experts that this module can stand for.
_LAYOUT = {
    "is_transposed": False,
    "is_concatenated": True,
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
}


class Experts(nn.ModuleList):  # type: ignore[misc, unused-ignore]
    """Experts of one block, each with three linear layers, in the place of a module that keeps them in two tensors.

    Parameters
    ----------
    fused : nn.Module
        Module with ``gate_up_proj`` (n_experts, 2 * inner, width) and ``down_proj`` (n_experts, width, inner).
    names : tuple of str
        Names of the layers for gate, up and down.
    """

    def __init__(self, fused: Any, names: tuple[str, str, str]) -> None:
        up = fused.gate_up_proj.detach()
        half = up.shape[1] // 2
        super().__init__(
            nn.ModuleDict(dict(zip(names, map(_linear, (both[:half], both[half:], down)), strict=True)))
            for both, down in zip(up, fused.down_proj.detach(), strict=True)
        )
        self.names = names
        # Bound, since a module would be one of the experts.
        self.activation = getattr(fused.act_fn, "forward", fused.act_fn)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Add what the experts give of the rows that are sent to them.

        Parameters
        ----------
        hidden_states : Tensor, shape (n_rows, width)
        top_k_index, top_k_weights : Tensor, shape (n_rows, k)
            Experts of each row, and their shares.

        Returns
        -------
        Tensor, shape (n_rows, width)
        """
        gate, up, down = self.names
        out = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            row, choice = torch.where(top_k_index == number)
            if row.numel():
                mine = hidden_states[row]
                part = expert[down](self.activation(expert[gate](mine)) * expert[up](mine))
                out.index_add_(0, row, (part * top_k_weights[row, choice, None]).to(out.dtype))
        return out


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.clone())
    return made


def unfuse(model: nn.Module) -> list[str]:
    """Make each expert of a model of transformers 5 a module of its own, named as in the checkpoint's files.

    Parameters
    ----------
    model : nn.Module
        Changed in place. Experts that are modules already stay as they are, and so do those in a layout that is not
        known (`loopq.systems.base.fused_experts` lists them).

    Returns
    -------
    list of str
        What was done, in words.
    """
    config = getattr(model, "config", None)
    names, renamed = _names_on_disk(getattr(config, "model_type", None))
    if names is None:
        return []
    blocks = [name.removesuffix(".experts") for name, m in model.named_modules() if _is_known(name, m)]
    for name in blocks:
        block = model.get_submodule(name)
        block.experts = Experts(block.experts, names)
        parent, _, child = name.rpartition(".")
        if child in renamed:
            _rename(model.get_submodule(parent), child, renamed[child])
    return [f"experts of {len(blocks)} blocks: linear layers, named as in its files"] * bool(blocks)


def _is_known(name: str, module: nn.Module) -> bool:
    known = all(getattr(module, flag, None) is value for flag, value in _LAYOUT.items())
    if not known or not name.endswith(".experts"):
        return False
    own = require("transformers.integrations.moe")._default_apply_gate
    return type(module)._apply_gate is own and hasattr(module, "act_fn")


def _rename(parent: Any, old: str, new: str) -> None:
    """Give a submodule another name in the state; the code of the model goes on to use the old one."""
    module = parent._modules.pop(old)
    parent._modules[new] = module
    object.__setattr__(parent, old, module)


def _names_on_disk(model_type: str | None) -> tuple[tuple[str, str, str] | None, dict[str, str]]:
    """Names of an expert's layers in files of a class, None where transformers does more than to stack them; and of
    blocks that have another name there.
    """
    try:
        found = require("transformers.conversion_mapping").get_checkpoint_conversion_mapping(model_type)
    except (MissingExtraError, AttributeError):  # transformers 4, where they are modules
        return None, {}
    renamed: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for rule in found or ():
        stored, target = list(rule.source_patterns), rule.target_patterns[0]
        steps = [type(step).__name__ for step in getattr(rule, "operations", None) or ()]
        words = [re.fullmatch(r"\.(\w+)\.", pattern) for pattern in (target, *stored)]
        if not steps and len(words) == 2 and all(words):
            renamed[words[0][1]] = words[1][1]  # type: ignore[index]
        elif steps[:1] == ["MergeModulelist"] and ".experts." in f".{target}":
            names[target.rpartition(".")[2]] = [pattern.split(".")[-2] for pattern in stored]
        else:
            return None, {}
    both, down = names.get("gate_up_proj", []), names.get("down_proj", [])
    return ((both[0], both[1], down[0]) if len(both) == 2 and len(down) == 1 else None), renamed
