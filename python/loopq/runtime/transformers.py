"""Let transformers load native checkpoints: import this module, then call `AutoModel....from_pretrained(DIR)`.

A separate module because `import loopq` needs only numpy and safetensors. Checked with transformers 4.57.6 and 5.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopq.errors import CheckpointError, require
from loopq.formats.hf_folder import METHOD
from loopq.formats.native import STORED, described, read_layer
from loopq.layers.loop_spec import LOOP
from loopq.layers.reader import TensorReader
from loopq.models.files import find_names
from loopq.models.stream import unfuse
from loopq.runtime.quantized import held
from loopq.storage.files import RawTensor, map_tensors
from loopq.storage.model_files import TENSORS, to_torch
from loopq.storage.names import names_of
from loopq.storage.schema import Object

transformers = require("transformers")

import torch  # noqa: E402  after the message that names the extra
from transformers.quantizers.auto import register_quantization_config, register_quantizer  # noqa: E402
from transformers.quantizers.base import HfQuantizer  # noqa: E402
from transformers.utils import cached_file  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

from loopq.runtime.modeling_looped import LoopedConfig, LoopedForCausalLM, Loops  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, nn


class _Config(LoopedConfig):
    """The configuration of a looped model. Its class is made for the dense model, and made known when it is read."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the settings, and let AutoModelForCausalLM know their class."""
        config = super().from_dict(config_dict, **kwargs)
        kind = type(config[0] if isinstance(config, tuple) else config)
        transformers.AutoModelForCausalLM.register(kind, LoopedForCausalLM, exist_ok=True)
        return config


transformers.AutoConfig.register(_Config.model_type, _Config, exist_ok=True)


@register_quantization_config(METHOD)
class LoopqConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped here
    """The `quantization_config` in the config.json of a native checkpoint.

    Groups are grids: bits, group_size, symmetric, scale_dtype, orientation and, if present, transform. The entry
    "layers" names their weights. `ties` maps the names of tied weights to the stored name.
    """

    def __init__(self, groups: Sequence[Object] = (), ties: dict[str, str] | None = None, **_: Any) -> None:
        self.quant_method = METHOD
        self.groups, self.ties = list(groups), dict(ties or {})


