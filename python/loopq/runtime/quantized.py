"""Replace a model's linear layers by quantized modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from loopq.errors import CheckpointError
from loopq.formats.checkpoint import Checkpoint
from loopq.layers.layer import QuantizedLayer
from loopq.runtime.linear import QuantLinear
from loopq.storage.names import names_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from loopq.models.coded import Activations


class QuantEmbedding(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Embedding table over integer codes on a plain grid without a transform, (vocabulary, width).

    For a tied head it is the head's layer. Rows have the model's type.
    """

    like: torch.Tensor

    def __init__(self, table: QuantLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = table.out_features, table.in_features
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """All rows, computed at each use."""
        return self.table.dequantize().to(self.like.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantEmbedding:
        """Gets its own codes if a tied head, on a GPU, has the kernel's words, which have no rows."""
        super()._apply(fn, recurse)
        if self.table.layout == "lq-w4":
            table = self.table
            self.table = QuantLinear("codes", table.codes(), table.scales, held=table.held)
        return self

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows (..., width) for integer ids (...)."""
        rows = self.table.rows(ids.reshape(-1).long()).to(self.like.dtype)
        return rows.view(*ids.shape, self.embedding_dim)


def install(model: nn.Module, checkpoint: Checkpoint, activations: Activations = "float") -> dict[str, str]:
    """Replace every linear layer in a checkpoint by a `QuantLinear`, and every table by a `QuantEmbedding`.

    The model holds the checkpoint's weights (`loopq.formats.checkpoint.load_into`).

    Returns
    -------
    dict of str to str
        Layers that keep a dequantized weight, with the reason.

    Raises
    ------
    CheckpointError
        If a layer of the checkpoint is not a module of the model, or has another shape.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    replacements: dict[int, Any] = {}
    kept: dict[str, str] = {}
    for layer in checkpoint.layers.values():
        owners = _owners(modules, checkpoint, layer.name)
        if layer.module not in modules and layer.name in parameters:
            kept[layer.name] = "a parameter that no module is called with"
            continue
        if any(module is None for module in owners):
            raise CheckpointError(f"layer {layer.name}: the model has no module of this name")
        why = why_kept(layer, owners)
        if why:
            kept[layer.name] = why
            continue
        replacements |= stand_ins(layer, owners, activations)
    for name, module in modules.items():
        if id(module) in replacements:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, replacements[id(module)])
    return kept


def coded(model: nn.Module, checkpoint: Checkpoint) -> set[str]:
    """Names of the layers that `install` will replace by modules with codes."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owners_of = {name: _owners(modules, checkpoint, name) for name in checkpoint.layers}
    return {
        name
        for name, owners in owners_of.items()
        if None not in owners and not why_kept(checkpoint.layers[name], owners)
    }


def _owners(modules: dict[str, nn.Module], checkpoint: Checkpoint, name: str) -> list[Any]:
    """Modules that hold a layer's weight, under its name and tied ones. None for a missing one."""
    names = [name, *(tied for tied, source in checkpoint.ties.items() if source == name)]
    file_names = names_of(modules[""])
    return [modules.get(file_names.in_model(n).removesuffix(".weight")) for n in names]


def _is_table(module: nn.Module) -> bool:
    return type(module) is torch.nn.Embedding and module.max_norm is None


def why_kept(layer: QuantizedLayer, owners: Sequence[Any]) -> str:
    """Why a layer keeps a dequantized weight. Empty if its modules are replaced."""
    others = [module for module in owners if not _is_table(module)]
    strange = {type(module).__name__ for module in others if type(module) is not torch.nn.Linear}
    if strange:
        return f"held by {', '.join(sorted(strange))}, which is not nn.Linear"
    if len(others) < len(owners) and (not layer.grid.plain or layer.transform is not None):
        return "rows of a table are read from codes on a plain grid, without a transform"
    if not all(_has_product(layer, module.weight.device) for module in owners):
        return f"codes of {layer.grid.label}, whose products run on the processor"
    return ""


def stand_ins(
    layer: QuantizedLayer, owners: Sequence[Any], activations: Activations = "float"
) -> dict[int, Any]:
    """Replacements for the modules of a layer, by the module's `id`.

    A table reads the codes of the head that it is tied to.
    """
    # A module may have several names.
    each = {id(module): module for module in owners}
    heads = {i: quantized_linear(layer, m, activations) for i, m in each.items() if not _is_table(m)}
    head = next(iter(heads.values()), None)
    tables = ((i, m) for i, m in each.items() if _is_table(m))
    return heads | {i: QuantEmbedding(head or quantized_linear(layer, m), m.weight.dtype) for i, m in tables}


def held(layer: QuantizedLayer, owners: Sequence[Any]) -> dict[int, Any]:
    """Modules that hold a layer, by the `id` of those that they stand for: `stand_ins`, or the same, dequantized.

    Of a weight only shape, type and device are used.
    """
    if not why_kept(layer, owners):
        return stand_ins(layer, owners)
    place = owners[0].weight
    weight = torch.nn.Parameter(torch.from_numpy(layer.dequantize()).to(place), requires_grad=False)
    for module in owners:
        module.weight = weight
    return {id(module): module for module in owners}


def _has_product(layer: QuantizedLayer, device: Any) -> bool:
    """Whether a device multiplies by a layer's packed codes."""
    return layer.grid.plain or device.type == "cpu"


def quantized_linear(layer: QuantizedLayer, linear: Any, activations: Activations = "float") -> Any:
    """Return a module with a layer's codes, on the device and with the bias of the replaced one.

    Raises
    ------
    CheckpointError
        If the module's `weight` has another shape.
    """
    if tuple(linear.weight.shape) != layer.shape:
        raise CheckpointError(
            f"layer {layer.name}: of shape {list(layer.shape)}, the model has {list(linear.weight.shape)}"
        )
    bias = getattr(linear, "bias", None)
    module = QuantLinear.from_layer(layer, bias, layout="lq-cpu", activations=activations)
    module.dtype = linear.weight.dtype
    return module.to(linear.weight.device)
