"""Configurations of looped models with vLLM's attribute names, so that no code of the checkpoint has to run."""

from __future__ import annotations

from typing import Any, ClassVar

from loopq.errors import ConfigError, require

require("transformers")

from transformers import PretrainedConfig  # noqa: E402  after the message that names the extra

from loopq.runtime.modeling_looped import LoopedConfig  # noqa: E402


class OuroConfig(PretrainedConfig):
    """Ouro's ``config.json``: Llama's names, and `total_ut_steps`."""

    model_type = "ouro"


class RavenConfig(PretrainedConfig):
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
        defaults = {"num_key_value_heads": heads, "max_position_embeddings": settings.get("block_size", 4096)}
        super().__init__(**(defaults | settings))


class DoryConfig(PretrainedConfig):
    """Dory's ``config.json``, where attention and MLP of a layer are two."""

    model_type = "dory"

    def __init__(self, **settings: Any) -> None:
        defaults = {
            "n_recurrent_loops": 2,
            "recurrent_kv_cache_mode": "per_loop",
            "tie_word_embeddings": False,
        }
        kinds = [kind for kind in settings.pop("layer_types", ()) if kind != "mlp"]
        for name in ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers"):
            defaults[name] = settings.pop(name, 0) // 2
        super().__init__(**(defaults | settings), layer_types=kinds)


class InklingConfig(PretrainedConfig):
    """Inkling-2, which no released vLLM has. vLLM's fallback would share one cache among its passes."""

    model_type = "inkling2_loop_text"

    def __init__(self, **settings: Any) -> None:
        raise ConfigError(
            "Inkling-2 is not served: vLLM up to 0.33 has no class for it, and loopq's plugin none either; it needs a "
            "vLLM that knows Inkling2LoopForCausalLM. `loopq run` and transformers from 5.24 on run the checkpoint"
        )


class InklingFullConfig(InklingConfig):
    """The one with images."""

    model_type = "inkling2_loop"
    # transformers gives a class without one a new `__init__`, which would refuse nothing.
    __init__ = InklingConfig.__init__


#: Configurations by an architecture that uses them.
CONFIGS: dict[str, tuple[type[PretrainedConfig], ...]] = {
    "OuroForCausalLM": (OuroConfig,),
    "RavenForCausalLM": (RavenConfig,),
    "DoryForCausalLM": (DoryConfig,),
    "LoopedLlamaForCausalLM": (LoopedConfig,),
    "Inkling2LoopForCausalLM": (InklingConfig, InklingFullConfig),
}
