"""Linear looped systems with every diagnosis in closed form."""

import numpy as np
import torch
from torch import nn

from loopq.analysis.diagnosis.weights import as_stored
from loopq.calibrate.data import from_ids
from loopq.models.replace import Replaced
from loopq.systems.declare import declare
from loopq.systems.stepwise import SingleSteps


class LinearLoop(nn.Module):
    """s' = (I + C) (W_s s + W_e e), e a table of embeddings, logits a linear map of the state; float64."""

    def __init__(self, width=6, vocab=11, radius=0.6, core=0.1, seed=0):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.table = nn.Embedding(vocab, width)
        self.adapter = nn.Linear(2 * width, width, bias=False)
        self.core = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.double()
        w = rng.normal(size=(width, width))
        w *= radius / np.abs(np.linalg.eigvals(w)).max()
        with torch.no_grad():
            self.adapter.weight[:, :width] = torch.from_numpy(w)
            self.adapter.weight[:, width:] = torch.from_numpy(rng.normal(size=(width, width)))
            self.core.weight[:] = torch.from_numpy(core * rng.normal(size=(width, width)) / np.sqrt(width))
            self.table.weight[:] = torch.from_numpy(rng.normal(size=(vocab, width)))
            self.head.weight[:] = torch.from_numpy(rng.normal(size=(vocab, width)))

    def jacobian(self, weight=None):
        """(I + C) W_s as an array."""
        w = self.adapter.weight if weight is None else torch.as_tensor(weight, dtype=torch.float64)
        width = w.shape[0]
        eye = torch.eye(width, dtype=torch.float64)
        return ((eye + self.core.weight) @ w[:, :width]).detach().numpy()

    def drive(self, ids, weight=None):
        """(I + C) W_e e for tokens, shape (n_tokens, width)."""
        w = self.adapter.weight if weight is None else torch.as_tensor(weight, dtype=torch.float64)
        width = w.shape[0]
        eye = torch.eye(width, dtype=torch.float64)
        return (self.table.weight[ids] @ ((eye + self.core.weight) @ w[:, width:]).T).detach().numpy()


class LinearSystem(SingleSteps):
    """The adapter of `LinearLoop`."""

    name = "linear-toy"
    state_is_random = True

    @classmethod
    def matches(cls, model):
        return isinstance(model, LinearLoop)

    @property
    def n_steps(self):
        return 8

    def shared_parameters(self, n_steps):
        modules = [("adapter", {"role": "adapter", "exposed": True}), ("core", {"role": "mlp"})]
        return declare(self.model, modules, n_steps)

    def rollout(self, batch, n_steps):
        with torch.no_grad():
            e = self.embed(batch)
            s = self.initial_state(batch, e)
            for t in range(n_steps):
                s = self.step(s, e, t, n_steps)
            return self.predict(s, e)

    def embed(self, batch):
        return self.model.table(batch.input_ids)

    def initial_state(self, batch, embedding):
        return batch.noise(batch.input_ids.shape[1], self.model.core.weight.shape[0]).double()

    def step(self, state, embedding, t, n_steps):
        a = self.model.adapter(torch.cat([state, embedding], -1))
        return a + self.model.core(a)

    def predict(self, state, embedding):
        return self.model.head(state)


class BlindSystem(LinearSystem):
    """The same model without a step function, fixed initial state, nothing exposed."""

    name = "blind-toy"
    has_steps = False
    state_is_random = False

    def shared_parameters(self, n_steps):
        return declare(self.model, [("adapter", {"role": "mlp"}), ("core", {"role": "mlp"})], n_steps)


def tokens(n_prompts=3, n_tokens=5, vocab=11, seed=0):
    return from_ids(np.random.default_rng(seed).integers(0, vocab, size=(n_prompts, n_tokens)), "made-up ids")


def numpy_rounder(weight, config):
    """Rounding to nearest, half to even, with scale max|w| / q of each group of columns, q = 2^(bits-1) - 1."""
    top, out = 2 ** (config.grid.bits - 1) - 1, np.array(weight, np.float64)
    width = weight.shape[1] if config.grid.group_size == -1 else config.grid.group_size
    for start in range(0, weight.shape[1], width):
        part = out[:, start : start + width]
        scale = np.abs(part).max(axis=1, keepdims=True) / top
        scale[scale == 0] = 1.0
        out[:, start : start + width] = scale * np.clip(np.round(part / scale), -top - 1, top)
    return out.astype(np.float32)


def under(system, weights, n_steps=None):
    """The adapter of the same model with other weights, given outputs first."""
    return Replaced(system, as_stored(system, weights, n_steps or system.n_steps))
