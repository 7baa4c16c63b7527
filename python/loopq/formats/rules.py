"""Known limits and errors of inference engines, with dates. docs/formats/engines.md prints them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from loopq.errors import CheckpointError, ConfigError
from loopq.formats import FORMATS
from loopq.formats.fitting import Ragged
from loopq.formats.native import NATIVE
from loopq.layers.layer import QuantizedLayer

Layers = Mapping[str, QuantizedLayer]

#: Day of the newest entry.
DATE = "2026-11-23"
#: Formats that an engine reads.
READS: Mapping[str, tuple[str, ...]] = {
    "transformers": (NATIVE.name, "compressed-tensors", "gptq", "gptq_v2"),
    "vllm": ("compressed-tensors", "gptq", "modelopt"),
    "sglang": ("compressed-tensors", "gptq", "modelopt"),
    "gptqmodel": ("gptq", "gptq_v2"),
    "llama.cpp": ("gguf",),
}
#: Projections that engines put into one matrix, which has one scheme.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Rule:
    """One limit or error of an engine.

    Parameters
    ----------
    engines, formats : tuple of str
        Where it holds.
    what : str
        What is not taken.
    instead : str
        What to do.
    known : str
        Version, and source: "run", "config read by its own classes" or "source read".
    broken : callable
        Takes the layers in the format's form. Returns the names of those that break the rule.
    systems : tuple of str
        Affected systems. All if empty.
    """

    engines: tuple[str, ...]
    formats: tuple[str, ...]
    what: str
    instead: str
    known: str
    broken: Callable[[Layers], Iterable[str]]
    systems: tuple[str, ...] = ()


def _where(test: Callable[[QuantizedLayer], bool]) -> Callable[[Layers], Iterable[str]]:
    return lambda layers: [name for name, layer in layers.items() if test(layer)]


def _unlike_siblings(layers: Layers) -> Iterable[str]:
    """Projections with another grid than those they are fused with, or dense ones beside quantized ones."""
    for name, layer in layers.items():
        module, _, last = name.removesuffix(".weight").rpartition(".")
        for family in _FUSED:
            if last in family:
                others = [layers.get(f"{module}.{part}.weight") for part in family]
                if any(other is None or _grid(other) != _grid(layer) for other in others):
                    yield name


def _grid(layer: QuantizedLayer) -> tuple[object, ...]:
    return tuple(v for k, v in layer.grid.described().items() if k != "scale_dtype")


def _width(layer: QuantizedLayer) -> int:
    return layer.grid.width(layer.shape[1])


def _mixed(key: Callable[[QuantizedLayer], object]) -> Callable[[Layers], Iterable[str]]:
    """Layers that differ from the first."""

    def unlike(layers: Layers) -> Iterable[str]:
        first = next(iter(layers.values()))
        return [name for name, layer in layers.items() if key(layer) != key(first)]

    return unlike


_GPTQ = ("gptq", "gptq_v2")
_CT = ("compressed-tensors",)
RULES = (
    Rule(
        ("vllm",), ("gptq",), "GPTQ of 2 or 3 bits", "--format compressed-tensors, or 4 or 8 bits",
        "vLLM 0.32 on a CPU: run, both refused when the configuration is read", _where(lambda x: x.grid.bits < 4),
    ),
    Rule(
        ("vllm",), ("gptq",), "GPTQ of IQuest-Coder-Loop: its class does not name what it fuses",
        "--format compressed-tensors", "vLLM 0.32 on a CPU: run (KeyError 'layers.0.mlp.gate_up_proj.qweight')",
        _where(lambda x: True), ("iquest",),
    ),
    Rule(
        ("vllm", "sglang"), ("compressed-tensors", "gptq", "modelopt"),
        "q, k and v, or gate and up, of unlike bits, groups, symmetry or NVFP4 powers, or some of them dense: one "
        "matrix there",
        "one --layer setting for all of them, and --include or --exclude them together",
        "vLLM and SGLang 2026-08: source read; seen by others as AssertionError in load_merged_column_weight",
        _unlike_siblings,
    ),
    Rule(
        ("transformers",), _CT, "symmetric and asymmetric layers in one file",
        "the native checkpoint with `import loopq.integrations.transformers`, or one symmetry",
        "transformers 5.23 with compressed-tensors 0.20: run", _mixed(lambda x: x.grid.symmetric),
    ),
    Rule(
        ("transformers",), _CT,
        "asymmetric layers: 4.57 never, 5.23 only with CompressedTensorsConfig(dequantize=True)",
        "the native checkpoint with `import loopq.integrations.transformers`, or a symmetric grid",
        "transformers 5.23 and 4.57.6 with compressed-tensors 0.20: run", _where(lambda x: not x.grid.symmetric),
    ),
    Rule(
        ("transformers",), _GPTQ, "unlike bits or groups: optimum knows one setting for a file",
        "the native checkpoint with `import loopq.integrations.transformers`, or one grid",
        "optimum 2.3: run", _mixed(lambda x: (x.grid.bits, x.grid.group_size)),
    ),
    Rule(
        ("transformers",), _GPTQ, "4 bits in groups that are not 32, 64, 128 or 256",
        "another group size, or the native checkpoint",
        "optimum 2.3 on a CPU: run",
        _where(lambda x: x.grid.bits == 4 and _width(x) not in (32, 64, 128, 256)),
    ),
    Rule(
        ("transformers", "gptqmodel"), _GPTQ, "3 bits with outputs that are no multiple of 32",
        "4 bits for the layer, or --exclude it",
        "GPTQModel 7.7 and optimum 2.3: run (\"qzeros expects columns divisible by 3\")",
        _where(lambda x: x.grid.bits == 3 and x.shape[0] % 32 != 0),
    ),
    Rule(
        ("gptqmodel",), _GPTQ, "groups of fewer than 16 columns", "a group size of 16 or more that divides in_features",
        "GPTQModel 7.7: run (groups of 4 refused, of 32 taken)", _where(lambda x: 0 < x.grid.group_size < 16),
    ),
    Rule(
        ("gptqmodel",), _GPTQ, "quantized layers outside numbered blocks: left as initialised, without an error",
        "--exclude them, or load by transformers and optimum",
        "GPTQModel 7.7: run", lambda layers: [n for n in layers if not re.search(r"\.\d+\.", f".{n}.")],
    ),
)  # fmt: skip

#: Systems that an engine runs, and how; one that is not named is not run.
RUNS: Mapping[str, Mapping[str, str]] = {
    "transformers": {
        **dict.fromkeys(
            ("huginn", "rllama", "ouro", "nanbeige", "ponder", "iquest"), "code of the checkpoint, on 4.57.6"
        ),
        **dict.fromkeys(("hrm_text", "zamba", "mamba", "albert"), "its own class"),
        "generic": "where the model is one of transformers'",
    },
    "vllm": {
        **dict.fromkeys(("ouro", "huginn"), "loopq's plugin (loopq.integrations.vllm): run on 0.32"),
        "rllama": "loopq's plugin (loopq.integrations.vllm): Llama's blocks, run on 0.32; not OLMo's",
        "looped": "loopq's plugin (loopq.integrations.vllm): Llama, Mistral, Qwen2, Qwen3; run on 0.32",
        "dory": "loopq's plugin (loopq.integrations.vllm), files with the published names: run on 0.32; the class that "
        "0.33 has takes full precision alone",
        "nanbeige": "transformers backend (vLLM #56071)",
        "iquest": "its own class (vLLM #31575): run on 0.32",
        "zamba": "Zamba2, its own class",
        "mamba": "its own class",
        "generic": "where vLLM has the class",
    },
    "sglang": {
        "nanbeige": "its own class (SGLang #32151)",
        "iquest": "its own class; its gates are loaded since SGLang #38193",
        "generic": "where SGLang has the class",
    },
    "gptqmodel": {
        "hrm_text": "layers in numbered blocks, by transformers' class",
        "ouro": "its own definition of the class, not tried",
        "generic": "layers in numbered blocks, by transformers' class",
    },
    "llama.cpp": {
        "hrm_text": "its own class (llama.cpp #27625): run (xllamacpp 2026.10)",
        "dory": "its own class: checked against its converter and its graph, not run",
        "nanbeige": "its own class (llama.cpp #25994): run (xllamacpp 2026.10)",
        "looped": "Llama, the loop written out: run (xllamacpp 2026.10)",
        "generic": "Llama alone",
    },
}
#: Why a system that people ask for is not run.
WHY_NOT: Mapping[tuple[str, str], str] = {
    (
        "vllm",
        "hrm_text",
    ): "its file has gate, q, k and v as one matrix, an export of loopq as transformers splits them",
    ("vllm", "inkling"): "vLLM up to 0.33 has no class for it, and loopq's plugin none either",
    ("sglang", "ouro"): "its fallback to transformers breaks the cache of the loops (SGLang #32894)",
    ("llama.cpp", "ouro"): "its release of October 2026 has no such architecture",
    **dict.fromkeys(
        [(engine, "looped") for engine in ("transformers", "sglang", "gptqmodel")],
        "it would run every layer once: it does not read looped_layers",
    ),
}


def check_engine(
    engine: str, format_name: str, layers: Layers, system: str | None, ragged: Ragged | None = None
) -> None:
    """Reject a checkpoint in a format if an engine would reject it or load it wrongly.

    Parameters
    ----------
    engine : str
        A name in `READS`.
    format_name : str
        Format of the file.
    layers : mapping of str to QuantizedLayer
        Layers of the checkpoint.
    system : str or None
        Adapter's name. None if unknown.
    ragged : {"keep", "split", "pad"}, optional
        As of `loopq.run.export.export`.

    Raises
    ------
    ConfigError
        The engine is unknown.
    CheckpointError
        If a rule applies. The message names the layer, the engine's limit and a remedy.
    """
    if engine not in READS:
        raise ConfigError(f"engine must be one of {', '.join(READS)}; got {engine!r}")
    if format_name not in READS[engine]:
        raise CheckpointError(f"{engine} reads {', '.join(READS[engine])}, not {format_name}")
    if system is not None and system not in RUNS[engine]:
        why = WHY_NOT.get((engine, system), f"no support is known ({DATE})")
        raise CheckpointError(f"{engine} does not run {system}: {why}; docs/formats/engines.md has the table")
    target = FORMATS.get(format_name)
    layers = target.stored(layers, **target.taken({"ragged": ragged}))
    for rule in RULES:
        if engine not in rule.engines or format_name not in rule.formats:
            continue
        names = list(rule.broken(layers)) if not rule.systems or system in rule.systems else []
        if names:
            raise CheckpointError(
                f"{engine} does not take {rule.what} (layer {names[0]}, {len(names)} in all; {rule.known}). Instead: "
                f"{rule.instead}. Without --engine the file is written all the same"
            )
