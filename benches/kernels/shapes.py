"""Linear layers of the looped part of known models: what the benchmarks time."""

from __future__ import annotations

from dataclasses import dataclass

from loopq.errors import ConfigError

__all__ = ["HUGINN", "MODELS", "Projection", "shapes_of", "weights_per_step"]

# Comparisons of kernels: token counts, warm-ups of each variant, paired trials.
BENCH_TOKENS = (1, 7, 16)
BENCH_WARM_UPS = 10
BENCH_TRIALS = 50


@dataclass(frozen=True)
class Projection:
    """A linear layer that a step calls `calls` times, with different weights each time."""

    name: str
    in_features: int
    out_features: int
    calls: int

    @property
    def n_weights(self) -> int:
        return self.in_features * self.out_features

    def int4_bytes(self, group_size: int = 128, scale_bytes: int = 2) -> int:
        """Bytes of packed codes (a short last tile filled up) and scales."""
        rows = -(-self.in_features // 64) * 64
        groups = 1 if group_size == -1 else -(-self.in_features // group_size)
        return rows * self.out_features // 2 + groups * self.out_features * scale_bytes


HUGINN = (
    Projection("adapter", 10560, 5280, 1),
    Projection("attn.Wqkv", 5280, 15840, 4),
    Projection("attn.proj", 5280, 5280, 4),
    Projection("mlp.fc", 5280, 35840, 4),
    Projection("mlp.proj", 17920, 5280, 4),
)

MODELS: dict[str, tuple[Projection, ...]] = {
    "huginn-3.5b": HUGINN,
    "ouro-1.4b": (
        Projection("qkv", 2048, 6144, 24),
        Projection("o", 2048, 2048, 24),
        Projection("gate_up", 2048, 11264, 24),
        Projection("down", 5632, 2048, 24),
    ),
    "loopformer-278m": (
        Projection("qkv", 2048, 6144, 3),
        Projection("o", 2048, 2048, 3),
        Projection("fc", 2048, 8192, 3),
        Projection("proj", 8192, 2048, 3),
    ),
    "parcae-1.3b": (
        Projection("qkv", 1536, 4608, 8),
        Projection("o", 1536, 1536, 8),
        Projection("fc", 1536, 6144, 8),
        Projection("proj", 6144, 1536, 8),
    ),
    "parcae-140m": (
        Projection("qkv", 768, 2304, 2),
        Projection("o", 768, 768, 2),
        Projection("fc", 768, 3072, 2),
        Projection("proj", 3072, 768, 2),
    ),
}


def shapes_of(name: str) -> dict[str, tuple[Projection, ...]]:
    """Layers of every model with that name or prefix: "parcae" gives both sizes.

    Raises
    ------
    ConfigError
        If there is none; the message lists those there are.

    Examples
    --------
    >>> list(shapes_of("parcae"))
    ['parcae-1.3b', 'parcae-140m']
    """
    named = {
        model: layers for model, layers in MODELS.items() if model == name or model.startswith(f"{name}-")
    }
    if not named:
        raise ConfigError(f"no shapes of {name!r}; there are {', '.join(MODELS)}")
    return named


def weights_per_step(layers: tuple[Projection, ...]) -> int:
    """Weights that one step of the loop reads.

    Examples
    --------
    >>> weights_per_step(HUGINN)
    1637222400
    """
    return sum(layer.n_weights * layer.calls for layer in layers)
