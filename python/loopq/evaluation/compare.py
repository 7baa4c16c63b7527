"""KL, agreement and bits per byte of quantized weights against full precision, from paired initial states."""

from __future__ import annotations

import contextlib
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.calls import CallSet
from loopq.calibrate.data import TokenSet
from loopq.calibrate.hooks import counted_calls
from loopq.calibrate.overlap import Overlap
from loopq.errors import CheckpointError, ConfigError, NonFiniteError, model_code
from loopq.evaluation.stats import Interval, mean_interval
from loopq.formats.checkpoint import Checkpoint
from loopq.layers.layer import Dequantized
from loopq.models.discovery import first_output
from loopq.models.replace import Replaced, Weights, placed
from loopq.models.trace import first_not_finite
from loopq.settings.execution import Execution, at_most, available_bytes
from loopq.storage.files import RawTensor
from loopq.storage.model_files import is_streamed, model_tensors, passed_over, raw, to_torch
from loopq.storage.names import names_of
from loopq.storage.schema import Object
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import Discovers, TakesCalls
from loopq.systems.declare import parameter_of

if TYPE_CHECKING:
    from torch import Tensor, nn


CountBytes = Callable[[NDArray[np.int64]], int | None]
#: Logits that are scored at once: 32 MiB in float64, of which a few copies are held.
_PIECE = 1 << 22
#: Copies of a piece in float64 at once: two logarithms of probabilities, and what their sums are made of.
_COPIES = 5
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Measurement:
    """Measurements of one set of weights on held-out prompts.

    Parameters
    ----------
    name : str
        Name of the weights.
    kl : float64 ndarray of shape (n_seeds, n_prompts)
        KL(full precision || quantized) in nats, averaged over a prompt's positions. The squared relative l2 error of
        the output where the system returns hidden states.
    agreement : float64 ndarray of shape (n_seeds, n_prompts)
        Share of positions with the same top-1 token. Cosine similarity for hidden states.
    nll : float64 ndarray of shape (n_seeds, n_prompts)
        Negative log-likelihood of the next token in nats. Averaged over the positions that have one.
    answered : float64 ndarray of shape (n_seeds, n_prompts)
        1 where every token of the answer is the top-1 prediction from the tokens before it. Else 0. The answer is the
        tokens after the question of a task's prompt, and the last token of a text.
    bytes_per_token : float or None
        Mean UTF-8 bytes of a predicted token. None where unknown.
    output : {"logits", "hidden"}
        Kind of output of the system's rollout.
    n_bytes : int, optional
        Bytes of all weights, quantized or not, where known.
    by_token : float64 ndarray of shape (3, n_seeds, n_scored), optional
        KL, same top-1 token and negative log-likelihood of every scored position. Only for chunks.
    overlap : Overlap, optional
        Prompts that were used for the calibration of these weights, where known.
    score : float64 ndarray of shape (n_seeds, n_prompts), optional
        The user's own score of each batch.
    steps : float64 ndarray of shape (n_seeds, n_prompts), optional
        Most calls of a layer in the rollout of a prompt, or of the prompts that ran with it. A loop that ends by itself
        may have another number of steps with other weights. Only for systems that discover the loop by a run.
    """

    name: str
    kl: NDArray[np.float64]
    agreement: NDArray[np.float64]
    nll: NDArray[np.float64]
    answered: NDArray[np.float64]
    bytes_per_token: float | None
    output: str
    n_bytes: int | None = None
    by_token: NDArray[np.float64] | None = None
    overlap: Overlap | None = None
    score: NDArray[np.float64] | None = None
    steps: NDArray[np.float64] | None = None

    @property
    def error(self) -> NDArray[np.float64]:
        """Squared error of the output over the square of full precision's: `kl` of outputs that are no logits.

        Raises
        ------
        ConfigError
            The outputs are logits, which are compared by their distributions.
        """
        if self.output == "logits":
            raise ConfigError("error: the model gives logits, which `kl` compares")
        return self.kl

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood per token."""
        return math.exp(float(self.nll.mean()))

    @property
    def bits_per_byte(self) -> float | None:
        """Mean negative log-likelihood in bits per byte of text; None where the bytes are unknown."""
        if self.bytes_per_token is None:
            return None
        return float(self.nll.mean()) / math.log(2.0) / self.bytes_per_token

    def summary(self) -> Object:
        """Plain data: means over all prompts, and over the prompts of each seed."""
        data: Object = {
            "name": self.name,
            "output": self.output,
            "kl": float(self.kl.mean()),
            "agreement": float(self.agreement.mean()),
            "n_seeds": int(self.kl.shape[0]),
            "n_prompts": int(self.kl.shape[1]),
            "kl_by_seed": [float(v) for v in self.kl.mean(axis=1)],
            "agreement_by_seed": [float(v) for v in self.agreement.mean(axis=1)],
        }
        if self.score is not None:
            data["score"] = float(self.score.mean())
        if self.steps is not None:
            data["steps"] = {
                "mean": float(self.steps.mean()),
                "least": int(self.steps.min()),
                "most": int(self.steps.max()),
            }
        if self.output == "hidden":
            # Neither KL nor perplexity exists without logits.
            data |= {"error": float(self.kl.mean()), "worst_error": float(self.kl.max())}
        if self.output == "logits":
            data |= {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        if self.n_bytes is not None:
            data["n_bytes"] = self.n_bytes
        if self.overlap is not None:
            data |= self.overlap.to_json()
        return data | ({} if self.by_token is None else spread(*self.by_token.reshape(3, -1)))

    def kl_interval(self) -> Interval | None:
        """95 % bootstrap interval over prompts of the mean KL; None for fewer than two prompts."""
        per_prompt = self.kl.mean(axis=0)
        return mean_interval(per_prompt) if per_prompt.size > 1 else None


def spread(kl: NDArray[np.float64], same: NDArray[np.float64], nll: NDArray[np.float64]) -> dict[str, Object]:
    """Summarize KL divergences by position as llama.cpp's llama-perplexity does.

    Parameters
    ----------
    kl, same, nll : float64 ndarrays of shape (n_scored)
        KL to full precision, equality of the top-1 tokens, and negative log-likelihood of the next token.

    Returns
    -------
    dict
        "tokens" is the number of positions. The KL has its mean with standard error, its quantiles from 0 to 100 % and
        the 99.9 % quantile (linear between two positions). The share of same top-1 tokens has a standard error too.
        The last entry is perplexity.

    Examples
    --------
    >>> import numpy as np
    >>> spread(np.arange(101.0), np.ones(101), np.ones(101))["tokens"]["quantiles"][99]
    99.0
    """
    n, rest = kl.size, max(kl.size - 1, 1)
    share = float(same.mean())
    return {
        "tokens": {
            "n_scored": n,
            "kl": float(kl.mean()),
            "kl_error": float((kl.var() / rest) ** 0.5),
            "quantiles": np.quantile(kl, np.linspace(0.0, 1.0, 101)).tolist(),
            "kl_99.9": float(np.quantile(kl, 0.999)),
            "same_top": share,
            "same_top_error": (share * (1.0 - share) / rest) ** 0.5,
            "perplexity": math.exp(float(nll.mean())),
        }
    }


def compare(
    system: LoopedSystem,
    variants: Mapping[str, Weights],
    tokens: TokenSet,
    *,
    n_steps: int | None = None,
    seeds: Sequence[int] = (0,),
    count_bytes: CountBytes | None = None,
    execution: Execution | None = None,
) -> list[Measurement]:
    """Measure several sets of weights relative to full precision, on the same prompts and initial states.

    Parameters
    ----------
    system : LoopedSystem
        Adapter of the full-precision model.
    variants : mapping of str to weights
        Differing parameters by the variant's name, oriented as the model stores them (`models.replace.placed`).
    tokens : TokenSet
        Held-out prompts with at least two tokens each from the first scored position. Hidden states are compared at
        all positions.
    n_steps : int, optional
        Depth; the system's default when absent.
    seeds : sequence of int
        Seeds of the initial states. A prompt starts from the same state in every variant.
    count_bytes : callable, optional
        UTF-8 bytes of token ids (`LoadedModel.count_bytes`). Bits per byte needs it.
    execution : Execution, optional
        Prompts per batch, and progress by the prompt. Its seed is not used.

    Returns
    -------
    list of Measurement
        Full precision first. The variants follow in order.

    Raises
    ------
    ConfigError
        A prompt has fewer than two scored tokens, so no token to predict.
    """
    first = tokens.scored_from
    if not isinstance(tokens, CallSet) and min(s.size for s in tokens.sequences) < first + 2:
        after = f" after {first}" * (first > 0)
        raise ConfigError(f"every evaluation prompt needs at least two tokens{after}")
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    measured = _Scores(system, tokens, depth, {name: _Kept() for name in ("full precision", *variants)})
    measured.run(variants, seeds, execution or Execution())
    width = None if isinstance(tokens, CallSet) else _bytes_per_token(tokens, count_bytes)
    return [kept.measurement(name, width, system.output) for name, kept in measured.kept.items()]


@dataclass
class _Kept:
    """Scores of one set of weights: blocks (4, n_prompts) by seed, and those by position.

    `own` has the user's score and the steps of each batch.
    """

    scores: list[list[NDArray[np.float64]]] = field(default_factory=list)
    each: list[NDArray[np.float64]] = field(default_factory=list)
    own: list[list[NDArray[np.float64]]] = field(default_factory=list)

    def measurement(self, name: str, width: float | None, output: str) -> Measurement:
        """Join the blocks."""
        kl, agreement, nll, answered = np.stack([np.concatenate(row, axis=1) for row in self.scores], axis=1)
        score, steps = np.stack([np.concatenate(row, axis=1) for row in self.own], axis=1)
        by_token = np.concatenate(self.each, axis=1).reshape(3, len(self.scores), -1) if self.each else None
        known = {"score": score, "steps": steps}
        more = {key: values for key, values in known.items() if not np.isnan(values).all()}
        return Measurement(name, kl, agreement, nll, answered, width, output, by_token=by_token, **more)


@dataclass
class _Scores:
    """Scores of full precision and every variant."""

    system: LoopedSystem
    tokens: TokenSet
    depth: int
    kept: dict[str, _Kept]

    def run(self, variants: Mapping[str, Weights], seeds: Sequence[int], execution: Execution) -> None:
        """Run all prompts with every set of weights, batch by batch."""
        tokens, system, progress = self.tokens, self.system, execution.progress
        held = {"full precision": None} | {n: placed(system, weights) for n, weights in variants.items()}
        # Chunks have equal length, and the per-position values are small next to the logits.
        chunks = tokens.packing == "chunks" and system.output == "logits"
        progress.start("evaluate", len(seeds) * len(tokens.sequences), "prompts")
        for seed in seeds:
            for kept in self.kept.values():
                kept.scores.append([])
                kept.own.append([])
            for batch in tokens.batches(execution.batch_size, seed):
                reference, own = self._output(system, batch)
                _refuse_nan(system, reference, batch, self.depth)
                if batch.prompts[0] == 0 and seed == seeds[0]:
                    progress.note(at_most(_more_bytes(system, reference, variants)))
                for name, weights in held.items():
                    out, own = (reference, own) if weights is None else self._other(weights, batch)
                    kept = self.kept[name]
                    scores, values = _score(system, reference, out, batch, tokens.scored_from, chunks)
                    del out
                    kept.scores[-1].append(scores)
                    kept.own[-1].append(np.repeat(np.array(own)[:, None], len(batch.prompts), axis=1))
                    kept.each += [values] if chunks else []
                progress.advance(len(batch.prompts))
        progress.stop()

    def _other(self, weights: Weights, batch: Batch) -> tuple[Tensor, tuple[float, float]]:
        with Replaced(self.system, weights) as other:
            return self._output(other, batch)

    def _output(self, system: LoopedSystem, batch: Batch) -> tuple[Tensor, tuple[float, float]]:
        """Logits of the rollout, or its hidden states in float64; the user's score and the steps."""
        score = steps = math.nan
        scored = self.tokens.score if isinstance(self.tokens, CallSet) else None
        with model_code(f"rollout of {batch.name}"), contextlib.ExitStack() as stack:
            discovers = isinstance(system, Discovers)
            calls = stack.enter_context(counted_calls(system, self.depth)) if discovers else {}
            if batch.call is not None and isinstance(system, TakesCalls):
                answer = system.answer(batch, self.depth)
                out = first_output(system.model, answer)
            else:
                out = system.rollout(batch, self.depth)
        if scored is not None and batch.call is not None:
            with model_code(f"score of {batch.name}", ConfigError, "the function"):
                score = float(scored(answer, batch.call.given))
            if not math.isfinite(score):
                raise ConfigError(
                    f"score of {batch.name}: the function gives {score}; a score is a finite number"
                )
        if calls:
            steps = float(max(calls.values()))
        return out if system.output == "logits" else out.double(), (score, steps)


