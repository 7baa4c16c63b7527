"""Gradient descent on group scales, or on scales and codes, against the output of full precision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError, NonFiniteError
from loopq.gradients.unroll import divergence, linked, unroll
from loopq.layers.layer import QuantizedLayer
from loopq.settings.declare import Settings, setting
from loopq.settings.execution import Execution
from loopq.storage.files import RawTensor, float_to_raw
from loopq.storage.journal import Journal
from loopq.storage.model_files import raw, to_torch
from loopq.systems.base import LoopedSystem, model_code

if TYPE_CHECKING:
    from torch import Tensor

# How far a code may start off its whole number: nearer to one half, the first noisy update would flip it.
LEAN = 0.2

_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Tune(Settings):
    """How quantized layers are tuned by gradient.

    Parameters
    ----------
    what : {"scales", "codes"}
        What is tuned by gradient through the unrolled loop: group scales, or scales and codes.
    n_updates : int
        Updates of the tuning, by Adam.
    scale_rate : float
        Learning rate of a scale's relative change.
    code_rate : float
        Learning rate of a code, in steps of the grid.
    batch_size : int
        Prompts of one update.
    every : int
        Updates between two measurements on the held-out prompts; the best layers found are returned.
    patience : int
        Measurements without a gain after which the run stops.
    truncate : int, optional
        Steps from the end of the rollout that carry gradients; all when absent.
    """

    what: Literal["scales", "codes"] = setting("scales")
    n_updates: int = setting(250, at_least=1)
    scale_rate: float = setting(2e-3, at_least=0.0)
    code_rate: float = setting(1e-2, at_least=0.0)
    batch_size: int = setting(8, at_least=1)
    every: int = setting(25, at_least=1)
    patience: int = setting(4, at_least=1)
    truncate: int | None = setting(None, at_least=1)


@dataclass(frozen=True)
class Tuned:
    """Layers after tuning, and how it went.

    Parameters
    ----------
    layers : dict of str to QuantizedLayer
        By parameter name; the same grid and bytes as before.
    history : tuple of (int, float)
        Updates done, and held-out divergence then. The first entry is the start.
    flipped : float
        Share of codes that changed.
    """

    layers: dict[str, QuantizedLayer]
    history: tuple[tuple[int, float], ...]
    flipped: float


class _Variables:
    """The numbers that are tuned: a relative change for each scale, a real code for each code."""

    def __init__(
        self, layers: Mapping[str, QuantizedLayer], originals: Mapping[str, Tensor], codes: bool
    ) -> None:
        import torch

        self.layers = dict(layers)
        self.scale: dict[str, Tensor] = {}
        self.code: dict[str, Tensor] = {}
        self._scale0: dict[str, Tensor] = {}
        self._zero: dict[str, Tensor] = {}
        for name, layer in layers.items():
            self._scale0[name] = torch.from_numpy(layer.scales.copy())
            self.scale[name] = torch.zeros_like(self._scale0[name], requires_grad=True)
            zero = np.zeros(layer.scales.shape) if layer.zeros is None else layer.zeros
            self._zero[name] = self._spread(layer, torch.from_numpy(zero.astype(np.float32)))
            start = torch.from_numpy(layer.codes.astype(np.float32))
            if codes:
                # A code leans towards the weight it stands for, as far as it can without becoming another.
                exact = originals[name] / self._spread(layer, self._scale0[name]) + self._zero[name]
                start = start + (exact - start).clamp(-LEAN, LEAN)
            self.code[name] = start.requires_grad_(codes)

    @staticmethod
    def _spread(layer: QuantizedLayer, values: Tensor) -> Tensor:
        width = layer.shape[1] if layer.group_size == -1 else layer.group_size
        return values.repeat_interleave(width, dim=1)[:, : layer.shape[1]]

    def _bounds(self, layer: QuantizedLayer) -> tuple[int, int]:
        top = 1 << layer.bits
        return (-top // 2, top // 2 - 1) if layer.symmetric else (0, top - 1)

    def weights(self) -> dict[str, Tensor]:
        """Dequantized weights in the model's orientation, rounding passed straight through."""
        out = {}
        for name, layer in self.layers.items():
            code = self.code[name]
            if code.requires_grad:
                hard = code.clamp(*self._bounds(layer)).round()
                code = code + (hard - code).detach()
            scale = self._spread(layer, self._scale0[name] * (1 + self.scale[name]))
            values = (code - self._zero[name]) * scale
            out[name] = values.T if layer.orientation == "in_out" else values
        return out

    def named(self) -> dict[str, Tensor]:
        """What is tuned, by names that tell it apart."""
        codes = {f"code/{n}": code for n, code in self.code.items() if code.requires_grad}
        return {f"scale/{n}": scale for n, scale in self.scale.items()} | codes

    def clamp(self) -> None:
        """Keep codes where a gradient can still move them off the ends."""
        import torch

        with torch.no_grad():
            for name, code in self.code.items():
                if code.requires_grad:
                    low, high = self._bounds(self.layers[name])
                    code.clamp_(low - 0.49, high + 0.49)

    def snapshot(self) -> dict[str, QuantizedLayer]:
        """Layers with the numbers as they are now, scales rounded to their stored type."""
        out = {}
        for name, layer in self.layers.items():
            scale = (self._scale0[name] * (1 + self.scale[name].detach())).numpy()
            stored = float_to_raw(np.ascontiguousarray(scale), _STORED[layer.scale_dtype]).float32()
            stored = np.where(stored == 0, layer.scales, stored).astype(np.float32)
            low, high = self._bounds(layer)
            codes = self.code[name].detach().clamp(low, high).round().numpy().astype(layer.codes.dtype)
            out[name] = dataclasses.replace(layer, scales=stored, codes=codes)
        return out


