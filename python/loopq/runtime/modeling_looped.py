# Copyright the loopq authors. Licensed under the Apache License, Version 2.0:
# http://www.apache.org/licenses/LICENSE-2.0. Provided "as is", without warranties or conditions of any kind.
"""A dense decoder of transformers whose layers FIRST to LAST - 1 run TIMES times (`looped_layers` in config.json).

It needs torch and transformers alone: ``loopq export --remote-code`` puts this file beside a checkpoint, and
``AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)`` runs it.
"""

import copy
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig


def run_order(loop: Any, n_layers: int) -> list[int]:
    """Return the numbers of the layers in their execution order."""
    good = isinstance(loop, list | tuple) and len(loop) == 3 and all(type(v) is int for v in loop)
    if not good or not (0 <= loop[0] < loop[1] <= n_layers and 1 <= loop[2] <= 1 << 16):
        raise ValueError(f"looped_layers {loop!r}: give FIRST < LAST <= {n_layers} and TIMES from 1 to 65536")
    first, last, times = map(int, loop)
    every = list(range(n_layers))
    return every[:first] + every[first:last] * times + every[last:]


class LoopedConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is untyped here
    """A ``config.json`` with a loop. It becomes the configuration of the dense model, `looped_base`, with the loop."""

    model_type = "loopq_looped"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the settings as the class of the dense model does."""
        base = config_dict.get("looped_base")
        if base not in CONFIG_MAPPING:
            raise ValueError(f"config.json: looped_base is {base!r}, which this transformers does not know")
        given = {k: v for k, v in config_dict.items() if k not in ("model_type", "looped_base")}
        return _config_class(CONFIG_MAPPING[base]).from_dict(given, **kwargs)


class _Written:
    """Writes the settings as they were read: with the loop's own type, and each layer once."""

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        found |= found.pop("_dense", None) or {}
        # The class has the name of the dense one, by which transformers finds the names in its files.
        names = found.get("architectures") or []
        found["architectures"] = [n if n.startswith("Looped") else f"Looped{n}" for n in names]
        return found | {
            "model_type": LoopedConfig.model_type,
            "looped_base": getattr(type(self), "model_type", None),
        }


@functools.cache
def _config_class(dense: Any) -> Any:
    return type("LoopedConfig", (_Written, dense), {"__module__": dense.__module__})


class _Layers(nn.ModuleList):  # type: ignore[misc]
    """Holds each layer once, under its number. A slice and an iteration run them in the order of the loop."""

    order: list[int]

    def _runs(self, places: range) -> Iterator[nn.Module]:
        for slot in places:
            layer = self[self.order[slot]]
            # Each run of a layer has its own slot in the cache.
            for module in (layer, *layer.children()):
                if hasattr(module, "layer_idx"):
                    module.layer_idx = slot
            yield layer

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._runs(range(len(self.order))[index])
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[nn.Module]:
        return self._runs(range(len(self.order)))


class Loops:
    """Added to the class of the dense model. Parameters keep their names."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config = copy.deepcopy(config)
        vars(config).update(vars(config).pop("_dense", None) or {})
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        inner: Any = self.base_model  # type: ignore[attr-defined]
        depth = config.num_hidden_layers
        lists = [n for n, m in inner.named_children() if isinstance(m, nn.ModuleList) and len(m) == depth]
        if not lists:
            raise ValueError(f"{type(inner).__name__}: no list of {depth} layers, which the loop needs")
        order = run_order(config.looped_layers, depth)
        layers = _Layers(getattr(inner, lists[0]))
        layers.order = order
        setattr(inner, lists[0], layers)
        if hasattr(inner, "first_kv_shared_layer_idx"):
            # Gemma-4 counts to the first layer that shares a cache, and none does.
            inner.first_kv_shared_layer_idx = len(order)
        # The cache and the masks take their number of layers from here.
        names = [n for n in ("num_hidden_layers", "layer_types") if getattr(config, n, None) is not None]
        config._dense = {n: getattr(config, n) for n in names}
        config.num_hidden_layers = len(order)
        if "layer_types" in names:
            config.layer_types = [config.layer_types[i] for i in order]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the model, and beside it this file, if config.json names it."""
        done = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if getattr(self.config, "auto_map", None):  # type: ignore[attr-defined]
            shutil.copyfile(__file__, Path(save_directory) / "modeling_looped.py")
        return done


@functools.cache
def _model_class(config: Any) -> Any:
    dense = MODEL_FOR_CAUSAL_LM_MAPPING[config.__mro__[2]]
    return type(dense.__name__, (Loops, dense), {"__module__": dense.__module__})


class LoopedForCausalLM:
    """What an Auto class calls: it makes a model of the dense class with the loop."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Load a folder."""
        config = LoopedConfig.from_pretrained(name) if config is None else config
        kind: Any = type(config)
        return _model_class(kind).from_pretrained(name, *args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        kind: Any = type(config)
        return _model_class(kind)._from_config(config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: the model's class is made for its configuration."""
