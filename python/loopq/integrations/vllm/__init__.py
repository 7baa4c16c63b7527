"""A vLLM plugin that serves looped models with all their loops. vLLM finds it once loopq is installed.

``vllm serve DIR`` takes Ouro, Huginn, R-Llama and dense decoders with a loop (`loopq.systems.looped`). Checkpoints may
be full-precision or written by ``loopq export``. Each call of an attention layer in a forward pass has its own
key/value cache, unlike in vLLM's fallbacks. ``config.json`` sets the depth. ``--hf-overrides`` changes it
(``'{"total_ut_steps": 3}'`` or ``'{"mean_recurrence": 16}'``). Checked with vLLM 0.32 (docs/formats/interop.md).
"""

from __future__ import annotations

#: Names in a ``config.json`` under "architectures", and the classes of `loopq.integrations.vllm.models` that run them.
MODELS = {
    "OuroForCausalLM": "Ouro",
    "RavenForCausalLM": "Raven",
    "LoopedLlamaForCausalLM": "LoopedLlama",
    "LoopedMistralForCausalLM": "LoopedMistral",
    "LoopedQwen2ForCausalLM": "LoopedQwen2",
    "LoopedQwen3ForCausalLM": "LoopedQwen3",
}


def register() -> None:
    """Register the classes and their configurations. vLLM calls this in each of its processes.

    vLLM up to 0.26 has its own class for Ouro and keeps it.
    """
    # Lazy: reading this package's name must not need vLLM or transformers.
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from loopq.integrations.vllm.configs import HuginnConfig, OuroConfig

    for config in (HuginnConfig, OuroConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    known = ModelRegistry.get_supported_archs()
    for name, found in MODELS.items():
        if name not in known:
            ModelRegistry.register_model(name, f"loopq.integrations.vllm.models:{found}")
