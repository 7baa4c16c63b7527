"""Known limits and errors of inference engines, with dates. docs/formats/engines.md prints them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.fitting import Ragged
from loopq.formats.fused import EXPERT
from loopq.formats.native import NATIVE
from loopq.formats.support import DATE, EMBEDDED, KNOWN, READS, entry_of
from loopq.layers.layer import QuantizedLayer
from loopq.layers.loop_spec import LOOP

Layers = Mapping[str, QuantizedLayer]
Config = Mapping[str, Any]
_Broken = Callable[[Layers, Config], Iterable[str]]

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
        Takes the layers in the format's form and the model's config.json. Returns the names of layers that break the
        rule.
    systems : tuple of str
        Affected systems. All if empty.
    names : tuple of str or None
        Values of the option "names" with which the rule holds.
    silent : bool
        Whether the engine gives other logits without an error. Such a file is written only for a named engine.
    """

    engines: tuple[str, ...]
    formats: tuple[str, ...]
    what: str
    instead: str
    known: str
    broken: _Broken
    systems: tuple[str, ...] = ()
    names: tuple[str | None, ...] = (None, "published")
    silent: bool = False


def _where(test: Callable[[QuantizedLayer], bool]) -> _Broken:
    return lambda layers, config: [name for name, layer in layers.items() if test(layer)]


def _named(pattern: str) -> _Broken:
    return lambda layers, config: [name for name in layers if re.search(pattern, f".{name}.")]


def _unlike_siblings(layers: Layers, config: Config) -> Iterable[str]:
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


def _mixed(key: Callable[[QuantizedLayer], object]) -> _Broken:
    """Layers that differ from the first."""

    def unlike(layers: Layers, config: Config) -> Iterable[str]:
        first = next(iter(layers.values()))
        return [name for name, layer in layers.items() if key(layer) != key(first)]

    return unlike


def _stacked(layers: Layers, config: Config) -> dict[str, list[str]]:
    """Matrices of experts by what transformers 5 stacks. A class in the checkpoint's own code stacks nothing."""
    found: dict[str, list[str]] = {}
    for name in layers if "auto_map" not in config or LOOP in config else ():
        if EXPERT.search(name):
            found.setdefault(EXPERT.sub(".experts.", name), []).append(name)
    return found


def _experts(layers: Layers, config: Config) -> list[str]:
    return [name for names in _stacked(layers, config).values() for name in names]


def _is_nvfp4(layer: QuantizedLayer) -> bool:
    scheme = layer.grid.compressed
    return scheme is not None and scheme[0].startswith("nvfp4")


def _unlike_experts(layers: Layers, config: Config) -> Iterable[str]:
    """Experts with another grid than the first."""
    names = _experts(layers, config)
    return [name for name in names if _grid(layers[name]) != _grid(layers[names[0]])]


def _part_of_experts(layers: Layers, config: Config) -> Iterable[str]:
    """The first expert of each stack with dense ones. The first layer if all experts are dense."""
    count = next((config[key] for key in _COUNTS if isinstance(config.get(key), int)), 0)
    stacks = _stacked(layers, config)
    if count and not stacks and ("auto_map" not in config or LOOP in config):
        return list(layers)[:1]
    return [names[0] for names in stacks.values() if count not in (0, len(names))]


