"""Native checkpoints in vLLM, on the processor: linear layers and tables are loopq's modules.

vLLM joins q, k and v, or gate and up, in one matrix. Here each keeps its own codes, and their outputs are joined. So
all grids, trellises and transforms are served, and layers of one matrix may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from loopq.formats.hf_folder import METHOD, STORED, by_layer, read_layer
from loopq.inference.quantized import stand_ins, why_kept
from loopq.layers.reader import TensorReader
from loopq.storage.model_files import raw
from loopq.storage.schema import Object, checked

_WHERE = "config.json: quantization_config"


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

    def __init__(self, grids: Mapping[str, Object]) -> None:
        super().__init__()
        self.grids = dict(grids)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NativeConfig:
        """Read the grids. A tied head has that of its table."""
        grids = dict(by_layer(checked(tuple[Object, ...], config.get("groups"), _WHERE), _WHERE))
        ties = checked(dict[str, str], config.get("ties", {}), _WHERE)
        return cls(grids | {name: grids[source] for name, source in ties.items()})

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take over vLLM's names."""
        self.grids = hf_to_vllm_mapper.apply_dict(self.grids)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return what loads and calls a layer. Dense layers are vLLM's."""
        if not isinstance(layer, LinearBase | VocabParallelEmbedding):
            return None
        parent, dot, last = prefix.rpartition(".")
        parts = [f"{parent}{dot}{part}.weight" for part in self.packed_modules_mapping.get(last, (last,))]
        grids = {part: self.grids.get(part) for part in parts}
        if any(grid is not None for grid in grids.values()):
            return NativeLayer(prefix, grids)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

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

    def __init__(self, prefix: str, grids: dict[str, Object | None]) -> None:
        self.prefix, self.grids = prefix, grids
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
        for name in ("weight", *STORED):
            delattr(layer, name)
        kind = nn.Embedding if _is_table(layer) else nn.Linear
        parts = zip(self.grids.items(), self.tensors, strict=True)
        layer.codes = _Joined([self._part(*part, tensors, kind) for part, tensors in parts])
        self.called[self.prefix], self.tensors = layer.codes, []

    def _part(self, name: str, grid: Object | None, tensors: dict[str, Tensor], kind: Any) -> nn.Module:
        place = kind(1, 1, **({} if kind is nn.Embedding else {"bias": False}))
        if grid is None:
            place.weight = nn.Parameter(tensors["weight"].to(self.dtype), requires_grad=False)
            return place
        module = name.removesuffix(".weight")
        files = {f"{module}.{last}": raw(tensor) for last, tensor in tensors.items()}
        quantized = read_layer(name, grid, TensorReader("model", files))
        # Only shape, type and device are used.
        weight = torch.empty(1, dtype=self.dtype).expand(quantized.shape)
        place.weight = nn.Parameter(weight, requires_grad=False)
        if why_kept(quantized, [place]):
            weight = torch.from_numpy(quantized.dequantize()).to(self.dtype)
            place.weight = nn.Parameter(weight, requires_grad=False)
            return place
        return stand_ins(quantized, [place])[id(place)]

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
