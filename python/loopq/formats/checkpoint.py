"""A quantized model as plain arrays, which every format writes and reads back."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.layers.layer import QuantizedLayer
from loopq.layers.loop_spec import LOOP
from loopq.storage.files import DTYPE_NAMES, RawTensor, float_to_raw, json_bytes
from loopq.storage.model_files import check_ties, passed_over, raw, set_beside, to_torch
from loopq.storage.names import names_of
from loopq.storage.schema import Depth, checked, parse_json, shown
from loopq.terminal.table import short, size

if TYPE_CHECKING:
    from torch import Tensor, nn


#: Layers that a notebook shows of a checkpoint.
_SHOWN_LAYERS = 200


@dataclass(frozen=True)
class _Settings:
    """Settings that every reader needs. The rest is for their writer."""

    system: str | None
    n_steps: Depth | None = None


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A quantized model as plain arrays.

    Parameters
    ----------
    layers : mapping of str to QuantizedLayer
        Layers by parameter name, in order of first invocation.
    dense : dict of str to RawTensor
        Every other tensor of the model, stored once.
    ties : dict of str to str
        Names of tied tensors. Each maps to the stored name.
    settings : dict
        All settings that determine the result: system, depth, calibration and quantizer.
    side_files : dict of str to bytes
        Config and tokenizer files.
    """

    layers: Mapping[str, QuantizedLayer]
    dense: dict[str, RawTensor]
    ties: dict[str, str]
    settings: dict[str, Any]
    side_files: dict[str, bytes] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return one line. The arrays and settings of even a small model have thousands of characters."""
        return f"Checkpoint({self._summary()})"

    def _summary(self) -> str:
        packed = sum(layer.n_bytes for layer in self.layers.values())
        n_weights = sum(layer.codes.size for layer in self.layers.values())
        bits = f", {8 * packed / n_weights:.3f} bits a weight" if n_weights else ""
        return (
            f"{shown(self.settings.get('system'))}: {len(self.layers)} quantized layers in {size(packed)}{bits}; "
            f"{len(self.dense)} other tensors in {size(self.n_bytes - packed)}"
        )

    def _repr_html_(self) -> str:
        """Return the table of layers that a notebook shows."""
        rows = [("layer", "shape", "grid", "group", "size", "bits a weight", "loss")]
        for layer in list(self.layers.values())[:_SHOWN_LAYERS]:
            group, loss = layer.grid.group_size, layer.report.get("proxy")
            loss = short(loss) if isinstance(loss, float) else None
            shape, bits = "x".join(map(str, layer.shape)), f"{8 * layer.n_bytes / layer.codes.size:.3f}"
            group_size = "row" if group == -1 else str(group)
            rows.append(
                (layer.name, shape, layer.grid.label, group_size, size(layer.n_bytes), bits, loss or "-")
            )
        lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
        lines[0] = lines[0].replace("td>", "th>")
        left = len(self.layers) - _SHOWN_LAYERS
        more = f"<p>{left} more layers</p>" if left > 0 else ""
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<p>{html.escape(self._summary())}</p><table>{table}</table>{more}"

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors: packed layers and dense ones."""
        return sum(layer.n_bytes for layer in self.layers.values()) + sum(
            t.data.size for t in self.dense.values()
        )

    def check(self, where: object) -> Checkpoint:
        """Return the checkpoint if its parts fit together. Called before writing and after reading.

        Raises
        ------
        CheckpointError
            If a tensor is stored twice, codes belong to no layer, a tie has no target, or settings have no system.
        """
        checked(_Settings, self.settings, f"{where}: settings", others=True)
        for name in [*self.layers, *self.dense]:
            if name in self.ties or (name in self.dense and name in self.layers):
                raise CheckpointError(f"{where}: tensor {shown(name)} is stored twice, or tied and stored")
            if name.endswith(".weight_packed"):
                raise CheckpointError(f"{where}: tensor {shown(name)} holds packed codes of no layer")
        for name, source in self.ties.items():
            if source not in self.layers and source not in self.dense:
                raise CheckpointError(f"{where}: {name} is tied to {source}, which is not stored")
        return self

    def compare(self, again: Checkpoint, where: object) -> None:
        """Compare all content with what was read back.

        Raises
        ------
        CheckpointError
            If anything differs. The message names it.
        """
        equal = {"ties": again.ties == self.ties, "side files": again.side_files == self.side_files}
        equal["settings"] = json_bytes(again.settings) == json_bytes(self.settings)
        for name, layer in self.layers.items():
            reread = again.layers.get(name)
            equal[f"layer {name}"] = (
                reread is not None and layer.same_as(reread) and layer.settings() == reread.settings()
            )
        for name, tensor in self.dense.items():
            other = again.dense.get(name, RawTensor("", (), tensor.data))
            same = (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            equal[f"tensor {name}"] = same and np.array_equal(other.data, tensor.data)
        wrong = [what for what, same in equal.items() if not same]
        if wrong:
            raise CheckpointError(f"{where}: {wrong[0]}: reads back differently from what was written")

    def digest(self) -> str:
        """SHA-256 over the names, types, shapes and bytes of all tensors, as loopq's own format stores them."""
        total = hashlib.sha256()
        for key in sorted({*self.layers, *self.dense}):
            tensors = {key: self.dense[key]} if key in self.dense else self.layers[key].tensors()
            for name, tensor in sorted(tensors.items()):
                total.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
                total.update(np.ascontiguousarray(tensor.data).data)
        return total.hexdigest()

    def facts(self) -> dict[str, Any]:
        """Describe the content as plain data, with the layers as solved."""
        return {
            "n_bytes": self.n_bytes,
            "layers": [
                {
                    **x.settings(),
                    "grid": x.grid.label,
                    "n_bytes": x.n_bytes,
                    "bits_per_weight": 8 * x.n_bytes / x.codes.size,
                }
                for x in self.layers.values()
            ],
            "dense": [{"name": n, "dtype": t.dtype, "shape": list(t.shape)} for n, t in self.dense.items()],
            "ties": self.ties,
            "settings": self.settings,
        }


def load_into(model: nn.Module, checkpoint: Checkpoint, without: Collection[str] = ()) -> None:
    """Put a checkpoint's tensors into a model. Quantized weights are dequantized to the model's type.

    Weights are written in place, one after another. Ties therefore stay ties, and modules that use their weight
    without being called also see it.

    Parameters
    ----------
    model : nn.Module
        Of the checkpoint's kind.
    checkpoint : Checkpoint
        Its tensors.
    without : collection of str
        Quantized layers to skip, because other modules will hold their codes.

    Raises
    ------
    CheckpointError
        As in `fitted`. The model is then unchanged.
    """
    import torch

    state, stored, sources = fitted(model, checkpoint)
    beside = {
        name: what for name, what in stored.items() if name not in sources and isinstance(what, RawTensor)
    }
    set_beside(model, {name: beside[name] for name in sorted(beside)})
    kept = {names_of(model).in_model(name) for name in without}
    half = (torch.float16, torch.bfloat16)
    with torch.no_grad():
        for name, source in sources.items():
            what = stored[source]
            if isinstance(what, QuantizedLayer):
                if source in kept:
                    continue
                dtype = state[source].dtype
                kind = DTYPE_NAMES[str(dtype).removeprefix("torch.")] if dtype in half else "F32"
                what = float_to_raw(what.in_model_orientation(), kind)
            state[name].copy_(to_torch(what))


def fitted(
    model: nn.Module, checkpoint: Checkpoint
) -> tuple[dict[str, Tensor], dict[str, RawTensor | QuantizedLayer], dict[str, str]]:
    """Check that a checkpoint is one of a model.

    Returns
    -------
    state : dict of str to Tensor
        Tensors of the model.
    stored : dict of str to RawTensor or QuantizedLayer
        Content of the checkpoint by the model's names.
    sources : dict of str to str
        For each tensor of the model to be filled, the name of its content. Content that no name leads to stays beside
        the model.

    Raises
    ------
    CheckpointError
        If loop, names or shapes do not fit the model.
    """
    _check_loop(model, checkpoint)
    state = dict(model.state_dict(keep_vars=True))
    names_in = names_of(model)
    dense: Mapping[str, RawTensor] = names_in.taken(model, checkpoint.dense, to_torch, raw)
    stored: dict[str, RawTensor | QuantizedLayer] = {
        **dense,
        **{names_in.in_model(name): layer for name, layer in checkpoint.layers.items()},
    }
    ties = {names_in.in_model(name): names_in.in_model(source) for name, source in checkpoint.ties.items()}
    sources = {name: name for name in stored}
    # If the model does not tie these tensors, both names get the value.
    sources |= {n: source for n, source in ties.items() if state.get(n) is not state.get(source)}
    names = set(sources) | set(ties)
    # Files of other tools store a tied tensor once. The model adds its other names.
    filled = {id(state[name]) for name in names if name in state}
    names |= {name for name, tensor in state.items() if id(tensor) in filled}
    over = passed_over(model, names - set(state)) & set(dense)
    names, sources = names - over, {n: source for n, source in sources.items() if n not in over}
    if names != set(state):
        missing, more = shown(sorted(set(state) - names)), shown(sorted(names - set(state)))
        raise CheckpointError(f"the checkpoint is of another model: missing {missing}, unexpected {more}")
    for name, source in sources.items():
        what = stored[source]
        given = what.model_shape if isinstance(what, QuantizedLayer) else what.shape
        if tuple(state[name].shape) != given:
            shape = list(state[name].shape)
            raise CheckpointError(f"tensor {name!r}: shape {list(given)}, the model has {shape}")
    check_ties(state, dense, "the checkpoint")
    return state, stored, sources


def _check_loop(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse a model in which other layers loop. How often they run is the depth, which a caller may choose."""
    config, data = getattr(model, "config", None), checkpoint.side_files.get("config.json")
    if config is None or data is None:
        return
    where = "config.json of the checkpoint"
    stated = checked(dict[str, Any], parse_json(data, where, finite=False), where).get(LOOP)
    loop = getattr(config, LOOP, None)
    if [*(stated or ())][:2] != [*(loop or ())][:2]:
        raise CheckpointError(
            f"the checkpoint is of another loop: its {LOOP} is {shown(stated)}, the model's is {loop}; name the model "
            "as it was quantized: looped:MODEL[FIRST:LAST]xTIMES"
        )


def weights_of(checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """Return the dequantized weights of the quantized layers in the model's orientation, float32."""
    return {name: layer.in_model_orientation() for name, layer in checkpoint.layers.items()}
