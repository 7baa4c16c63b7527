"""Sums of rows on an accelerator: summed there in true float32, moved to the host once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import SolveError
from loopq.settings.execution import require_float32

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as torch_device

#: Entries of a strip of sums. Temporaries take a few times this size.
_STRIP = 1 << 24
#: Bits of the low limb (docs/formats/hessian.md).
_LIMB_BITS = 62


class DeviceSums:
    """X^T X on the rows' device: float32 products of each block of rows, added exactly.

    Between blocks the sum is the core's (docs/formats/hessian.md): integers in units of 2^-60. It is independent of
    the process, part or call that adds a block. Within a block the device's library orders the products. Therefore
    the bits depend on the kind of device. They equal the core's only where no product is rounded.
    """

    def __init__(self, dim: int, *, per_step: bool) -> None:
        self._dim = dim
        self._per_step = per_step
        height = max(1, _STRIP // dim)
        #: Rows of the upper triangle that are summed together.
        self._strips = [(i, min(i + height, dim)) for i in range(0, dim, height)]
        self._limbs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._rows: dict[int, int] = {}
        self._top: dict[int, Tensor] = {}

    def add(self, step: int, rows: Tensor) -> None:
        """Add rows of a step, Tensor (n_rows, dim) of any floating type. Blocks are those of the core."""
        import torch  # lazy: loopq imports without torch

        key = step if self._per_step else -1
        if key not in self._limbs:
            self._limbs[key] = [
                (_zeros(j - i, self._dim - i, rows.device), _zeros(j - i, self._dim - i, rows.device))
                for i, j in self._strips
            ]
        self._rows[step] = self._rows.get(step, 0) + rows.shape[0]
        top = rows.abs().amax().float()
        self._top[step] = torch.maximum(self._top.get(step, top), top)
        require_float32()
        for block in rows.float().split(native.BLOCK_ROWS):
            for (i, j), (hi, lo) in zip(self._strips, self._limbs[key], strict=True):
                _add(block[:, i:j].T @ block[:, i:], hi, lo)

    def accumulator(self, steps: Sequence[int], threads: int = 0) -> native.HessianAccumulator:
        """Return the sums over these steps as a finished accumulator on the host. `threads` is for the core.

        Raises
        ------
        SolveError
            Rows of a step hold NaN or a number above 2^27 in magnitude.
        """
        import torch  # lazy: loopq imports without torch

        for step, top in self._top.items():
            if not float(top) <= native.ROW_LIMIT:
                raise SolveError(
                    f"input rows reach {float(top):g} at step {step}; the exact Hessian takes magnitudes up to "
                    f"{native.ROW_LIMIT:g}: scale the rows down (a Hessian's scale changes no code)"
                )
        limbs: list[list[NDArray[np.int64]]] = [[], []]
        for key in steps if self._per_step else [-1]:
            for which, limb in enumerate(limbs):
                strips = [pair[which] for pair in self._limbs.get(key, [])]
                packed = [s[torch.ones_like(s, dtype=torch.bool).triu()].cpu().numpy() for s in strips]
                entries = self._dim * (self._dim + 1) // 2
                limb.append(np.concatenate(packed) if packed else np.zeros(entries, dtype=np.int64))
        return native.HessianAccumulator.from_state(
            {
                "spec_version": native.HESSIAN_VERSION,
                "dim": self._dim,
                "steps": list(steps),
                "per_step": self._per_step,
                "n_rows": [self._rows.get(step, 0) for step in steps],
                "hi": limbs[0],
                "lo": limbs[1],
            },
            threads=threads,
        )


def _zeros(rows: int, columns: int, device: torch_device) -> Tensor:
    import torch  # lazy: loopq imports without torch

    return torch.zeros(rows, columns, dtype=torch.int64, device=device)


def _add(sums: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Add float32 sums to their limbs, as the core's `limbs::add` does: value = (hi 2^62 + lo) 2^-60."""
    whole = (sums * 0.25).round_()
    # At most 2 in magnitude. Both are multiples of the sum's last place, so the difference is exact.
    rest = sums.sub_(whole * 4)
    lo += (rest * 2.0**60).round_().long()
    hi += whole.long() + (lo >> _LIMB_BITS)
    lo &= (1 << _LIMB_BITS) - 1


class Sums:
    """Sums of rows on their device: the core sums on the CPU, `DeviceSums` elsewhere."""

    def __init__(self, dim: int, steps: Sequence[int], *, per_step: bool, threads: int) -> None:
        self._dim, self._steps, self._per_step, self._threads = dim, steps, per_step, threads
        self._near: native.HessianAccumulator | None = None
        self._far: DeviceSums | None = None

    def add(self, step: int, rows: Tensor) -> None:
        """Add rows of a step, Tensor (n_rows, dim) of any floating type."""
        if rows.device.type == "cpu":
            self._near = self._near or self._empty()
            self._near.update(step, to_native(rows))
        else:
            self._far = self._far or DeviceSums(self._dim, per_step=self._per_step)
            self._far.add(step, rows)

    def finish(self) -> native.HessianAccumulator:
        """Return the finished sums on the host.

        Raises
        ------
        SolveError
            As in `DeviceSums.accumulator`.
        """
        far, self._far = self._far, None
        if far is not None and self._near is None:
            self._near = far.accumulator(self._steps, self._threads)
            return self._near
        self._near = self._near or self._empty()
        self._near.finish()
        if far is not None:
            self._near.merge(far.accumulator(self._steps, self._threads))
        return self._near

    def _empty(self) -> native.HessianAccumulator:
        return native.HessianAccumulator(
            self._dim, self._steps, per_step=self._per_step, threads=self._threads
        )


def to_native(rows: Tensor) -> Any:
    """Copy rows to an array for the core. A bfloat16 array is passed as its bits."""
    import torch  # lazy: loopq imports without torch

    host = rows.detach().to("cpu").contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view("uint16")
    if host.dtype not in (torch.float32, torch.float16):
        host = host.float()
    return host.numpy()
