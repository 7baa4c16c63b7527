"""Huginn: prelude, noise as initial state, looped adapter and core blocks, coda."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.systems import SYSTEMS
from loopq.systems.base import Published
from loopq.systems.raven import Raven
from loopq.systems.views import copied

if TYPE_CHECKING:
    from torch import Tensor, nn


@SYSTEMS.register("huginn")
class Huginn(Raven):
    """Huginn-3.5B (`raven` remote code) and the embedded model, which has the same class.

    The initial state is truncated normal noise of standard deviation sqrt(2/5), cut at three standard deviations. It
    is passed explicitly so that runs can be paired. The adapter acts on cat(state, embedding), with the state's
    columns first. It has no identity path and is feedback-exposed. Norms act on the stream.
    """

    summary = "noise state; s = core(adapter([s, e])) with norms on the stream"
    published = Published({"Huginn-3.5B": 17}, code="checkpoint", exposed=("adapter",))

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `transformer.adapter` and core blocks with four norms each."""
        names = dict(model.named_modules())
        return "transformer.adapter" in names and "transformer.core_block.0.norm_4" in names

    @property
    def n_positions(self) -> int:
        """Length of the rotary table."""
        return int(self.model.freqs_cis.shape[1])

    def _placed(self, positions: Tensor) -> Any:
        return copied(self.model, freqs_cis=self.model.freqs_cis[:, positions])

    def _rotary(self, state: Tensor) -> Any:
        return self.model.freqs_cis[:, : state.shape[1]]

    def _angles(self, n_positions: int) -> Tensor:
        angles: Tensor = self.model.freqs_cis[0, :n_positions, 0]
        return angles

    def _norms_after_loop(self) -> list[tuple[str, Any]]:
        return [("norm", self.model.transformer.ln_f)]

    def _leave(self, state: Tensor) -> Tensor:
        after: Tensor = self.model.transformer.ln_f(state)
        return after
