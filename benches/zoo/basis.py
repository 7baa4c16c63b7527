"""A model in another basis: the same function with other weights, so that no trace of an old rounding is left in them.

`turned` rotates pairs of channels of the residual stream, of the values in each head, and of each head's queries and
keys where the position embedding rotates them too. Norms and the channels inside a block get other scales. All of it
cancels, up to one thing: the output's norm stands between the stream and the embedding's table, so that two channels
must share one weight there. Neighbours in the order of these weights become pairs and get their mean. Channels with no
near neighbour keep their direction and get other scales alone.

Every machine computes the same bits. It uses sums and products of two float64 numbers in a fixed order, square roots
and raw bits of Philox. Sines are rational numbers. Weights are rounded to bfloat16 once, at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SEED = 65
#: Tangents of half the angle, for 20 to 45 degrees.
TANGENTS = (0.17633, 0.41421)
#: Channels inside a block are multiplied by numbers between these.
SCALES = (0.7, 1.4)
#: Two channels are a pair if the larger of their output weights is at most this times the smaller.
NEAR = 1.05
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "model.norm.weight"
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
WRITERS = ("self_attn.o_proj", "mlp.down_proj")


class Rotation(NamedTuple):
    """Rotations of pairs of channels: places (pairs,) of the first and second, and (pairs,) cosines and sines."""

    first: Tensor
    second: Tensor
    cosine: Tensor
    sine: Tensor

    def of(self, values: Tensor, dim: int) -> Tensor:
        """Rotate the entries of a dimension."""
        shape = [1] * values.dim()
        shape[dim] = -1
        c, s = self.cosine.view(shape), self.sine.view(shape)
        a, b = (values.index_select(dim, places) for places in (self.first, self.second))
        return values.index_copy(dim, self.first, c * a - s * b).index_copy(dim, self.second, s * a + c * b)

    def mixed(self, weights: Tensor) -> Tensor:
        """Root mean squares of a norm's weights (channels,), as the rotation mixes their channels."""
        squares, c, s = weights * weights, self.cosine * self.cosine, self.sine * self.sine
        a, b = squares[self.first], squares[self.second]
        rotated = squares.index_copy(0, self.first, c * a + s * b).index_copy(0, self.second, s * a + c * b)
        return rotated.sqrt()


class Draws:
    """Random numbers of one model, in the order in which they are drawn."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.Philox(key=seed)

    def between(self, low: float, high: float, count: int) -> Tensor:
        """Float64 numbers (count,)."""
        raw = (self.bits.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(raw * (high - low) + low)

    def rotation(self, first: Tensor, second: Tensor) -> Rotation:
        """Angles of 20 to 45 degrees to either side."""
        t = self.between(*TANGENTS, len(first)) * self.between(-1, 1, len(first)).sign()
        square = t * t
        return Rotation(first, second, (1 - square) / (1 + square), 2 * t / (1 + square))

    def order(self, count: int) -> Tensor:
        """A permutation (count,)."""
        return torch.from_numpy(np.argsort(self.bits.random_raw(count), kind="stable"))


def pairs(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Places (pairs,) of channels that are neighbours in the order of their weights, and near; others have no pair."""
    order = torch.argsort(weights, stable=True).tolist()
    near_pairs, at = [], 0
    while at + 1 < len(order):
        low, high = float(weights[order[at]]), float(weights[order[at + 1]])
        near = low * high > 0 and max(low / high, high / low) <= NEAR
        if near:
            near_pairs.append(order[at : at + 2])
        at += 1 + near
    return torch.tensor([a for a, _ in near_pairs]), torch.tensor([b for _, b in near_pairs])


