"""Layers and devices that plans are made for."""

from __future__ import annotations

from loopq.runtime.cuda.plan import DeviceLimits

ADA = DeviceLimits(128, 101_376, (8, 9))


SHAPES = {
    "adapter": (5280, 10560), "Wqkv": (15840, 5280), "attn.proj": (5280, 5280), "mlp.fc": (35840, 5280),
    "mlp.proj": (5280, 17920), "ouro": (11264, 2048), "parcae": (768, 768), "least": (16, 32),
}  # fmt: skip