#: Keys of config.json with the number of experts in a layer.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
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
        "HRM-Text under transformers' names: gate, q, k and v are one matrix there, and so are gate and up",
        "--names published", "vLLM 0.33: source read", _where(lambda x: True), ("hrm_text",), (None,),
    ),
    Rule(
        ("transformers", "gptqmodel"), (*_CT, *_GPTQ), "HRM-Text under published names: it splits weights, not codes",
        "leave out --names", "transformers 5.24: source read", _where(lambda x: True), ("hrm_text",), ("published",),
    ),
    Rule(
        ("vllm", "sglang"), ("compressed-tensors", "gptq", "modelopt"),
        "q, k and v, or gate and up, of unlike bits, groups, symmetry or NVFP4 powers, or some of them dense: one "
        "matrix there",
        "one --layer setting for all of them, and --include or --exclude them together",
        "vLLM and SGLang 2026-08: source read; seen by others as AssertionError in load_merged_column_weight",
        # Under published names joined rows have one grid.
        _unlike_siblings, (), (None,),
    ),
    Rule(
        ("transformers",), _CT, "symmetric and asymmetric layers in one file",
        "the native checkpoint with `import loopq.integrations.transformers`, or one symmetry",
        "transformers 5.23 with compressed-tensors 0.20: run", _mixed(lambda x: x.grid.symmetric),
    ),
    Rule(
        ("transformers",), _CT, "experts of unlike grids: it stacks them, and reads all by one grid",
        "one grid for all experts, or the native checkpoint with `import loopq.integrations.transformers`",
        "transformers 5.24 with compressed-tensors 0.20: run", _unlike_experts, silent=True,
    ),
    Rule(
        ("transformers",), _CT, "experts in NVFP4: it leaves out their second scale",
        "MXFP4 or integers for the experts, or the native checkpoint with `import loopq.integrations.transformers`",
        "transformers 5.24 with compressed-tensors 0.20: run",
        lambda layers, config: [n for n in _experts(layers, config) if _is_nvfp4(layers[n])], silent=True,
    ),
    Rule(
        ("transformers",), _CT, "dense experts, all or some of them: it stacks codes alone",
        "quantize all experts, or take the native checkpoint with `import loopq.integrations.transformers`",
        "transformers 5.24 with compressed-tensors 0.20: run (an error of its conversion)", _part_of_experts,
    ),
    Rule(
        ("transformers",), _GPTQ, "quantized experts: it stacks them, and leaves the stacks as initialised",
        "--exclude '*experts*', or the native checkpoint with `import loopq.integrations.transformers`",
        "transformers 5.24 with optimum 2.3: run",
        _experts, silent=True,
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
        ("transformers",), _GPTQ, "layers of HRM-Text by the names of its published files",
        "--format compressed-tensors, or the native checkpoint",
        "optimum 2.3: run (left as initialised)",
        _named(r"\.attn\."), ("hrm_text",),
    ),
    Rule(
        ("gptqmodel",), _GPTQ, "o_proj of HRM-Text by the name of its published files, quantized or dense",
        "--format compressed-tensors, or the native checkpoint",
        "GPTQModel 7.7: run (\"Missing required quantized weights\", or left as initialised)",
        lambda layers, config: [] if any(".self_attn.o_proj." in n for n in layers) else list(layers)[:1],
        ("hrm_text",), silent=True,
    ),
    Rule(
        ("transformers", "gptqmodel"), _GPTQ, "3 bits with outputs that are no multiple of 32",
        "4 bits for the layer, or --exclude it",
        "GPTQModel 7.7 and optimum 2.3: run (\"qzeros expects columns divisible by 3\")",
        # One row stands for a layer before the run.
        _where(lambda x: x.grid.bits == 3 and x.shape[0] > 1 and x.shape[0] % 32 != 0),
    ),
    Rule(
        ("gptqmodel",), _GPTQ, "groups of fewer than 16 columns", "a group size of 16 or more that divides in_features",
        "GPTQModel 7.7: run (groups of 4 refused, of 32 taken)", _where(lambda x: 0 < x.grid.group_size < 16),
    ),
    Rule(
        ("gptqmodel",), _GPTQ, "quantized layers outside numbered blocks: left as initialised, without an error",
        "--exclude them, or load by transformers and optimum",
        "GPTQModel 7.7: run", _named(r"^(?!.*\.\d+\.)"), silent=True,
    ),
)  # fmt: skip


class _Silent(CheckpointError):
    """The engine gives other logits without an error."""


