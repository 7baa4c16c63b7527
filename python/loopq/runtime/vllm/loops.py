"""Looped models in vLLM: one copy of the weights, and a key/value cache for each call of an attention layer.

vLLM's usual code builds the first loop's layers. `again` gives the layers of a later loop: the same modules around an
attention with its own cache. Tensor parallelism, quantized products and paged caches come from vLLM. Pipeline
parallelism is rejected because each loop would pass through all machines.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix

from loopq.errors import CheckpointError
from loopq.formats.hf_folder import METHOD

Weights = Iterable[tuple[str, Tensor]]
#: Arguments of an inner model whose dimension counts tokens.
BY_TOKEN = {"input_ids": 0, "positions": 0, "inputs_embeds": 0}


def again(module: nn.Module, name: str, vllm_config: VllmConfig) -> nn.Module:
    """Return a module that shares all parameters but has its own attention with its own key/value cache.

    The module is a layer with one attention. `name` is vLLM's name of that cache, with one number that no other cache
    uses.
    """
    if isinstance(module, Attention):
        return Attention(
            module.num_heads,
            module.head_size,
            module.impl.scale,
            num_kv_heads=module.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=module.quant_config,
            per_layer_sliding_window=module.sliding_window,
            attn_type=module.attn_type,
            prefix=name,
        )
    if not any(isinstance(part, Attention) for part in module.modules()):
        return module
    twin = copy.copy(module)
    twin._modules = {key: again(part, name, vllm_config) for key, part in module._modules.items()}
    return twin


class LoopedBlocks(nn.Module):
    """Layers in execution order, each once under its name. A repeated layer is a twin from `again`.

    `name` stands before the number of a layer, and `first_slot` is the number of the first twin's cache.
    """

    def __init__(
        self, layers: nn.ModuleList, order: list[int], name: str, first_slot: int, vllm_config: VllmConfig
    ) -> None:
        super().__init__()
        for number, layer in layers.named_children():
            self.add_module(number, layer)
        seen: set[int] = set()
        twins: list[nn.Module] = []
        run = []
        for number in order:
            layer = layers[number]
            if number in seen:
                layer = again(layer, f"{name}.{first_slot + len(twins)}.attn", vllm_config)
                twins.append(layer)
            seen.add(number)
            run.append(layer)
        # Kept outside PyTorch's modules, so every parameter has a single name, that of the checkpoint.
        self._run = tuple(run)
        caches = [part for twin in twins for part in twin.modules() if isinstance(part, Attention)]
        self.add_module("caches", nn.ModuleList(caches))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._run)

    def __len__(self) -> int:
        return len(self._run)


def table(vllm_config: VllmConfig, width: int, prefix: str) -> VocabParallelEmbedding:
    """Token embedding of an inner model."""
    vocabulary = vllm_config.model_config.hf_config.vocab_size
    return VocabParallelEmbedding(vocabulary, width, quant_config=vllm_config.quant_config, prefix=prefix)


def complete(model: Any, weights: Weights) -> Weights:
    """Pass tensors on. vLLM would not notice that a quantized checkpoint lacks one, so a native one is refused here."""
    missing: set[str] = set()
    if model.quant_config is not None and model.quant_config.get_name() == METHOD:
        # Places for codes are empty, and look for their tensors themselves.
        for name in (name for name, parameter in model.named_parameters() if parameter.numel()):
            parent, kind, last = f".{name}".rsplit(".", 2)
            parts = model.packed_modules_mapping.get(kind, (kind,))
            missing |= {f"{parent}.{part}.{last}"[1:] for part in parts}
    for name, tensor in weights:
        missing.discard(name)
        yield name, tensor
    if missing:
        raise CheckpointError(f"model: tensor {min(missing)!r} is missing")


class Causal(nn.Module, SupportsQuant):
    """Interface of a causal model in vLLM.

    A subclass says where the inner model stands, of which class it is, and how its token embedding is called there.
    """

    place: ClassVar[str]
    kind: ClassVar[type[nn.Module]]
    table: ClassVar[str]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        setattr(self, self.place, self.kind(vllm_config=vllm_config, prefix=maybe_prefix(prefix, self.place)))
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.embedding)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    @property
    def inner(self) -> Any:
        """The inner model."""
        return getattr(self, self.place)

    @property
    def embedding(self) -> Any:
        """The token embedding."""
        return getattr(self.inner, self.table)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings (n_tokens, d)."""
        return self.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """States (n_tokens, d) that the head reads."""
        return self.inner(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits (n_tokens, vocabulary)."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the tensors of a checkpoint."""
        weights = complete(self, weights)
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)  # type: ignore[no-any-return]
