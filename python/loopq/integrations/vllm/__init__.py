"""vLLM serves looped models with all their loops: a plugin that vLLM finds once loopq is installed beside it.

``vllm serve DIR`` takes Ouro, Huginn, R-Llama and dense decoders with a loop (`loopq.systems.looped`), in full
precision or as ``loopq export`` wrote them. Each call of an attention layer in a forward pass has a key/value cache
of its own, which is what vLLM's own fallbacks lack. The depth is that of ``config.json``; ``--hf-overrides`` changes
it (``'{"total_ut_steps": 3}'``, ``'{"mean_recurrence": 16}'``). Checked with vLLM 0.32 (docs/formats/interop.md).
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
    """Make the classes and their configurations known; vLLM calls this in each of its processes.

    Versions of vLLM up to 0.26 have a class of their own for Ouro, which they keep.
    """
    # Lazy: the name of this package is read without vLLM and without transformers.
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from loopq.integrations.vllm.configs import HuginnConfig, OuroConfig

    for config in (HuginnConfig, OuroConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    known = ModelRegistry.get_supported_archs()
    for name, found in MODELS.items():
        if name not in known:
            ModelRegistry.register_model(name, f"loopq.integrations.vllm.models:{found}")
