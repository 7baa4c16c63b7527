"""Published classes in small, registered with loopq's loader: `load_model` opens their folders after this import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from benches.zoo.models.coconut import CoconutConfig, SmallCoconut
from benches.zoo.models.control import ControlConfig, SmallControl
from benches.zoo.models.iquest import IQuestConfig, SmallIQuest
from benches.zoo.models.llama_loops import NanbeigeConfig, OuroConfig, SmallNanbeige, SmallOuro
from benches.zoo.models.loopformer import LoopFormerConfig, SmallLoopFormer
from benches.zoo.models.mamba import MambaConfig, SmallMamba
from benches.zoo.models.parcae import ParcaeConfig, SmallParcae
from benches.zoo.models.ponder import PonderConfig, SmallPonder
from benches.zoo.models.rllama import RLlamaConfig, SmallRLlama
from loopq.models.classes import register_model
from loopq.models.load import encode_bytes
from loopq.zoo.config import SmallConfig
from loopq.zoo.huginn import HuginnConfig, SmallHuginn

CLASSES: dict[str, tuple[type[SmallConfig], type[nn.Module]]] = {
    config.model_type: (config, model)
    for config, model in (
        (CoconutConfig, SmallCoconut),
        (ControlConfig, SmallControl),
        (HuginnConfig, SmallHuginn),
        (IQuestConfig, SmallIQuest),
        (LoopFormerConfig, SmallLoopFormer),
        (MambaConfig, SmallMamba),
        (NanbeigeConfig, SmallNanbeige),
        (OuroConfig, SmallOuro),
        (ParcaeConfig, SmallParcae),
        (PonderConfig, SmallPonder),
        (RLlamaConfig, SmallRLlama),
    )
}


def build(config: dict[str, Any]) -> nn.Module:
    """Return the untrained model of a ``config.json``."""
    config_class, model_class = CLASSES[config["model_type"]]
    return model_class(config_class.from_dict(config))


def _value_embeds(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name Parcae's value embeddings as its published class does; `parcae_small` was stored before that."""
    old = "transformer.value_embeds."
    return {
        f"value_embeds.{name.removeprefix(old)}" if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }


_RENAMES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    ParcaeConfig.model_type: _value_embeds
}

for _model_type in CLASSES:
    # Huginn's class is the embedded model's, which loopq has registered.
    if _model_type != HuginnConfig.model_type:
        register_model(_model_type, build, encode=encode_bytes, rename=_RENAMES.get(_model_type))
