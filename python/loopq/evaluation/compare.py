"""KL, agreement and bits per byte of quantized weights against full precision, from paired initial states."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.calibrate.overlap import Overlap
from loopq.errors import CheckpointError, ConfigError, NonFiniteError, model_code
from loopq.evaluation.stats import Interval, mean_interval
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.record import config_of
from loopq.layers.layer import Dequantized
from loopq.layers.loop_spec import LOOP
from loopq.models.replace import Replaced, Weights, placed
from loopq.models.trace import first_not_finite
from loopq.settings.execution import Execution, at_most, available_bytes
from loopq.storage.files import RawTensor
from loopq.storage.model_files import is_streamed, model_tensors, passed_over, raw, to_torch
from loopq.storage.names import names_of
from loopq.storage.schema import Object
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.declare import parameter_of
from loopq.terminal.table import some

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
    if min(s.size for s in tokens.sequences) < first + 2:
        after = f" after {first}" * (first > 0)
        raise ConfigError(f"every evaluation prompt needs at least two tokens{after}")
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    scores, each = _scores(system, variants, tokens, depth, seeds, execution or Execution())
    width = _bytes_per_token(tokens, count_bytes)
    return [
        Measurement(
            name, kl, agreement, nll, answered, width, system.output, None, _joined(each[name], len(seeds))
        )
        for name, (kl, agreement, nll, answered) in scores.items()
    ]


def _scores(
    system: LoopedSystem,
    variants: Mapping[str, Weights],
    tokens: TokenSet,
    depth: int,
    seeds: Sequence[int],
    execution: Execution,
) -> tuple[dict[str, NDArray[np.float64]], dict[str, list[NDArray[np.float64]]]]:
    """Scores (4, n_seeds, n_prompts) of full precision and every variant, and those by position."""
    first, progress = tokens.scored_from, execution.progress
    held = {"full precision": None} | {name: placed(system, weights) for name, weights in variants.items()}
    scores = {name: np.zeros((4, len(seeds), len(tokens.sequences))) for name in held}
    # Chunks have equal length, and the per-position values are small next to the logits.
    each: dict[str, list[NDArray[np.float64]]] = {name: [] for name in held}
    chunks = tokens.packing == "chunks" and system.output == "logits"
    progress.start("evaluate", len(seeds) * len(tokens.sequences), "prompts")
    for row, seed in enumerate(seeds):
        for batch in tokens.batches(execution.batch_size, seed):
            reference = _output(system, batch, depth)
            _refuse_nan(system, reference, batch, depth)
            if batch.prompts[0] == 0 and row == 0:
                progress.note(at_most(_more_bytes(system, reference, variants)))
            columns = list(batch.prompts)
            for name, weights in held.items():
                out = _of(system, weights, reference, batch, depth)
                scores[name][:, row, columns], values = _score(system, reference, out, batch, first, chunks)
                del out
                each[name] += [values] if chunks else []
            progress.advance(len(columns))
    progress.stop()
    return scores, each


def _refuse_nan(system: LoopedSystem, reference: Tensor, batch: Batch, depth: int) -> None:
    """Refuse a reference with NaN, to which nothing can be compared. Sums need no copy of the logits."""
    import torch  # lazy: loopq imports without torch

    wrong = reference.flatten(1).sum(1, dtype=torch.float32).isnan()
    if bool(wrong.any()):
        prompt = batch.prompts[int(wrong.nonzero()[0, 0])]
        where = first_not_finite(system.model, lambda: system.rollout(batch, depth))
        raise NonFiniteError(
            f"full precision, {type(system.model).__name__}, prompt {prompt}: the output holds NaN; the first value "
            f"that is not finite: {where}"
        )


def _joined(each: Sequence[NDArray[np.float64]], n_seeds: int) -> NDArray[np.float64] | None:
    return np.concatenate(each, axis=1).reshape(3, n_seeds, -1) if each else None


def _of(system: LoopedSystem, weights: Weights | None, reference: Tensor, batch: Batch, depth: int) -> Tensor:
    """Output with the weights of a variant. Without any it is the reference."""
    if weights is None:
        return reference
    with Replaced(system, weights) as other:
        return _output(other, batch, depth)


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


def _output(system: LoopedSystem, batch: Batch, n_steps: int) -> Tensor:
    """Logits of the rollout, or its hidden states in float64."""
    with model_code(f"rollout of prompt {batch.prompts[0]}"):
        out = system.rollout(batch, n_steps)
        return out if system.output == "logits" else out.double()


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


def check_same(name: str, checkpoint: Checkpoint, system: LoopedSystem, execution: Execution) -> None:
    """Compare the loop and the tensors of a checkpoint of loopq with the model's. Those of other tools pass.

    Raises
    ------
    CheckpointError
        The checkpoint is of another loop, or lacks tensors of the model.
    """
    if checkpoint.settings["system"] is None:
        return
    model: Any = system.model
    loop, mine = (
        config_of(checkpoint.side_files).get(LOOP),
        getattr(getattr(model, "config", None), LOOP, None),
    )
    if loop is not None and mine is not None and list(loop) != list(mine):
        made, here = ("[{}:{}]x{}".format(*spec) for spec in (loop, mine))
        if list(loop)[:2] != list(mine)[:2]:
            raise CheckpointError(f"{name}: made for the loop {made}; the model has another loop, {here}")
        execution.progress.warn(f"{name}: made for the loop {made}, and measured in the model's, {here}")
    names, own = names_of(model), model_tensors(model)[0]
    have = {*checkpoint.layers, *checkpoint.dense, *checkpoint.ties}
    state = model.state_dict(keep_vars=True)
    lacking = [n for n in state if names.in_file(n) in own and not have & {n, names.in_file(n)}]
    if lacking:
        raise CheckpointError(
            f"{name}: the checkpoint lacks {some([*map(names.in_file, lacking)], 5)} of the model; copy it again, or "
            "name the model that it was made from"
        )


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