def _refuse_nan(system: LoopedSystem, reference: Tensor, batch: Batch, depth: int) -> None:
    """Refuse a reference with NaN, to which nothing can be compared. Sums need no copy of the logits."""
    import torch  # lazy: loopq imports without torch

    wrong = reference.flatten(1).sum(1, dtype=torch.float32).isnan()
    if bool(wrong.any()):
        prompt = batch.prompts[int(wrong.nonzero()[0, 0])]
        where = first_not_finite(system.model, lambda: system.rollout(batch, depth))
        raise NonFiniteError(
            f"full precision, {type(system.model).__name__}, {batch.unit} {prompt}: the output holds NaN; the first "
            f"value that is not finite: {where}"
        )


def _more_bytes(system: LoopedSystem, reference: Tensor, variants: Mapping[str, Weights]) -> int:
    """Bytes of a comparison after the first rollout.

    These are the weights and the logits of one variant, and the copies of a piece of them.
    """
    weights = max(
        (4 * sum(parameter_of(system.model, name).numel() for name in v) for v in variants.values()),
        default=0,
    )
    logits = reference.numel() * reference.element_size()
    return int(weights + logits + _COPIES * 8 * min(_PIECE, reference.numel()))


def _bytes_per_token(tokens: TokenSet, count_bytes: CountBytes | None) -> float | None:
    """Mean bytes of the predicted tokens, from the bytes of all tokens and of those before them."""
    first, n_bytes = tokens.scored_from, 0
    for ids in tokens.sequences:
        whole, given = (None if count_bytes is None else count_bytes(x) for x in (ids, ids[: first + 1]))
        if whole is None or given is None:
            return None
        n_bytes += whole - given
    return n_bytes / sum(ids.size - first - 1 for ids in tokens.sequences)


