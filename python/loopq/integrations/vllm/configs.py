"""Configurations of looped models with vLLM's attribute names, so that no code of the checkpoint has to run."""

from __future__ import annotations

from typing import Any, ClassVar

from loopq.lazy import require

require("transformers")

from transformers import PretrainedConfig  # noqa: E402  after the message that names the extra


class OuroConfig(PretrainedConfig):
    """Ouro's ``config.json``: Llama's names, and `total_ut_steps`."""

    model_type = "ouro"


class HuginnConfig(PretrainedConfig):
    """The ``config.json`` of Huginn and R-Llama: other names for width and heads."""

    model_type = "huginn_raven"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }

    def __init__(self, **settings: Any) -> None:
        heads = settings.get("n_heads", 55)
        self.head_dim = settings.get("n_embd", 5280) // heads
        # R-Llama has both. Huginn's file may omit them because its class has defaults.
        own = {"num_key_value_heads": heads, "max_position_embeddings": settings.get("block_size", 4096)}
        super().__init__(**(own | settings))
