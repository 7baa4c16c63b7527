"""Types of the keywords of public functions. `python docs/settings.py` writes this file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from loopq.quantizers import Method
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.budget import Fit
from loopq.run.inputs import Inputs
from loopq.terminal.progress import Progress


class ExecutionKeywords(TypedDict, total=False):
    """Keywords of how a run is carried out."""

    seed: int
    batch_size: int
    threads: int
    memory: int | None
    work: Path | None
    progress: Progress


class TakeKeywords(TypedDict, total=False):
    """Keywords of number and length of prompts."""

    n_prompts: int | None
    seq_len: int
    field: str | None
    template: bool


class OpeningKeywords(TypedDict, total=False):
    """Keywords of how a model is opened."""

    tokenizer: Any
    trust_remote_code: bool


class SolveKeywords(ExecutionKeywords, total=False):
    """Keywords of `solve`."""

    preset: Literal["best", "small", "fast", "paper"] | None
    bits: Literal[2, 3, 4, 8]
    group_size: int
    symmetric: bool
    levels: str
    scale_dtype: Literal["float32", "float16", "bfloat16"]
    scale_bits: int | None
    steps: str
    step_weights: str
    rotation: str
    rotation_seed: int
    method: Literal["awq", "awq-fold", "dense", "gptq", "gptq-cd", "rtn", "trellis"] | Method
    scale_search: Literal["max", "half-range", "mse"]
    damping: float
    damping_kind: Literal["mean", "median", "diagonal", "tail"]
    scales: Literal["group", "static"]
    act_order: bool
    precision: Literal["float64", "float32"]
    block_size: int
    metric: Literal["auto", "inputs", "loop"]
    metric_draws: int
    metric_prompts: int | None
    order: Literal["conditional", "diagonal", "natural"]
    signed_scales: bool
    beam: int
    descent: int
    refit: bool
    rounds: int
    passes: int
    state_bits: int | None
    inputs: Literal["asymmetric", "closed-loop", "equal-rows", "open"] | Inputs
    alpha: float
    sweeps: int
    rank_threshold: float | None
    outside: Literal[4, 8, "q4_k", "q5_k", "q6_k", "q8_0", "none"] | None
    fit: float | int | Fit | None
    fit_bits: Sequence[int]
    fit_group_sizes: Sequence[int]
    layer: LayerConfig
    overrides: Sequence[Override]
    include: Sequence[str]
    exclude: Sequence[str]


class QuantizeKeywords(SolveKeywords, TakeKeywords, OpeningKeywords, total=False):
    """Keywords of `quantize`."""

    random_tokens: float | None
    engine: Literal["transformers", "vllm", "sglang", "gptqmodel", "llama.cpp", "loopq"] | None
    force: bool
    verify: bool


class MeasureKeywords(TakeKeywords, ExecutionKeywords, OpeningKeywords, total=False):
    """Keywords of `evaluate` and `diagnose`."""


class GenerateKeywords(OpeningKeywords, total=False):
    """Keywords of `generate`."""

    n_tokens: int
    temperature: float
    top_p: float
    seed: int
    exit: float | None
    kv: Literal[4, 8] | None


class ExportKeywords(TypedDict, total=False):
    """Keywords of `export`."""

    ragged: Literal["keep", "split"] | None
    remote_code: str | None
    names: Literal["published"] | None
    vocabulary: str | None
    steps: str | None
    engine: Literal["transformers", "vllm", "sglang", "gptqmodel", "llama.cpp", "loopq"] | None
    force: bool
    verify: bool
    n_prompts: int
    seq_len: int
    trust_remote_code: bool
