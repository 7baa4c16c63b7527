"""The loop metric from gradients of whole weights in double precision: what the sketch is compared with."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from loopq.gradients.backward import draw_labels
from loopq.gradients.collect_metrics import LEAST_SCALE, n_ahead
from loopq.gradients.sketch import Kept, Reached
from loopq.gradients.unroll import unroll
from loopq.quantizers.loop_metric import BLOCK, DAMPING, RIDGE, LoopMetric, n_gradient_prompts, ridged
from loopq.systems.declare import parameter_of


@contextlib.contextmanager
def linked(system, weights):
    """Let the model compute with tensors of a graph. Restore its own parameters afterwards."""
    wanted = {id(parameter_of(system.model, name)): tensor for name, tensor in weights.items()}
    changed = []
    try:
        for module in system.model.modules():
            names = [n for n, p in module._parameters.items() if p is not None and id(p) in wanted]
            if not names:
                continue
            before = dict(module._parameters)
            changed.append((module, before, names))
            for name in names:
                del module._parameters[name]
                module.__dict__[name] = wanted[id(before[name])]
        yield
    finally:
        for module, before, names in changed:
            for name in names:
                module.__dict__.pop(name, None)
            # The whole table is restored, so the order of a state dict does not change.
            module._parameters.clear()
            module._parameters.update(before)


def gradients(system, tokens, names, n_steps, seed, n_draws):
    """Yield gradients of drawn labels' log-likelihood with respect to shared weights, by prompt and draw."""
    for batch in tokens.batches(1, seed):
        leaves = {n: system.model.get_parameter(n).detach().clone().requires_grad_(True) for n in names}
        with linked(system, leaves):
            out = tokens.scored(unroll(system, batch, n_steps).float(), system.output)
            for draw in range(n_draws):
                draw_seed = [seed, batch.prompts[0], draw]
                if system.output == "logits":
                    logp = out.log_softmax(-1)
                    labels = draw_labels(logp, draw_seed)
                    target = logp.gather(-1, labels[..., None]).sum()
                else:
                    noise = (
                        np.random.default_rng(draw_seed).standard_normal(tuple(out.shape)).astype(np.float32)
                    )
                    target = (out * torch.from_numpy(noise)).sum()
                last = draw + 1 == n_draws
                values = torch.autograd.grad(
                    target, list(leaves.values()), retain_graph=not last, allow_unused=True
                )
                yield {n: g for n, g in zip(leaves, values, strict=True) if g is not None}


def shrunk(each, scale):
    """Sum of couplings between outputs, less the share that is noise; the diagonal is unchanged."""
    n, total = len(each), sum(each)
    unit = np.sqrt(np.outer(scale, scale)) * (1 - np.eye(len(scale)))
    mean = total / n
    noise = sum(np.square((one - mean) * unit).sum() for one in each) / (n * max(n - 1, 1))
    keep = 1 - min(1.0, noise / np.square(mean * unit).sum()) if n > 1 else 0.0
    return total * np.where(np.eye(len(scale)), 1, keep)


def exact_metrics(hessians, system, tokens, tasks, n_steps, seed=0, outputs="scale"):
    """Loop metrics as of `collect_metrics`; with outputs "A", S_g = sum g^T A'^-1 g, one round of the alternation."""
    ((most, n_draws),) = {t.gradients for t in tasks}
    tokens = tokens.take(0, n_gradient_prompts(most, len(tokens.sequences)))
    kept = {t.name: [] for t in tasks}
    for by_name in gradients(system, tokens, list(kept), n_steps, seed, n_draws):
        for t in tasks:
            g = by_name[t.name].double().numpy()
            kept[t.name].append(g.T if t.parameter.orientation == "in_out" else g)
    metrics = {}
    for t in tasks:
        h = np.asarray(hessians.accumulator(str(t.input_group), t.steps).matrix(list(t.steps)), np.float64)
        inverse, left, right = np.linalg.inv(ridged(h, DAMPING)), [], 0.0
        weight = parameter_of(system.model, t.parameter).detach().double().numpy()
        size = np.square(weight.T if t.parameter.orientation == "in_out" else weight) @ np.diag(h)
        ahead = kept[t.name][: n_ahead(len(tokens.sequences)) * n_draws]
        energy = sum(np.einsum("ij,jk,ik->i", g, inverse, g) for g in ahead) * size
        scale = size / np.maximum(energy, LEAST_SCALE * energy.mean())
        for first in range(0, t.parameter.out_features, BLOCK):
            rows = slice(first, first + BLOCK)
            block = [g[rows] for g in kept[t.name]]
            left.append(ridged(shrunk([g @ inverse @ g.T for g in block], scale[rows]), RIDGE))
            weight_of_block = np.linalg.inv(left[-1]) if outputs == "A" else np.diag(scale[rows])
            right = right + sum(g.T @ weight_of_block @ g for g in block)
        metrics[t.name] = LoopMetric(tuple(left), right, len(kept[t.name]))
    return metrics


class Noted(Reached):
    """Sums of each gradient, in the order in which they are added."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, float]] = []

    def add(self, name: str, products: Kept) -> None:
        self.found.append((name, float(products[0])))
