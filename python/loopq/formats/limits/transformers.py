"""Limits of transformers with compressed-tensors, or with optimum and GPTQModel, which stack experts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from loopq.formats.fused import EXPERT
from loopq.formats.layouts import layout_of
from loopq.formats.native import NATIVE
from loopq.formats.rules import LIMITS, Broken, Config, Layers, Rule, grid_of, named, where
from loopq.layers.layer import QuantizedLayer
from loopq.layers.loop_spec import BASE, LOOP


def _width(layer: QuantizedLayer) -> int:
    return layer.grid.width(layer.shape[1])


def _mixed(key: Callable[[QuantizedLayer], object]) -> Broken:
    """Layers that differ from the first."""

    def unlike(layers: Layers, config: Config, dense: Collection[str]) -> Iterable[str]:
        first = next(iter(layers.values()))
        return [name for name, layer in layers.items() if key(layer) != key(first)]

    return unlike


def _stacked(names: Iterable[str], config: Config) -> dict[str, list[str]]:
    """Matrices of experts by what transformers 5 stacks, unless files have stacks or the class is the checkpoint's."""
    stacks: dict[str, list[str]] = {}
    kept = ("auto_map" in config and LOOP not in config) or layout_of(config).groups
    for name in () if kept else names:
        if EXPERT.search(name):
            stacks.setdefault(EXPERT.sub(".experts.", name), []).append(name)
    return stacks


def _experts(layers: Layers, config: Config, dense: Collection[str] = ()) -> list[str]:
    return [name for names in _stacked(layers, config).values() for name in names]


def _is_nvfp4(layer: QuantizedLayer) -> bool:
    scheme = layer.grid.compressed
    return scheme is not None and scheme[0].startswith("nvfp4")


def _unlike_experts(layers: Layers, config: Config, dense: Collection[str]) -> Iterable[str]:
    """Experts with another grid than the first."""
    names = _experts(layers, config)
    return [name for name in names if grid_of(layers[name]) != grid_of(layers[names[0]])]


def _unstacked(layers: Layers, config: Config, dense: Collection[str]) -> Iterable[str]:
    """Experts in codes that no stack holds, or in a layer with dense ones. A stack is of experts up to their number."""
    blocks = {EXPERT.split(name)[0] for name in dense if EXPERT.search(name)}
    experts = [name for name in layers if EXPERT.search(name)]
    return [n for n in experts if EXPERT.split(n)[0] in blocks or not _is_nvfp4(layers[n])]


def _dense_experts(layers: Layers, config: Config, dense: Collection[str]) -> Iterable[str]:
    """The first dense expert of each stack."""
    return [names[0] for names in _stacked(dense, config).values() if names[0].endswith(".weight")]


def _unfilled(layers: Layers, config: Config, dense: Collection[str]) -> Iterable[str]:
    """Experts of a looped decoder whose class has stacks that no conversion is known to fill from single experts."""
    if LOOP not in config or config.get(BASE, config.get("model_type")) in _FILLED:
        return []
    return [name for name in (*layers, *dense) if EXPERT.search(name)]


#: Types of mixtures whose stacks transformers 5.24 fills from single experts, by its own table of conversions.
_FILLED = (
    "mixtral", "minimax", "minimax_m2", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo", "afmoe",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite",
    "hunyuan_v1_moe", "exaone_moe", "cohere2_moe", "longcat_flash", "solar_open",
)  # fmt: skip


def _in_text_model(layers: Layers, config: Config, dense: Collection[str]) -> Iterable[str]:
    """The first layer, if the loop is in the text model of a multimodal one."""
    return list(layers)[:1] if LOOP in config and "text_config" in config else []


