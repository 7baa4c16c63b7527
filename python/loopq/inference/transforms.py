"""The change of basis for some layers' codes, applied to the input at each call."""

from __future__ import annotations

import numpy as np
import torch

from loopq.errors import ConfigError
from loopq.layers.transforms import ChannelScale, Rotation, Transform

__all__ = ["InputTransform"]


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
        if isinstance(transform, ChannelScale):
            self.register_buffer("input_scale", torch.from_numpy(np.array(transform.scale, dtype=np.float32)))
        elif isinstance(transform, Rotation):
            self.sizes = transform.sizes()
            for size in sorted(set(self.sizes)):
                block = torch.from_numpy(transform.matrix(size).T.astype(np.float32))
                # Recreated from its description, so a saved state needs no copy.
                self.register_buffer(f"rotation_{size}", block.contiguous(), persistent=False)
        else:
            raise ConfigError(f"no module applies an input transform of type {type(transform).__name__}")
        self.described = transform.describe()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform ``x`` of shape (..., in). The result is float32."""
        x = x.float()
        if not self.sizes:
            return x / self.input_scale
        parts = zip(x.split(self.sizes, dim=-1), self.sizes, strict=True)
        return torch.cat([part @ getattr(self, f"rotation_{size}") for part, size in parts], dim=-1)

    def extra_repr(self) -> str:
        """Description of the transform for `print(model)`."""
        return ", ".join(f"{key}={value!r}" for key, value in self.described.items() if key != "made")
