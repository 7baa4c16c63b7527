"""A vLLM plugin that serves looped models with all their loops. vLLM finds it once loopq is installed.

``vllm serve DIR`` takes Ouro, Huginn, R-Llama, Dory and dense decoders with a loop (`loopq.systems.looped`).
Checkpoints may be full-precision, written by ``loopq export``, or native on a CPU. Each call of an attention layer in a
forward pass has its own key/value cache, unlike in vLLM's fallbacks. ``config.json`` sets the depth. ``--hf-overrides``
changes it (``'{"total_ut_steps": 3}'``, ``'{"mean_recurrence": 16}'`` or ``'{"n_recurrent_loops": 2}'``). Checked with
vLLM 0.32. For 0.33, which has Dory, the released source was read (docs/formats/interop.md).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

#: Version of vLLM that the classes are written for.
VLLM = "0.32"
#: Names in a ``config.json`` under "architectures", and the classes that run them, each behind its module here.
MODELS = {
    "OuroForCausalLM": "models:Ouro",
    "RavenForCausalLM": "models:RavenLM",
    "DoryForCausalLM": "dory:Dory",
    "LoopedLlamaForCausalLM": "models:LoopedLlama",
    "LoopedMistralForCausalLM": "models:LoopedMistral",
    "LoopedQwen2ForCausalLM": "models:LoopedQwen2",
    "LoopedQwen3ForCausalLM": "models:LoopedQwen3",
}
#: Classes that extend one that vLLM has itself.
EXTENDED = {"DoryForCausalLM": "packed:PackedDory"}
_MODULES = {
    name: module
    for module, _, name in (path.partition(":") for path in (*MODELS.values(), *EXTENDED.values()))
}


def register() -> None:
    """Register the classes and their configurations. vLLM calls this in each of its processes.

    A class that vLLM has itself is left to it: Ouro up to 0.26. Dory, from 0.33 on, stays vLLM's too, and also loads
    packed integers.
    """
    # Lazy: reading this package's name must not need vLLM or transformers.
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from loopq.runtime.vllm.configs import CONFIGS

    # Native checkpoints.
    importlib.import_module(f"{__name__}.codes")
    known = ModelRegistry.get_supported_archs()
    for name, configs in CONFIGS.items():
        for config in configs if name not in known else ():
            AutoConfig.register(config.model_type, config, exist_ok=True)
    for name, ours in MODELS.items():
        path = EXTENDED.get(name) if name in known else ours
        if path is not None:
            ModelRegistry.register_model(name, f"{__name__}:{path.partition(':')[2]}")


def __getattr__(name: str) -> Any:
    """Import a class when vLLM asks for it. A vLLM without its parts gets an error that names the version."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ImportError as cause:
        installed = importlib.metadata.version("vllm")
        raise ImportError(
            f"loopq serves {name} with vLLM {VLLM}; vLLM {installed} is installed: {cause}"
        ) from cause
