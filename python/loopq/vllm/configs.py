"""Configurations of looped models under the names that vLLM asks for, so that no code of the checkpoint has to run."""

from __future__ import annotations

from typing import Any, ClassVar

from loopq.lazy import require

require("transformers")

from transformers import PretrainedConfig  # noqa: E402  after the message that names the extra


class OuroConfig(PretrainedConfig):
    """Ouro's ``config.json``: Llama's names, and `total_ut_steps`."""

    model_type = "ouro"


class HuginnConfig(PretrainedConfig):
    """Huginn's ``config.json``: other names for width, heads and longest text."""

    model_type = "huginn_raven"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "block_size",
    }

    def __init__(self, **settings: Any) -> None:
        # What is worked out from other settings in the published class is left to it.
        self.head_dim = settings.get("n_embd", 5280) // settings.get("n_heads", 55)
        super().__init__(**settings)
