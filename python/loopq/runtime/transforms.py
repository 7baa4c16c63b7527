"""The change of basis for some layers' codes, applied to the input at each call."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.layers.transforms import ChannelScale, Rotation, Transform

__all__ = ["InputTransform"]


@cache
def _factors(rotation: Rotation, size: int) -> tuple[torch.Tensor, ...]:
    """Factors of a block in float32. Layers on the processor share them."""
    return tuple(torch.from_numpy(np.ascontiguousarray(m, dtype=np.float32)) for m in rotation.factors(size))


class InputTransform(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """``T x`` along the last axis, in float32: a rotation by blocks, or a scale per channel.

    Raises
    ------
    ConfigError
        If the transform is of another kind.
    """

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.n_factors: dict[int, int] = {}
        if isinstance(transform, ChannelScale):
            self.register_buffer("input_scale", torch.from_numpy(np.array(transform.scale, dtype=np.float32)))
        elif isinstance(transform, Rotation):
            self.sizes = transform.sizes()
            for size in sorted(set(self.sizes)):
                factors = _factors(transform, size)
                self.n_factors[size] = len(factors)
                for number, factor in enumerate(factors):
                    # Recreated from its description, so a saved state needs no copy.
                    self.register_buffer(f"rotation_{size}_{number}", factor, persistent=False)
        else:
            raise ConfigError(f"no module applies an input transform of type {type(transform).__name__}")
        self.described = transform.describe()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform ``x`` of shape (..., in). The result is float32."""
        x = x.float()
        if not self.sizes:
            return x / self.input_scale
        if self.sizes[0] == self.sizes[-1]:
            return self._rotated(x, self.sizes[0])
        # The last block is shorter.
        first, last = x.split([sum(self.sizes[:-1]), self.sizes[-1]], dim=-1)
        return torch.cat([self._rotated(first, self.sizes[0]), self._rotated(last, self.sizes[-1])], dim=-1)

    def _rotated(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """Blocks of ``(A x B x ..) x`` for a Kronecker product: each factor multiplies its own axis."""
        shape, after = x.shape, size
        for factor in self._of(size):
            after //= len(factor)
            x = torch.nn.functional.linear(x.reshape(-1, len(factor), after).mT, factor).mT
        return x.reshape(shape)

    def _of(self, size: int) -> list[torch.Tensor]:
        return [getattr(self, f"rotation_{size}_{number}") for number in range(self.n_factors[size])]

    def blocks(self) -> list[tuple[int, list[NDArray[np.float32]]]]:
        """Blocks in order, for the core: how many of a size, and the factors of each. A vector holds divisors."""
        if not self.sizes:
            return [(1, [self.input_scale.numpy()])]
        sizes = dict.fromkeys(self.sizes)
        return [(self.sizes.count(size), [factor.numpy() for factor in self._of(size)]) for size in sizes]

    def extra_repr(self) -> str:
        """Description of the transform for `print(model)`."""
        return ", ".join(f"{key}={value!r}" for key, value in self.described.items() if key != "made")