def _score(
    system: LoopedSystem, reference: Tensor, out: Tensor, batch: Batch, first: int, chunks: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return KL, agreement, negative log-likelihood and right answers as (4, n_prompts).

    Also returns the first three by position, shape (3, n). Chunks leave out the position without a next token.
    """
    import torch

    if system.output == "hidden":
        return _score_hidden(reference, out), np.zeros((3, 0))
    targets = system.to_device(batch.input_ids)[:, 1:]
    if chunks:
        same = out is reference
        reference = reference[:, :-1]
        out = reference if same else out[:, :-1]
    scores = [
        _tokens(reference[:, part], out[:, part], targets[:, part], same=out is reference)
        for part in _pieces(reference.shape, first)
    ]
    kl, same, nll, right = (torch.cat(values, 1) for values in zip(*scores, strict=True))
    answered = (right if first else right[:, -1:]).all(-1)
    means = (kl.mean(-1), same.double().mean(-1), nll.mean(-1), answered.double())
    each = (kl, same.double(), nll) if chunks else ()
    return (
        np.stack([v.cpu().numpy() for v in means]),
        np.stack([v.flatten().cpu().numpy() for v in each]) if each else np.zeros((3, 0)),
    )


def _pieces(shape: Sequence[int], first: int) -> list[slice]:
    """Positions from the first scored one, in slices that limit the memory of the float64 copies."""
    size = max(1, _PIECE // (shape[0] * shape[2]))
    return [slice(start, min(start + size, shape[1])) for start in range(first, shape[1], size)]


def _tokens(
    reference: Tensor, out: Tensor, targets: Tensor, *, same: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare the tokens of a batch: KL and equality of the choice, each of shape (n_prompts, n).

    Tokens with a next one also get its negative log-likelihood and whether it is chosen. `targets` holds the next
    tokens, one fewer at the end of a prompt.
    """
    a = reference.double().log_softmax(-1)
    b = a if same else out.double().log_softmax(-1)
    kl = (a.exp() * (a - b)).sum(-1)
    best = b.argmax(-1)
    n = targets.shape[1]
    nll = -b[:, :n].gather(-1, targets[..., None]).squeeze(-1)
    return kl, a.argmax(-1) == best, nll, best[:, :n] == targets


def _score_hidden(reference: Tensor, out: Tensor) -> NDArray[np.float64]:
    a, b = reference.flatten(1), out.flatten(1)
    error = (a - b).square().sum(1) / a.square().sum(1)
    cosine = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
    unknown = error * float("nan")
    return np.stack([v.cpu().numpy() for v in (error, cosine, unknown, unknown)])


def overlap(
    name: str, checkpoint: Checkpoint, system: LoopedSystem, tokens: TokenSet, execution: Execution
) -> Overlap | None:
    """Return the prompts that a checkpoint was calibrated on, and warn of them.

    Raises
    ------
    CheckpointError
        The checkpoint is of another system.
    """
    stored = checkpoint.settings["system"]
    # Files of other tools lack this entry. Their names and shapes are compared with the model's.
    if stored not in (None, system.name):
        raise CheckpointError(f"{name}: a checkpoint of system {stored!r}; the model is {system.name!r}")
    seen = tokens.overlap(checkpoint.settings.get("calibration"))
    if seen is not None and seen.warning:
        execution.progress.warn(f"{name}: {seen.warning}")
    return seen


def content(system: LoopedSystem, checkpoint: Checkpoint, n_checkpoints: int = 1) -> Weights:
    """Weights of the quantized layers, and other tensors that differ from the model's.

    Each use dequantizes one layer if those of so many checkpoints exceed half of the free memory.
    """
    held = isinstance(checkpoint.layers, dict) and not is_streamed(system.model)
    room = (available_bytes() or math.inf) / 2
    size = sum(layer.codes.size for layer in checkpoint.layers.values()) if held else 0
    large = not held or 4 * n_checkpoints * size > room
    each = Dequantized(checkpoint.layers)
    layers: Weights = each if large else dict(each)
    others = _changed(system.model, checkpoint)
    # A chain looks up only, so read-only mappings do.
    return ChainMap(layers, others) if others else layers  # type: ignore[arg-type]


def _changed(model: nn.Module, checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """Tensors of a checkpoint besides its layers that differ from the model's, by the model's names, in float32.

    loopq leaves them alone. Other tools fold scales into norms, and their FP8 or FP4 weights are read as plain numbers.

    Raises
    ------
    CheckpointError
        If the model has no place for a matrix.
    """
    parameters, stored = dict(model.named_parameters(remove_duplicate=False)), model_tensors(model)[0]
    floats = {name: t for name, t in checkpoint.dense.items() if t.dtype in _FLOATS}
    if all(name in stored and _equal(t, stored[name]) for name, t in floats.items()):
        return {}
    changed = {}
    for name, tensor in names_of(model).taken(model, checkpoint.dense, to_torch, raw).items():
        parameter = parameters.get(name)
        known = name in model.state_dict(keep_vars=True) or passed_over(model, [name])
        if parameter is None and len(tensor.shape) > 1 and not known:
            raise CheckpointError(
                f"tensor {name!r}: the model has none of this name; give the model of this file"
            )
        if parameter is None or tensor.dtype not in _FLOATS:
            continue
        values = to_torch(tensor)
        if tuple(values.shape) != tuple(parameter.shape) or not values.to(parameter).equal(parameter):
            changed[name] = tensor.float32()
    return changed


def _equal(one: RawTensor, other: RawTensor) -> bool:
    same = one.shape == other.shape
    return same and other.dtype in _FLOATS and np.array_equal(one.float32(), other.float32())