def tune(
    system: LoopedSystem,
    layers: Mapping[str, QuantizedLayer],
    prompts: tuple[TokenSet, TokenSet],
    config: Tune | None = None,
    *,
    n_steps: int | None = None,
    execution: Execution | None = None,
    journal: Journal | None = None,
) -> Tuned:
    """Tune quantized layers on KL(full precision || quantized) through the unrolled loop.

    Parameters
    ----------
    system : LoopedSystem
        Full-precision model; it comes back unchanged.
    layers : mapping of str to QuantizedLayer
        Where to start: what a closed-form quantizer gave.
    prompts : pair of TokenSet
        Those to tune on, and those held out, which decide what is kept and must be neither those tuned on nor those
        reported on.
    config : Tune, optional
        Settings.
    n_steps : int, optional
        Depth; the model's own when absent.
    execution : Execution, optional
        Its seed decides the order of the prompts and their initial states; its progress is told of updates.
    journal : Journal, optional
        Where the run is saved at each measurement, so that it can be resumed.

    Returns
    -------
    Tuned
        The best layers on the prompts held out, at worst those given.

    Raises
    ------
    ConfigError
        The same prompt on both sides, or a layer with an input transform.
    NonFiniteError
        The loss is NaN or infinite.

    Notes
    -----
    Adam with a cosine rate on min_{s, c} E KL(p || p^), rounding passed straight through. The same seed and
    number of torch threads give the same result; another number of threads may change last bits, unlike in the
    closed-form tiers.
    """
    config = config or Tune()
    execution = execution or Execution()
    seed, progress = execution.seed, execution.progress
    tokens, held_out = prompts
    _refuse(layers, tokens, held_out)
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    originals = {name: _original(system, layer) for name, layer in layers.items()}
    variables = _Variables(layers, originals, config.what == "codes")
    teacher = _Teacher(system, depth, config, seed)
    groups: list[dict[str, Any]] = [{"params": list(variables.scale.values()), "lr": config.scale_rate}]
    if config.what == "codes":
        groups.append({"params": list(variables.code.values()), "lr": config.code_rate})
    run = _Descent(variables, _adam(groups), np.random.default_rng(seed), journal or Journal(None))
    if not run.resume():
        run.measured(0, teacher.measure(_tensors(layers), held_out), dict(layers))
    progress.start("tune", config.n_updates, "updates")
    progress.advance(run.history[-1][0])
    for update in range(run.history[-1][0], config.n_updates):
        if run.waited >= config.patience:
            break
        rates = (config.scale_rate, config.code_rate)
        for group, rate in zip(run.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * update / config.n_updates))
        chosen = np.sort(
            run.order.choice(len(tokens.sequences), min(config.batch_size, len(tokens.sequences)), False)
        )
        teacher.update(variables, tokens, [int(i) for i in chosen], run.optimizer, update)
        progress.advance()
        if (update + 1) % config.every == 0 or update + 1 == config.n_updates:
            found = variables.snapshot()
            run.measured(update + 1, teacher.measure(_tensors(found), held_out), found)
    progress.stop()
    changed = sum(int((run.layers[n].codes != layer.codes).sum()) for n, layer in layers.items())
    flipped = changed / sum(layer.codes.size for layer in layers.values())
    facts = {
        "tier": f"gradient, {config.what}",
        "tuned": config.to_json() | {"seed": seed},
        "tuned_updates": run.history[-1][0],
        "tuned_held_out_before": run.history[0][1],
        "tuned_held_out_after": run.best,
        "tuned_codes_flipped": flipped,
    }
    return Tuned(
        {n: layer.with_report(**facts) for n, layer in run.layers.items()}, tuple(run.history), flipped
    )


