"""Seconds and memory of a quantization by phase, at full shape with random weights, on the device and the processor.

The models are Ouro-1.4B's shape in the zoo's class, and SmolLM2-135M's shape looped, in transformers' Llama. They are
rounded by the default settings; where a stage does not end in time, the record says how much of it was done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from benches.kernels.sections import Keep, Section

Stage = dict[str, Any]
#: Seconds between two polls of the record during a stage.
KEEP_EVERY = 5.0


class Late(BaseException):
    """The time of a run is over."""


@dataclass
class Clock:
    """Progress that notes the seconds and the device's peak memory of every stage, and stops what takes too long."""

    deadline: float
    on_gpu: bool
    keep: Callable[[], None]
    stages: dict[str, Stage] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin a stage."""
        self._sync()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._now = self.stages.setdefault(
            label, {"seconds": 0.0, "done": 0, "of": 0, "unit": unit, "peak_gib": 0.0}
        )
        self._now["of"] += total
        self._began = self._kept = time.monotonic()
        self.keep()

    def advance(self, n: int = 1) -> None:
        """Count; end the run where its time is over."""
        self._now["done"] += n
        if time.monotonic() > self.deadline:
            self.stop()
            raise Late
        if time.monotonic() - self._kept > KEEP_EVERY:
            self._kept = time.monotonic()
            self.keep()

    def stop(self) -> None:
        """End a stage."""
        self._sync()
        self._now["seconds"] = round(self._now["seconds"] + time.monotonic() - self._began, 2)
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated() / 2**30
            self._now["peak_gib"] = round(max(self._now["peak_gib"], peak), 2)
        self.keep()

    def note(self, text: str) -> None:
        """Keep what a run says of itself."""
        self.notes.append(text)

    def warn(self, text: str) -> None:
        """Keep it as a note."""
        self.notes.append(text)

    def _sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Run:
    """A model, how much text it is calibrated on, and what of it is rounded."""

    model: Callable[[bool], nn.Module]
    device: str
    settings: dict[str, Any]
    n_prompts: int
    seq_len: int = 128
    vocabulary: int = 49152


def ouro(dry: bool) -> nn.Module:
    """Ouro-1.4B's shape."""
    import benches.zoo.models

    size = {"n_embd": 2048, "n_heads": 16, "intermediate_size": 5632, "n_layers": 24, "vocab_size": 49152}
    tiny = {"n_embd": 32, "n_heads": 2, "intermediate_size": 48, "n_layers": 2, "vocab_size": 64}
    config = {"model_type": "loopq-zoo-ouro", "total_ut_steps": 4, "rope_base": 1e6, "block_size": 4096}
    return benches.zoo.models.build({**config, **(tiny if dry else size)})


def smol(dry: bool) -> nn.Module:
    """SmolLM2-135M's shape, layers 12 to 17 three times."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "vocab_size": 49152, "looped_layers": [12, 18, 3]}  # fmt: skip
    tiny = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": 64, "looped_layers": [1, 2, 3]}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **(tiny if dry else size)))


#: All but the looped layers; all but the first two layers.
_LOOP = {"exclude": (r"re:^(?!model\.layers\.(12|13|14|15|16|17)\.)",)}
_TWO = {"exclude": (r"re:^(?!model\.layers\.[01]\.)",)}
RUNS: dict[str, Run] = {
    "smol": Run(smol, "cuda", _LOOP, 32),
    "ouro": Run(ouro, "cuda", {}, 16),
    "ouro_two": Run(ouro, "cuda", _TWO, 32),
    "smol_cpu": Run(smol, "cpu", _LOOP, 32),
}


def section(name: str) -> Section:
    """A section as the bench runs it."""
    return lambda seconds, dry, keep: measure(RUNS[name], seconds, dry, keep)


def measure(run: Run, seconds: float, dry: bool, keep: Keep) -> None:
    """Quantize by the default settings, and evaluate the result; keep what is known after each stage."""
    import loopq

    began = time.monotonic()
    device = "cpu" if dry else run.device
    record: dict[str, Any] = {"device": device, "n_threads": len(os.sched_getaffinity(0))}
    clock = Clock(began + seconds, device == "cuda", lambda: keep(record))
    record |= {"stages": clock.stages, "notes": clock.notes}
    model = made(run, device, dry)
    record["load_seconds"] = round(time.monotonic() - began, 1)
    record["parameters"] = sum(p.numel() for p in model.parameters())
    size = (4, 16) if dry else (2 * run.n_prompts, run.seq_len)
    ids = np.random.default_rng(0).integers(0, 64 if dry else run.vocabulary, size)
    calibration, text = np.split(ids, 2)
    start = time.monotonic()
    try:
        result = loopq.quantize(model, calibration.tolist(), progress=clock, **({} if dry else run.settings))
        record |= {"quantize_seconds": round(time.monotonic() - start, 1), "layers": len(result.layers)}
        measured = loopq.evaluate(model, {"": result}, text.tolist(), progress=clock)
        record["kl"] = float(measured[1].kl.mean())
    except Late:
        record["stopped_after"] = round(time.monotonic() - start, 1)
    keep(record)


def made(run: Run, device: str, dry: bool) -> nn.Module:
    """A model with random weights in bfloat16, made on its device; tables of positions stay in float32."""
    torch.manual_seed(0)
    with torch.device(device):
        model = run.model(dry).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def rows(data: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Lines of the record's table: a stage each."""
    where = f"{data['parameters'] / 1e9:.2f} G parameters on {data['device']}"
    lines = []
    for label, stage in data["stages"].items():
        part = "" if stage["done"] == stage["of"] else f", {stage['done']} of {stage['of']} {stage['unit']}"
        memory = f", {stage['peak_gib']} GiB" if data["device"] == "cuda" else ""
        lines.append((f"{where}: {label}", f"{stage['seconds']} s{memory}{part}", "reported"))
    whole = data.get("quantize_seconds")
    text = f"stopped after {data.get('stopped_after', data['seconds'])} s" if whole is None else f"{whole} s"
    return [*lines, (f"{where}: quantize, all", text, "open" if whole is None else "reported")]
