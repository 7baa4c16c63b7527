"""ALBERT applies one layer group repeatedly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loopq.errors import ConfigError, SystemContractError
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.declare import declare, find_prefix
from loopq.systems.outputs import logits_of
from loopq.systems.stepwise import SingleSteps
from loopq.systems.views import changed, copied, view

_MARKER = "encoder.albert_layer_groups.0.albert_layers.0.attention.query"
_LINEARS = (
    ("attention.query", "attention"),
    ("attention.key", "attention"),
    ("attention.value", "attention"),
    ("attention.dense", "attention"),
    ("ffn", "mlp"),
    ("ffn_output", "mlp"),
)


@SYSTEMS.register("albert")
class Albert(SingleSteps):
    """transformers' ALBERT, bare (with hidden states as output) or with a masked-language-model head.

    A step is one application of a layer group. All groups run equally often. Rollouts ignore
    `chunk_size_feed_forward`. It computes the same function in several calls of the feed-forward pair. Their number
    would depend on the prompt length and be mistaken for steps.
    """

    summary = "s = group(s), post-norm encoder; hidden states where there is no head"
    published = Published(
        {"ALBERT-base": 6, "PL-BERT (Kokoro)": 6},
        idle=("pooler.", "albert.pooler."),
        also="PL-BERT reads phonemes: give token ids (.npy)",
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._prefix = find_prefix(model, _MARKER) or ""
        self._bare = model.get_submodule(self._prefix.rstrip("."))
        self.output = "hidden" if self._bare is model else "logits"
        self.has_steps = self._n_groups == 1

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Told by `encoder.albert_layer_groups`."""
        return find_prefix(model, _MARKER) is not None

    @property
    def _n_groups(self) -> int:
        return len(self._bare.encoder.albert_layer_groups)

    @property
    def n_steps(self) -> int:
        """Number of applications of each group: `config.num_hidden_layers / config.num_hidden_groups`."""
        layers = int(self.model.config.num_hidden_layers)
        if layers % self._n_groups:
            raise ConfigError(f"albert: {layers} layers do not divide evenly among {self._n_groups} groups")
        return layers // self._n_groups

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Six linears of every layer of every group."""
        modules = [
            (f"{self._prefix}encoder.albert_layer_groups.{g}.albert_layers.{i}.{suffix}", {"role": role})
            for g, group in enumerate(self._bare.encoder.albert_layer_groups)
            for i in range(len(group.albert_layers))
            for suffix, role in _LINEARS
        ]
        return declare(self.model, modules, n_steps)

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run the model's own forward with `n_steps` applications of each group."""
        depth = self.check_depth(n_steps)
        ids = self.to_device(batch.input_ids)
        config = self._bare.encoder.config
        other = changed(config, num_hidden_layers=depth * self._n_groups)
        model = view(self.model, (config, other), *((layer, _whole(layer)) for layer in self._layers()))
        with torch.set_grad_enabled(self.keeps_graph):
            out = model(input_ids=ids)
        if self.output == "logits":
            return logits_of(out)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _layers(self) -> list[nn.Module]:
        return [layer for group in self._bare.encoder.albert_layer_groups for layer in group.albert_layers]

    def embed(self, batch: Batch) -> Tensor:
        """Embeddings, mapped to the width of the layers. They start the state and are not injected again."""
        ids = self.to_device(batch.input_ids)
        embedding: Tensor = self._bare.encoder.embedding_hidden_mapping_in(self._bare.embeddings(ids))
        return embedding

    def initial_state(self, batch: Batch, embedding: Any) -> Tensor:
        """Return the mapped embeddings, Tensor (n_prompts, n_tokens, width)."""
        start: Tensor = embedding
        return start

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """One application of the group. Needs a model with one group."""
        if not self.has_steps:
            raise SystemContractError(f"system {self.name!r} has no single-step function")
        # The group's forward needs a head mask in transformers 4.
        for layer in self._layers():
            after = _whole(layer)(state)
            state = after[0] if isinstance(after, tuple) else after
        return state

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Return the state itself, or the logits of the head."""
        if self.output == "hidden":
            return state
        logits: Tensor = self.model.predictions(state)
        return logits


def _whole(layer: nn.Module) -> Any:
    """The layer with its feed-forward pair in one piece."""
    return copied(layer, chunk_size_feed_forward=0)