_GPTQ = ("gptq", "gptq_v2")
_CT = ("compressed-tensors",)
LIMITS.register("transformers")((
    Rule(
        ("transformers", "gptqmodel"), (*_CT, *_GPTQ), "HRM-Text under published names: it splits weights, not codes",
        "leave out --names", "transformers 5.24: source read", where(lambda x: True), ("hrm_text",), ("published",),
    ),
    Rule(
        ("transformers", "gptqmodel"), (*_CT, *_GPTQ, NATIVE.name),
        "a loop in the text model of a multimodal model: the code of the loop is for decoders alone", "`loopq run`",
        "transformers 5.24: source read", _in_text_model,
    ),
    Rule(
        ("transformers",), _CT, "symmetric and asymmetric layers in one file",
        "the native checkpoint with `import loopq.runtime.transformers`, or one symmetry",
        "transformers 5.23 with compressed-tensors 0.20: run", _mixed(lambda x: x.grid.symmetric),
    ),
    Rule(
        ("transformers",), _CT, "experts of unlike grids: it stacks them, and reads all by one grid",
        "one grid for all experts, or the native checkpoint with `import loopq.runtime.transformers`",
        "transformers 5.24 with compressed-tensors 0.20: run", _unlike_experts, silent=True,
    ),
    Rule(
        ("transformers",), _CT, "experts of a looped model whose class does not fill its stacks from single experts",
        "the native checkpoint with `import loopq.runtime.transformers`",
        "transformers 5.24 with compressed-tensors 0.20: run (GPT-OSS)", _unfilled, silent=True,
    ),
    Rule(
        ("transformers",), _CT, "experts in NVFP4: it leaves out their second scale",
        "MXFP4 or integers for the experts, or the native checkpoint with `import loopq.runtime.transformers`",
        "transformers 5.24 with compressed-tensors 0.20: run",
        lambda layers, config, dense: [n for n in _experts(layers, config) if _is_nvfp4(layers[n])], silent=True,
    ),
    Rule(
        ("transformers",), _CT, "dense experts, all or some of them: it stacks codes alone",
        "quantize all experts, or take the native checkpoint with `import loopq.runtime.transformers`",
        "transformers 5.24 with compressed-tensors 0.20: run (an error of its conversion)", _dense_experts,
    ),
    Rule(
        ("transformers",), _CT, "experts of Inkling-2 in other codes than NVFP4, or some of a layer: it has stacks",
        "--layer '*experts*=>levels=nvfp4,group_size=16' (or --exclude '*experts*')",
        "transformers 5.24 with compressed-tensors 0.20: run", _unstacked, ("inkling",),
    ),
    Rule(
        ("transformers",), _GPTQ, "quantized experts: it stacks them, and leaves the stacks as initialised",
        "--exclude '*experts*', or the native checkpoint with `import loopq.runtime.transformers`",
        "transformers 5.24 with optimum 2.3: run",
        _experts, silent=True,
    ),
    Rule(
        ("transformers", "gptqmodel"), _GPTQ, "a convolution in a block: both look for its codes",
        "--format compressed-tensors", "GPTQModel 7.7 (an error) and optimum 2.3 (left as initialised): run",
        lambda layers, config, dense: [name for name in dense if name.endswith("conv1d.weight")], silent=True,
    ),
    Rule(
        ("transformers",), _CT,
        "asymmetric layers: 4.57 never, 5.23 only with CompressedTensorsConfig(dequantize=True)",
        "the native checkpoint with `import loopq.runtime.transformers`, or a symmetric grid",
        "transformers 5.23 and 4.57.6 with compressed-tensors 0.20: run", where(lambda x: not x.grid.symmetric),
    ),
    Rule(
        ("transformers",), _GPTQ, "unlike bits or groups: optimum knows one setting for a file",
        "the native checkpoint with `import loopq.runtime.transformers`, or one grid",
        "optimum 2.3: run", _mixed(lambda x: (x.grid.bits, x.grid.group_size)),
    ),
    Rule(
        ("transformers",), _GPTQ, "4 bits in groups that are not 32, 64, 128 or 256",
        "another group size, or the native checkpoint",
        "optimum 2.3 on a CPU: run",
        where(lambda x: x.grid.bits == 4 and _width(x) not in (32, 64, 128, 256)),
    ),
    Rule(
        ("transformers",), _GPTQ, "layers of HRM-Text by the names of its published files",
        "--format compressed-tensors, or the native checkpoint",
        "optimum 2.3: run (left as initialised)",
        named(r"\.attn\."), ("hrm_text",),
    ),
    Rule(
        ("transformers", "gptqmodel"), _GPTQ, "3 bits with outputs that are no multiple of 32",
        "4 bits for the layer, or --exclude it",
        "GPTQModel 7.7 and optimum 2.3: run (\"qzeros expects columns divisible by 3\")",
        # One row stands for a layer before the run.
        where(lambda x: x.grid.bits == 3 and x.shape[0] > 1 and x.shape[0] % 32 != 0),
    ),
))  # fmt: skip