@dataclass
class _Descent:
    """Where a tuning run is: what is tuned, the optimizer, the order of prompts, and the best layers found."""

    variables: _Variables
    optimizer: Any
    order: np.random.Generator
    journal: Journal
    history: list[tuple[int, float]] = field(default_factory=list)
    layers: dict[str, QuantizedLayer] = field(default_factory=dict)
    best: float = math.inf
    waited: int = 0

    def measured(self, update: int, value: float, layers: dict[str, QuantizedLayer]) -> None:
        """Take note of a measurement, and save all."""
        self.history.append((update, value))
        self.waited += 1
        if value < self.best or not self.layers:
            self.best, self.layers, self.waited = value, layers, 0
        tensors = {f"best/{n}/codes": RawTensor.of(layer.codes) for n, layer in self.layers.items()}
        tensors |= {f"best/{n}/scales": RawTensor.of(layer.scales) for n, layer in self.layers.items()}
        tensors |= {name: raw(tensor) for name, tensor in self._tensors().items()}
        facts = {"history": self.history, "waited": self.waited, "best": self.best}
        self.journal.save("descent", tensors, **facts, order=self.order.bit_generator.state)

    def resume(self) -> bool:
        """Go on from the last measurement of the same work, if there is one."""
        found = self.journal.find("descent")
        if found is None:
            return False
        self.history = [(int(update), float(value)) for update, value in found.facts["history"]]
        self.waited, self.best = int(found.facts["waited"]), float(found.facts["best"])
        self.order.bit_generator.state = found.facts["order"]
        for name, layer in self.variables.layers.items():
            codes, scales = (found.tensors[f"best/{name}/{what}"].array() for what in ("codes", "scales"))
            self.layers[name] = dataclasses.replace(layer, codes=codes, scales=scales)
        if self.history[-1][0]:
            self.optimizer.load_state_dict(self._state(found.tensors))
        for name, tensor in self.variables.named().items():
            tensor.data.copy_(to_torch(found.tensors[name]))
        return True

    def _tensors(self) -> dict[str, Tensor]:
        state = self.optimizer.state_dict()["state"]
        moments = {f"adam/{i}/{key}": value for i, entry in state.items() for key, value in entry.items()}
        return self.variables.named() | moments

    def _state(self, tensors: Mapping[str, RawTensor]) -> dict[str, Any]:
        state: dict[int, dict[str, Tensor]] = {}
        for name in tensors:
            first, _, rest = name.partition("/")
            if first == "adam":
                number, _, key = rest.partition("/")
                state.setdefault(int(number), {})[key] = to_torch(tensors[name])
        return {"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]}


def _refuse(layers: Mapping[str, QuantizedLayer], tokens: TokenSet, held_out: TokenSet) -> None:
    seen = {s.tobytes() for s in tokens.sequences}
    if any(s.tobytes() in seen for s in held_out.sequences):
        raise ConfigError(
            "a held-out prompt is also tuned on: early stopping would trust what was fitted; choose other prompts"
        )
    for name, layer in layers.items():
        if layer.transform is not None:
            raise ConfigError(f"layer {name}: has an input transform, which tuning does not go through")
        if layer.trellis is not None:
            raise ConfigError(f"layer {name}: its codes are on a trellis, which tuning cannot move")


def _original(system: LoopedSystem, layer: QuantizedLayer) -> Tensor:
    value = system.model.get_parameter(layer.name).detach().float().cpu()
    return value.T.contiguous() if layer.orientation == "in_out" else value.clone()


def _tensors(layers: Mapping[str, QuantizedLayer]) -> dict[str, Tensor]:
    import torch

    return {name: torch.from_numpy(layer.in_model_orientation()) for name, layer in layers.items()}


def _adam(groups: list[dict[str, Any]]) -> Any:
    import torch

    return torch.optim.Adam(groups, betas=(0.9, 0.99))


class _Teacher:
    """Full precision's outputs, and the divergence of other weights from them."""

    def __init__(self, system: LoopedSystem, depth: int, config: Tune, seed: int) -> None:
        self._seed = seed
        self._system = system
        self._depth = depth
        self._config = config

    def update(
        self, variables: _Variables, tokens: TokenSet, chosen: list[int], optimizer: Any, number: int
    ) -> None:
        """Do one update on the prompts chosen."""
        # Where the state is random every update sees the prompts from other initial states.
        part = dataclasses.replace(tokens, sequences=tuple(tokens.sequences[i] for i in chosen))
        optimizer.zero_grad(set_to_none=True)
        for batch in part.batches(self._config.batch_size, self._seed + 1 + number):
            reference = self._system.rollout(batch, self._depth)
            tensors = self._moved(variables.weights())
            with linked(self._system, tensors), model_code(f"tuning, update {number}"):
                out = unroll(self._system, batch, self._depth, truncate=self._config.truncate)
                loss = self._divergence(reference, out.to(reference.dtype), tokens)
                if not math.isfinite(float(loss.detach())):
                    raise NonFiniteError(
                        f"tuning, update {number}: the loss is {float(loss.detach())}; lower scale_rate and code_rate"
                    )
                (loss * (len(batch.prompts) / len(chosen))).backward()
        optimizer.step()
        variables.clamp()

    def measure(self, weights: Mapping[str, Tensor], tokens: TokenSet) -> float:
        """Mean divergence over prompts."""
        import torch

        total = 0.0
        with torch.no_grad():
            for batch in tokens.batches(self._config.batch_size, self._seed):
                reference = self._system.rollout(batch, self._depth)
                with linked(self._system, self._moved(weights)):
                    out = self._system.rollout(batch, self._depth)
                total += float(self._divergence(reference, out, tokens)) * len(batch.prompts)
        return total / len(tokens.sequences)

    def _divergence(self, reference: Tensor, out: Tensor, tokens: TokenSet) -> Tensor:
        """Divergence where outputs are scored."""
        output = self._system.output
        return divergence(tokens.scored(reference, output), tokens.scored(out, output), output)

    def _moved(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._system.to_device(w, dtype=True) for name, w in weights.items()}
