"""Backward passes of drawn labels, prompt by prompt, or several in turns when layers are read for each visit."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.errors import model_code
from loopq.gradients.turns import Turns
from loopq.gradients.unroll import unroll
from loopq.models.stream import Stream
from loopq.quantizers.task import Task
from loopq.storage.model_files import source_of
from loopq.systems.base import Batch, LoopedSystem

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.gradients.sketch import Side
    from loopq.gradients.taps import Taps

    Join = Callable[[Callable[[], None]], None]

#: Positions whose labels are drawn together.
_AT_ONCE = 8


@dataclass
class Backward:
    """Backward passes of drawn labels, prompt by prompt. `n_positions` counts the scored positions of all prompts.

    Notes
    -----
    With logits, the target is the log-likelihood of labels drawn from the model's own distribution, at scored
    positions. With hidden states it is the product with normal noise, which is the equivalent for a squared error.
    """

    system: LoopedSystem
    tokens: TokenSet
    n_steps: int
    n_draws: int
    seed: int
    at_once: int = 1
    n_positions: int = 0
    _labels: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def run(self, side: Side, tasks: Sequence[Task], first: int, last: int) -> Generator[int, None, None]:
        """Pass gradients of some prompts to a side. After each, yield the number of finished prompts."""
        from loopq.gradients.taps import Taps  # lazy: loopq imports without torch

        batches = list(itertools.islice(self.tokens.batches(1, self.seed), first, last))
        stream = source_of(self.system.model)
        streamed = stream.alone() if isinstance(stream, Stream) else contextlib.nullcontext()
        with streamed as join, Taps(self.system, tasks, side) as taps:
            if join is not None and self.at_once > 1:
                yield from self._together(taps, join, batches, first)
                return
            for done, batch in enumerate(batches, first):
                for whole in self._prompt(taps, batch):
                    yield done + whole

    def _prompt(self, taps: Taps, batch: Batch) -> Generator[bool, None, None]:
        """Compute the gradients of one prompt. After each, yield whether it was the last."""
        prompt, side = batch.prompts[0], taps.side
        side.begin(prompt, 0)
        with model_code(f"gradient of {batch.name}"):
            out = unroll(taps.system, batch, self.n_steps).float()
            out = self.tokens.scored(out, self.system.output)
            for draw in range(self.n_draws):
                if draw:
                    side.begin(prompt, draw)
                whole = draw + 1 == self.n_draws
                taps.backward(self._target(out, prompt, draw), last=whole)
                yield whole

    def _together(
        self, taps: Taps, join: Join, batches: Sequence[Batch], done: int
    ) -> Generator[int, None, None]:
        """Compute gradients of several prompts in turns, so that one read of a layer serves a visit of all of them."""
        whole = taps.side
        for at in range(0, len(batches), self.at_once):
            group = [(batch, whole.twin()) for batch in batches[at : at + self.at_once]]
            turns = Turns()
            turns.run([functools.partial(self._piece, taps, join, turns.give, *one) for one in group])
            for _, twin in group:
                whole.merge(twin)
            # A save in between must not hold only some of the prompts that run together.
            yield from [done + at] * (len(group) * self.n_draws - 1)
            yield done + at + len(group)

    def _piece(self, taps: Taps, join: Join, give: Callable[[], None], batch: Batch, side: Side) -> None:
        join(give)
        taps.side = side
        deque(self._prompt(taps, batch), maxlen=0)

    def _target(self, out: Tensor, prompt: int, draw: int) -> Tensor:
        import torch  # lazy: loopq imports without torch

        self.n_positions += out.shape[0] * out.shape[1] * (draw == 0)
        if self.system.output == "logits":
            logp = out.log_softmax(-1)
            # With a large vocabulary a draw takes as long as a step of the loop. The prompts ahead reuse it.
            if (prompt, draw) not in self._labels:
                self._labels[prompt, draw] = draw_labels(logp, [self.seed, prompt, draw])
            return logp.gather(-1, self._labels[prompt, draw][..., None]).sum()
        noise = np.random.default_rng([self.seed, prompt, draw]).standard_normal(tuple(out.shape))
        return (out * self.system.to_device(torch.from_numpy(noise.astype(np.float32)))).sum()


def draw_labels(logp: Tensor, seed: Sequence[int]) -> Tensor:
    """Draw labels from the model's own distribution.

    Parameters
    ----------
    logp : Tensor, float32, shape (n_prompts, n_positions, vocabulary)
        Log-probabilities in nats.
    seed : sequence of int
        Seed of the draw.

    Returns
    -------
    Tensor, int64, shape (n_prompts, n_positions)
        Labels, on the same device.

    Notes
    -----
    The draw is a race: for independent exponential E_k, argmin_k E_k / p_k has the distribution p. Two processors round
    p differently. If the other has p', the label changes with a probability of at most sum_k |p_k - p'_k|. Inversion of
    the cumulative distribution F would give sum_k |F_k - F'_k|, ten times as much on the embedded model. Numpy draws
    the E_k for every device, because the devices' own generators differ.
    """
    import torch  # lazy: loopq imports without torch

    rng = np.random.default_rng(list(seed))
    labels = []
    # A few positions at a time stay in the cache; the numbers are those of one draw.
    for part in logp.detach().flatten(0, -2).split(_AT_ONCE):
        waiting = torch.from_numpy(rng.standard_exponential(tuple(part.shape))).to(logp.device)
        labels.append(waiting.log_().sub_(part).argmin(-1))
    return torch.cat(labels).reshape(logp.shape[:-1])
