"""Inkling-2: experts are stacked in its files, in full precision or in NVFP4 with a factor for each expert.

transformers dequantizes the stacks at loading (`Inkling2LoopDequantizeExperts`). A stack in NVFP4 has the packed codes
and scales of compressed-tensors; the factor is `amax / outer_scale_denominator`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from loopq.errors import CheckpointError
from loopq.formats.layouts import LAYOUTS, FileLayout
from loopq.storage.files import RawTensor

#: Stacks, and the parts of an expert whose rows alternate in each.
_STACKS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
#: What a part of an expert has, and the end of the stack's name.
_KINDS = {"weight": "", "weight_packed": "", "weight_scale": "_scale"}
_AMAX, _DENOMINATOR, _GLOBAL = "_amax", "_outer_scale_denominator", "weight_global_scale"
#: An expert in full precision, and one in NVFP4: what a stack holds.
_WHOLE = ({"weight"}, {"weight_packed", "weight_scale", _GLOBAL})
#: Largest level times largest scale: any number would do.
_LARGEST = np.float32(6 * 448)
#: transformers' loader lets the quantizer unpack the head before it cuts off the padded rows, and fails on a dense one.
#: It leaves a dense weight as it is if the scheme for "experts" has floats of 8 bits. This one is of no module.
_GROUPS = {
    "dense_head": {
        "targets": [r"re:no module: stacked experts$"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
        "format": "float-quantized",
    }
}
_RENAMED = (
    (r"controllers\.attn\.", "q_message_gate."),
    (r"controllers\.([kv]|mlp)\.", r"\1_message_gate."),
    (r"\.attn\.", ".self_attn."),
    (r"self_attn\.w([qkv])_d[uv]$", r"self_attn.\1_proj.linear"),
    (r"self_attn\.wo_ud$", "self_attn.o_proj.linear"),
    (r"self_attn\.gate_attn$", "self_attn.o_proj.gate_proj"),
    (r"self_attn\.wr_du$", "self_attn.relative_position_bias.linear"),
)


def stacked(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """Stack the experts of each layer. Those of a layer with several kinds of codes stay apart.

    Raises
    ------
    CheckpointError
        Gate and up of an expert have different powers of NVFP4.
    """
    joined = dict(tensors)
    numbers: dict[str, set[str]] = {}
    for name in tensors:
        expert = re.match(r"(.*\.experts\.)(\d+)\.", name)
        if expert:
            numbers.setdefault(expert[1], set()).add(expert[2])
    for stem, known in numbers.items():
        for whole, parts in _STACKS.items():
            rows = [[f"{stem}{e}.{part}." for part in parts] for e in range(len(known))]
            parts_have = [{k for k in (*_KINDS, _GLOBAL) if f"{n}{k}" in joined} for row in rows for n in row]
            if parts_have[0] not in _WHOLE or any(kinds != parts_have[0] for kinds in parts_have):
                continue
            for kind in parts_have[0] & _KINDS.keys():
                stack = [[joined.pop(f"{name}{kind}") for name in row] for row in rows]
                joined[f"{stem}{whole}{_KINDS[kind]}"] = _stack(stack)
            if _GLOBAL in parts_have[0]:
                factors = [_factor(row, joined) for row in rows]
                joined[f"{stem}{whole}{_AMAX}"] = RawTensor.of(np.array(factors, np.float32) * _LARGEST)
                joined[f"{stem}{whole}{_DENOMINATOR}"] = RawTensor.of(np.array(_LARGEST))
    return joined


def _factor(row: Sequence[str], tensors: dict[str, RawTensor]) -> float:
    divisors = {float(tensors.pop(f"{name}{_GLOBAL}").array()[0]) for name in row}
    if len(divisors) > 1:
        raise CheckpointError(
            f"layers {', '.join(f'{name}weight' for name in row)}: NVFP4 with different powers, and an expert has one "
            "in the files of Inkling-2; leave the experts dense (--exclude), or keep loopq's own format"
        )
    return 1 / divisors.pop()


def _stack(rows: Sequence[Sequence[RawTensor]]) -> RawTensor:
    first, n = rows[0][0], len(rows[0])
    height, *rest = first.shape
    experts = [np.stack([t.data.reshape(height, -1) for t in row], 1) for row in rows]
    return RawTensor(first.dtype, (len(rows), n * height, *rest), np.stack(experts).reshape(-1))


def unstacked(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """Undo `stacked`.

    Raises
    ------
    CheckpointError
        A stack has another shape than its experts give it.
    """
    apart = dict(tensors)
    for name in tensors:
        stack = re.match(rf"(.*\.experts\.)({'|'.join(_STACKS)})$", name)
        if not stack:
            continue
        stem, parts = stack[1], _STACKS[stack[2]]
        amax = apart.pop(f"{name}{_AMAX}", None)
        kinds = {"": "weight"} if amax is None else {"": "weight_packed", "_scale": "weight_scale"}
        for end, kind in kinds.items():
            for place, tensor in _apart(apart.pop(f"{name}{end}", None), f"{name}{end}", parts).items():
                apart[f"{stem}{place}.{kind}"] = tensor
        if amax is not None:
            denominator = apart.pop(f"{name}{_DENOMINATOR}", amax)
            if (amax.dtype, denominator.dtype, denominator.data.size) != ("F32", "F32", 4):
                raise CheckpointError(
                    f"tensor {name!r}: {_AMAX} and {_DENOMINATOR} are no float32 numbers of it"
                )
            for e, most in enumerate(amax.array().reshape(-1)):
                divisor = denominator.array().reshape(-1) / (most or np.float32(np.nan))
                apart |= {f"{stem}{e}.{part}.{_GLOBAL}": RawTensor.of(divisor) for part in parts}
    return apart


def _apart(stack: RawTensor | None, name: str, parts: Sequence[str]) -> dict[str, RawTensor]:
    if stack is None or len(stack.shape) != 3 or not all(stack.shape) or stack.shape[1] % len(parts):
        what = "missing" if stack is None else f"of shape {list(stack.shape)}"
        raise CheckpointError(f"tensor {name!r}: {what}; expected experts by {len(parts)} * rows by columns")
    n, height, width = stack.shape
    rows = stack.data.reshape(n, height // len(parts), len(parts), -1)
    shape = (height // len(parts), width)
    return {
        f"{e}.{part}": RawTensor(stack.dtype, shape, np.ascontiguousarray(rows[e, :, i]).reshape(-1))
        for e in range(n)
        for i, part in enumerate(parts)
    }


for kind, inside in {"inkling2_loop_text": "model.", "inkling2_loop": "model.language_model."}.items():
    LAYOUTS.register(kind)(
        FileLayout(((r"^model\.llm\.", inside), *_RENAMED), {}, _GROUPS, stacked, unstacked)
    )
