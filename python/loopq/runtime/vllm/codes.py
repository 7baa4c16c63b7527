"""Native checkpoints in vLLM, on the processor: linear layers and tables are loopq's modules.

vLLM joins q, k and v, or gate and up, in one matrix. Here each keeps its own codes, and their outputs are joined. So
all grids, trellises and transforms are served, and layers of one matrix may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from loopq.errors import ConfigError
from loopq.formats.hf_folder import METHOD
from loopq.formats.limits.plugin import refuse_loop
from loopq.formats.native import STORED, described, read_layer
from loopq.layers.reader import TensorReader
from loopq.runtime.quantized import held
from loopq.storage.files import DTYPES
from loopq.storage.model_files import raw
from loopq.storage.schema import Object


@torch.library.custom_op("loopq::call", mutates_args=())
def _call(x: Tensor, name: str, width: int, dtype: torch.dtype) -> Tensor:
    """Call a layer's modules by its name. torch.compile does not look inside."""
    out: Tensor = get_forward_context().no_compile_layers[name](x)
    return out


@_call.register_fake
def _(x: Tensor, name: str, width: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*(x.shape[:-1] if x.is_floating_point() else x.shape), width), dtype=dtype)


@register_quantization_config(METHOD)
class NativeConfig(QuantizationConfig):
    """The `quantization_config` in the config.json of a native checkpoint. Grids are by module."""

    def __init__(self, grids: Mapping[str, Object], ties: Iterable[str] = ()) -> None:
        super().__init__()
        self.grids = dict(grids)
        #: Layers that no module of vLLM has taken.
        self.left = {*grids} - {*ties}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NativeConfig:
        """Read the grids. A tied head has that of its table."""
        grids, ties = described(config)
        return cls(grids | {name: grids[source] for name, source in ties.items()}, ties)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take over vLLM's names."""
        self.grids = hf_to_vllm_mapper.apply_dict(self.grids)
        self.left = {*hf_to_vllm_mapper.apply_list([*self.left])}

    def maybe_update_config(self, model_name: str, hf_config: Any = None, **_: Any) -> None:
        """Refuse a loop that the named class would run once."""
        refuse_loop(vars(hf_config) if hf_config else {})

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return what loads and calls a layer. Dense layers are vLLM's."""
        if not isinstance(layer, LinearBase | VocabParallelEmbedding):
            self.refuse(name for name in self.grids if name.startswith(f"{prefix}."))
            return None
        if not prefix:
            # Llama's class does not name its table.
            tables = (name for name, grid in self.grids.items() if grid.get("orientation") == "table")
            prefix = next(tables, "").removesuffix(".weight")
        parent, dot, last = prefix.rpartition(".")
        parts = [f"{parent}{dot}{part}.weight" for part in self.packed_modules_mapping.get(last, (last,))]
        self.left -= {*parts}
        grids = {part: self.grids.get(part) for part in parts}
        if any(grid is not None for grid in grids.values()):
            return NativeLayer(prefix, grids, self)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def refuse(self, names: Iterable[str]) -> None:
        """Refuse layers, if there are any, that vLLM's class cannot hold in loopq's codes."""
        for name in sorted(names):
            raise ConfigError(
                f"layer {name}: vLLM's class of the model has no place for its codes; --exclude it, or take "
                "loopq export --format compressed-tensors"
            )

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


class _Joined(nn.Module):
    """Modules of the same input, and their outputs side by side."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def _is_table(layer: nn.Module) -> bool:
    return isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)


class NativeLayer(QuantizeMethodBase):
    """Loads one layer of vLLM, of one or more matrices, and calls it."""

    def __init__(self, prefix: str, grids: dict[str, Object | None], config: NativeConfig) -> None:
        self.prefix, self.grids, self.config = prefix, grids, config
        self.tensors: list[dict[str, Tensor]] = [{} for _ in grids]

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **_: Any,
    ) -> None:  # fmt: skip
        """Make a place for each tensor that a file may have."""
        config = get_current_vllm_config()
        part = (input_size_per_partition, sum(output_partition_sizes))
        if part != (input_size, output_size) or config.device_config.device_type != "cpu":
            raise ConfigError(
                f"{self.prefix}: a native checkpoint is served by one process on a CPU; use --tensor-parallel-size 1 "
                "there, or loopq export --format compressed-tensors"
            )
        self.dtype = params_dtype
        self.width = input_size if _is_table(layer) else output_size
        # vLLM pads its tables. A file may have the matrices as one.
        rows = [layer.org_vocab_size] if isinstance(layer, VocabParallelEmbedding) else output_partition_sizes
        rows = [sum(rows)] if len(self.grids) == 1 else rows
        self.shapes = [(n, input_size) for n in rows]
        for name in ("weight", *STORED):
            place = nn.Parameter(torch.empty(0), requires_grad=False)
            place.weight_loader = self._keep(name)
            layer.register_parameter(name, place)
        self.called = config.compilation_config.static_forward_context

    def _keep(self, name: str) -> Callable[..., None]:
        def keep(place: nn.Parameter, tensor: Tensor, shard: str | int | None = None) -> None:
            number = "qkv".index(shard) if isinstance(shard, str) else shard or 0
            self.tensors[number][name] = tensor

        return keep

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replace the places by loopq's modules."""
        self.config.refuse(self.config.left)
        for name in ("weight", *STORED):
            delattr(layer, name)
        kind = nn.Embedding if _is_table(layer) else nn.Linear
        parts = zip(self.grids, self.tensors, self.shapes, strict=True)
        layer.codes = _Joined([self._part(*part, kind) for part in parts])
        self.called[self.prefix], self.tensors = layer.codes, []

    def _part(self, name: str, tensors: dict[str, Tensor], shape: tuple[int, int], kind: Any) -> nn.Module:
        place = kind(1, 1, **({} if kind is nn.Embedding else {"bias": False}))
        module, grid = name.removesuffix(".weight"), self.grids[name]
        reader = TensorReader(
            "model", {f"{module}.{last}": raw(t, copy=False) for last, t in tensors.items()}
        )
        if grid is None:
            reader.get(name, tuple(DTYPES), shape)
            weight = tensors["weight"]
        else:
            weight = torch.empty(1).expand(shape)
        place.weight = nn.Parameter(weight.to(self.dtype), requires_grad=False)
        return place if grid is None else held(read_layer(name, grid, reader, shape), [place])[id(place)]

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Outputs (n_tokens, n) of all matrices. The head is called outside of vLLM's forward context."""
        if isinstance(layer, VocabParallelEmbedding):
            (table,) = layer.codes.parts
            table = getattr(table, "table", table)
            out = table(x) if not isinstance(table, nn.Embedding) else nn.functional.linear(x, table.weight)
        else:
            out = _call(x, self.prefix, self.width, x.dtype)
        return out if bias is None else out + bias

    def embedding(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Rows (n_tokens, width)."""
        return _call(ids, self.prefix, self.width, self.dtype)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """The table is the head."""
        return embed_tokens