def _halves(heads: int, size: int) -> tuple[Tensor, Tensor]:
    """Places of all pairs that the position embedding rotates: channel i of a head and i + size / 2."""
    first = (torch.arange(heads)[:, None] * size + torch.arange(size // 2)).flatten()
    return first, first + size // 2


def _each(rotation: Rotation, of: list[int], size: int) -> Rotation:
    """Rotations of heads (heads * pairs,) repeated for `of`, a list of heads."""
    shift = torch.arange(len(of))[:, None] * size
    first, second = (
        (p.view(-1, p.numel() // (max(of) + 1))[of] % size + shift).flatten() for p in rotation[:2]
    )
    return Rotation(first, second, *(v.view(max(of) + 1, -1)[of].flatten() for v in rotation[2:]))


def turned(weights: dict[str, Tensor], config: dict[str, Any], seed: int = SEED) -> dict[str, Tensor]:
    """Return a Llama's weights in another basis, in bfloat16.

    Parameters
    ----------
    weights
        Tensors by name, of bfloat16 or float64; embedding and output are one table.
    config
        Of transformers, with the numbers of layers, heads and key-value heads.
    seed
        Of the angles and scales.
    """
    draws = Draws(seed)
    tensors = {name: values.double() for name, values in weights.items()}
    stream = draws.rotation(*pairs(tensors[OUTPUT]))
    tensors[EMBEDDING] = stream.of(tensors[EMBEDDING], 1)
    mean = (tensors[OUTPUT][stream.first] + tensors[OUTPUT][stream.second]) / 2
    tensors[OUTPUT] = tensors[OUTPUT].index_copy(0, stream.first, mean).index_copy(0, stream.second, mean)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm, readers in READERS.items():
            _turn_readers(tensors, prefix + norm, [prefix + name for name in readers], stream, draws)
        for writer in WRITERS:
            tensors[f"{prefix}{writer}.weight"] = stream.of(tensors[f"{prefix}{writer}.weight"], 0)
        _turn_inside(tensors, prefix, config, draws)
    return {name: values.to(torch.bfloat16).contiguous() for name, values in tensors.items()}


def _turn_readers(
    tensors: dict[str, Tensor], norm: str, readers: list[str], stream: Rotation, draws: Draws
) -> None:
    old = tensors[f"{norm}.weight"]
    # A channel without a pair gets another scale, which takes its column off the old levels.
    scales = draws.between(*SCALES, len(old))
    scales[stream.first] = scales[stream.second] = 1.0
    # Rounded before the columns are divided by it, which loses no bit.
    new = (stream.mixed(old) * scales).to(torch.bfloat16).double()
    for name in readers:
        tensors[f"{name}.weight"] = stream.of(tensors[f"{name}.weight"] * old, 1) / new
    tensors[f"{norm}.weight"] = new


def _turn_inside(tensors: dict[str, Tensor], prefix: str, config: dict[str, Any], draws: Draws) -> None:
    q, k, v, o, up, down = (
        f"{prefix}{name}.weight"
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            WRITERS[0],
            "mlp.up_proj",
            WRITERS[1],
        )
    )
    heads, served = config["num_attention_heads"], config["num_key_value_heads"]
    size = len(tensors[k]) // served
    # The heads of a group share the keys and values of one.
    of = [head * served // heads for head in range(heads)]
    angles = draws.rotation(*_halves(served, size))
    scales = (
        draws.between(*SCALES, served * size // 2).view(served, 1, -1).expand(-1, 2, -1).reshape(served, size)
    )
    tensors[k] = angles.of(tensors[k], 0) * scales.flatten()[:, None]
    tensors[q] = _each(angles, of, size).of(tensors[q], 0) / scales[of].flatten()[:, None]
    order = torch.cat([draws.order(size) + head * size for head in range(served)]).view(served, 2, -1)
    values = draws.rotation(order[:, 0].flatten(), order[:, 1].flatten())
    tensors[v] = values.of(tensors[v], 0)
    tensors[o] = _each(values, of, size).of(tensors[o], 1)
    inner = draws.between(*SCALES, len(tensors[up]))
    tensors[up] = tensors[up] * inner[:, None]
    tensors[down] = tensors[down] / inner
