"""Tokens per second of `loopq run` on a GPU: bfloat16 and int4, launched one by one and as one CUDA graph.

The model has R-Llama's size in transformers' Llama, with random weights rounded to nearest: speed does not depend on
what codes are. All ways continue the same text.
"""

from __future__ import annotations

import copy
import time
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benches.gpu import phases
from benches.kernels.sections import Keep, Rows
from loopq.quantizers import Problem
from loopq.quantizers.grid import GridSettings
from loopq.quantizers.rtn import RTN
from loopq.runtime import graph
from loopq.runtime.generate import Decoder, Generation
from loopq.runtime.linear import QuantLinear
from loopq.systems import find_system

#: 4 layers, a core of 8 that runs four times, 4 layers.
SIZE: dict[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000, "looped_layers": [4, 12, 4]}  # fmt: skip
TINY: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64, "looped_layers": [1, 2, 3]}  # fmt: skip
WAYS = ("bfloat16", "bfloat16, graph", "int4", "int4, graph")
N_PROMPT = 64


def section(seconds: float, dry: bool, keep: Keep) -> None:
    """Time each way in turn, again and again, and keep the best speed of each."""
    began = time.monotonic()
    device, size = ("cpu", TINY) if dry else ("cuda", SIZE)
    model = phases.made(phases.Run(rllama, device, {}, 0), device, dry)
    record: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "no_graph": {}}
    recorders = {device: _again} if dry else graph.RECORDERS
    coded = into_codes(model).to(device)
    decoders: dict[str, Decoder] = {}
    for way in WAYS:
        system = find_system(coded if way.startswith("int4") else model)
        chosen = recorders if way.endswith("graph") else {}
        with patch.dict(graph.RECORDERS, chosen, clear=True):
            decoders[way] = Decoder(system, system.n_steps, Generation(n_tokens=128))
        if chosen:
            record["no_graph"][way] = decoders[way].declined.get("graph", "")
    keep(record)
    prompt = [3 + i % (size["vocab_size"] - 3) for i in range(N_PROMPT)]
    speeds: dict[str, float] = dict.fromkeys(WAYS, 0.0)
    for _ in range(1 if dry else 5):
        for way, decoder in decoders.items():
            speeds[way] = max(speeds[way], speed(decoder, prompt, 3 if dry else 64))
        record["tokens_per_s"] = speeds
        keep(record)
        if time.monotonic() - began > 0.7 * seconds:
            break


def rllama(dry: bool) -> nn.Module:
    """R-Llama's size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(TINY if dry else SIZE)))


def into_codes(model: nn.Module) -> nn.Module:
    """A copy with int4 codes in the place of its layers' weights, in groups of 128, or of 32 in narrow layers."""
    coded = copy.deepcopy(model).cpu()
    system = find_system(coded)
    for shared in system.shared_parameters(system.n_steps):
        name = shared.name.removesuffix(".weight")
        weight = coded.get_submodule(name).weight.detach().float().numpy()
        group = 128 if weight.shape[1] >= 128 else 32
        layer = RTN("max").quantize(Problem(shared.name, weight, None, GridSettings(4, group)))
        parent, _, child = name.rpartition(".")
        setattr(coded.get_submodule(parent), child, QuantLinear.from_layer(layer).bfloat16())
    return coded


def speed(decoder: Decoder, prompt: list[int], n_tokens: int) -> float:
    """Tokens per second after a prompt and the token that is recorded."""
    decoder.restart()
    ids = list(prompt)
    for n in range(n_tokens + 2):
        if n == 2:
            start = time.perf_counter()
        ids.append(int(decoder(ids).numpy().argmax()))
    return n_tokens / (time.perf_counter() - start)


def _again(step: graph.Step, undo: Any) -> tuple[Any, torch.Tensor]:
    """A dry run's recorder: calls the step itself."""
    logits = step().clone()
    undo()
    return lambda: logits.copy_(step()), logits


def rows(data: dict[str, Any]) -> Rows:
    """Lines of the record's table: a way each."""
    speeds = data.get("tokens_per_s", {})
    lines: Rows = [
        (f"a step of {way} as one CUDA graph", why or "recorded", "NOT MET" if why else "met")
        for way, why in data["no_graph"].items()
    ]
    lines += [
        (
            f"tokens/s, {way}",
            f"{speeds[way]:.1f}, {speeds[way] / speeds['bfloat16']:.2f} of bfloat16's",
            "reported",
        )
        for way in WAYS
        if speeds.get("bfloat16")
    ]
    return lines
