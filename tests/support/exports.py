"""Logits of a model."""

from __future__ import annotations

import torch

import benches.zoo.models  # noqa: F401  registers the classes
from loopq.systems.base import Batch


def logits(loaded):
    """Rollout of two prompts."""
    return loaded.system.rollout(Batch(torch.arange(20).reshape(2, 10), prompts=(0, 1)), 3)