class _Stored(torch.nn.Module):  # type: ignore[misc]
    """Placeholder of a linear layer while transformers loads the rest of the model: a bias, a shape, no weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.empty(1, device="meta").expand(linear.weight.shape)
        self.bias = linear.bias


@register_quantizer(METHOD)
class LoopqQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces the linear layers of a native checkpoint by `QuantLinear` modules and saves them again."""

    requires_calibration = True

    def _convert_model_for_quantization(self, model: nn.Module) -> None:
        """Convert nothing. transformers 4 would import accelerate to search for experts in one tensor."""

    def _process_model_before_weight_loading(self, model: nn.Module, **given: Any) -> nn.Module:
        self._files = [Path(f) for f in given.get("checkpoint_files") or _files(model)]
        loop = getattr(model.config, LOOP, None)
        if loop is not None and not isinstance(model, Loops):
            raise CheckpointError(
                f"{self._files[0].parent}: config.json has {LOOP} {loop}, and transformers would run every layer "
                "once; loopq.load(DIR) and `loopq run DIR` run the loop"
            )
        unfuse(model)
        modules = dict(model.named_modules(remove_duplicate=False))
        self._grids, ties = described(vars(self.quantization_config))
        find_names(model, [*self._grids, *self._tensors()])
        names = names_of(model)
        self._placed: dict[str, list[str]] = {
            name: [names.in_model(name).removesuffix(".weight")] for name in self._grids
        }
        for name, source in ties.items():
            self._placed[source].append(names.in_model(name).removesuffix(".weight"))
        absent: list[str] = []
        for name, owners in self._placed.items():
            if any(_keeps_weight(modules.get(o)) for o in owners):
                absent += [rf"^{re.escape(owner)}\.weight$" for owner in owners]
                continue
            strange = [o for o in owners if type(modules.get(o)) is not torch.nn.Linear]
            if strange:
                raise CheckpointError(
                    f"layer {name}: {strange[0]} is {type(modules.get(strange[0])).__name__}, not nn.Linear, and "
                    "cannot hold codes here; loopq.load(DIR) gives the model with dequantized weights"
                )
            stored = _Stored(modules[owners[0]])
            for owner in owners:
                _put(model, owner, stored)
        # Tied modules are already one module here. transformers would look for their weights.
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        owned = {f"{owner}.weight" for owners in self._placed.values() for owner in owners}
        for name in [name for name, source in tied.items() if {name, source} & owned]:
            del tied[name]
        patterns = [rf"\.{name}$" for name in STORED]
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        # transformers 4 adds a list to it, 5 a set.
        kind = list if transformers.__version__.startswith("4.") else set
        missing = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        model._keys_to_ignore_on_load_missing = kind([*missing, *absent])
        model._keys_to_ignore_on_load_unexpected = kind([*ignored, *patterns])
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """Skip the conversions that stack experts, because each expert has its own modules here."""
        state = model.state_dict(keep_vars=True)
        stacks = re.compile(r"experts\.(gate_up|up|down)_proj(_bias)?$")
        apart = any(".experts.0." in name for name in state)
        kept = [r for r in weight_conversions if not (apart and any(map(stacks.search, r.target_patterns)))]
        conversions: list[Any] = super().update_weight_conversions(kept, model)
        return conversions

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        reader = TensorReader(str(self._files[0].parent), self._tensors())
        for name, grid in self._grids.items():
            stored = {owner: model.get_submodule(owner) for owner in self._placed[name]}
            shape = next(iter(stored.values())).weight.shape
            # Only shape, type and device are used.
            places = {id(module): _place(module, model, shape) for module in stored.values()}
            modules = held(read_layer(name, grid, reader, shape), [*places.values()])
            for owner, module in stored.items():
                _put(model, owner, modules[id(places[id(module)])])
        return model

    def get_state_dict_and_metadata(
        self, model: nn.Module, *_: Any
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors to save. Codes and scales keep the bytes of the loaded files."""
        owners = {owner for owners in self._placed.values() for owner in owners}
        stored = self._tensors()
        coded = owners | {f"{owner}.table" for owner in owners}
        uncoded = {}
        for name, tensor in model.state_dict().items():
            module, _, last = name.rpartition(".")
            beside = last != "weight" and module in coded and _keeps_weight(model.get_submodule(module))
            if beside or module not in coded:
                uncoded[name] = tensor
        state = dict(names_of(model).stored(model, uncoded))
        # transformers 4 rejects tied weights of unknown code, or keeps another of their names.
        kept = {t.untyped_storage().data_ptr() for n, t in state.items() if n in stored}
        state = {n: t for n, t in state.items() if n in stored or t.untyped_storage().data_ptr() not in kept}
        files = {name.removesuffix(".weight") for name in (*self._placed, *self.quantization_config.ties)}
        for name, tensor in stored.items():
            module, last = name.rpartition(".")[::2]
            if module in files and (last in STORED or last == "bias"):
                state[name] = to_torch(tensor)
        # The names already match the files.
        model._weight_conversions = []
        return state, {}

    def _tensors(self) -> dict[str, RawTensor]:
        return {name: tensor for file in self._files for name, tensor in map_tensors(file).items()}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Whether `save_pretrained` works: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether gradients reach the weights: no."""
        return False


def _keeps_weight(module: nn.Module | None) -> bool:
    """Whether a module stays in place: a table, or a linear layer with its own forward."""
    subclass = isinstance(module, torch.nn.Linear) and type(module) is not torch.nn.Linear
    return subclass or isinstance(module, torch.nn.Embedding)


def _files(model: nn.Module) -> list[Path]:
    """Weight files of the model being loaded, for versions of transformers that do not pass them."""
    place = str(model.config._name_or_path)
    return sorted(Path(place).glob("*.safetensors")) or [Path(cached_file(place, TENSORS))]


def _place(module: nn.Module, model: nn.Module, shape: Sequence[int]) -> nn.Module:
    """A table, a linear layer, or one in the place of `_Stored`, with a weight without memory."""
    if isinstance(module, _Stored):
        bias, module = module.bias, torch.nn.Linear(1, 1, bias=False)
        module.bias = bias
    weight = torch.empty(1, dtype=model.dtype, device=model.device).expand(*shape)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