def check_engine(
    engine: str,
    format_name: str,
    layers: Layers,
    system: str | None,
    ragged: Ragged | None = None,
    config: Mapping[str, Any] | None = None,
    names: str | None = None,
) -> None:
    """Reject a checkpoint in a format if an engine would reject it or load it wrongly.

    Parameters
    ----------
    engine : str
        A name in `READS`.
    format_name : str
        Format of the file.
    layers : mapping of str to QuantizedLayer
        Layers of the checkpoint, or one row of each.
    system : str or None
        Adapter's name. None if unknown.
    ragged, names : str, optional
        As of `loopq.run.export.export`.
    config : mapping, optional
        The model's config.json.

    Raises
    ------
    CheckpointError
        If a rule applies. The message names the layer, the engine's limit and a remedy.
    """
    if format_name not in READS[engine]:
        raise CheckpointError(f"{engine} reads {', '.join(READS[engine])}, not {format_name}")
    if system is not None and system in KNOWN:
        entry = entry_of(engine, system, format_name, config)
        if entry is None or not entry.runs:
            why = f"no support is known ({DATE})" if entry is None else f"{entry.how} ({entry.known})"
            kind = (config or {}).get("model_type")
            raised = _Silent if entry is not None and entry.silent else CheckpointError
            raise raised(f"{engine} does not run {system}{f' ({kind})' if kind else ''}: {why}")
    target = FORMATS.get(format_name)
    layers = target.stored(layers, **target.taken({"ragged": ragged}))
    for rule in RULES:
        if engine not in rule.engines or format_name not in rule.formats or names not in rule.names:
            continue
        broken = list(rule.broken(layers, config or {})) if system in (rule.systems or (system,)) else []
        if broken:
            raise (_Silent if rule.silent else CheckpointError)(
                f"{engine} does not take {rule.what} (layer {broken[0]}, {len(broken)} in all; {rule.known}). Instead: "
                f"{rule.instead}"
            )


def readers(
    format_name: str,
    layers: Layers,
    system: str | None,
    config: Mapping[str, Any],
    ragged: Ragged | None = None,
    names: str | None = None,
) -> tuple[str, ...]:
    """Return the engines that read a checkpoint in a format right, as far as the table says.

    Parameters
    ----------
    format_name, layers, system, ragged, names
        As of `check_engine`.
    config : mapping
        The model's config.json.

    Returns
    -------
    tuple of str
        Names in `READS`. It is empty where no engine opens the format at all (the native one, a kernel's, an
        importance matrix), and for the embedded models.

    Raises
    ------
    CheckpointError
        Engines read the format, and none of them reads this checkpoint right, or one gives other logits without an
        error. The message has the reason of each.
    """
    engines = [engine for engine, formats in READS.items() if format_name in formats]
    embedded = str(config.get("model_type", "")).startswith(EMBEDDED)
    if format_name == NATIVE.name or not engines or embedded:
        return ()
    target = FORMATS.get(format_name)
    try:
        target.stored(layers, **target.taken({"ragged": ragged}))
    except CheckpointError:
        # The format itself refuses it, and says why.
        return ()
    found, reasons, silent = [], [], []
    for engine in engines:
        try:
            check_engine(engine, format_name, layers, system, ragged, config, names)
        except CheckpointError as cause:
            reasons.append(str(cause))
            silent += [str(cause)] if isinstance(cause, _Silent) else []
        else:
            found.append(engine)
    if not found:
        raise CheckpointError(
            f"no engine reads {format_name} of this model right: {'; '.join(reasons)}. Keep loopq's own format, or "
            "give --force (force=True), which writes the file all the same and says so in it"
        )
    if silent:
        raise CheckpointError(
            f"{'; '.join(silent)}, without an error. {', '.join(found)} can read {format_name} of this model: name the "
            "one that it is for by --engine (engine=...), or give --force (force=True)"
        )
    return tuple(found)
