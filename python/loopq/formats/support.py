"""Systems that engines run, with version, date and test. docs/formats/engines.md prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loopq.formats.native import NATIVE
from loopq.layers.loop_spec import BASE

#: Day of the newest entry.
DATE = "2026-11-29"
#: Formats that an engine reads.
READS: Mapping[str, tuple[str, ...]] = {
    "transformers": (NATIVE.name, "compressed-tensors", "gptq", "gptq_v2"),
    "vllm": (NATIVE.name, "compressed-tensors", "gptq", "modelopt"),
    "sglang": ("compressed-tensors", "gptq", "modelopt"),
    "gptqmodel": ("gptq", "gptq_v2"),
    "llama.cpp": ("gguf",),
}
_GPTQ = ("gptq", "gptq_v2")
_CT = ("compressed-tensors",)
_NATIVE = (NATIVE.name,)
#: Formats that vLLM reads without loopq.
_FOREIGN = ("compressed-tensors", "gptq", "modelopt")


@dataclass(frozen=True)
class Support:
    """Known facts about systems in an engine.

    Parameters
    ----------
    engine : str
        A name in `READS`.
    systems : tuple of str
        Adapters' names.
    how : str
        What runs them. Where nothing does, the reason.
    known : str
        Version, and "run" or "source read".
    test : str
        The test that ran it, "FILE::NAME". It is empty if none did.
    formats : tuple of str
        Formats that it is about. All that the engine reads if empty.
    kinds : tuple of str
        Values of `model_type` in config.json that it is about. All if empty.
    code : bool
        Whether it is about folders with code of their own alone (`auto_map` in config.json).
    runs : bool
        Whether the engine gives the loop's logits.
    silent : bool
        Whether it gives other logits without an error. Such a file is written only for a named engine.
    """

    engine: str
    systems: tuple[str, ...]
    how: str
    known: str
    test: str = ""
    formats: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    code: bool = False
    runs: bool = True
    silent: bool = False

    def about(self, engine: str, system: str, format_name: str, config: Mapping[str, Any] | None) -> bool:
        """Whether it is about a system in a format and an engine. Without `config` any will do."""
        if (
            engine != self.engine
            or system not in self.systems
            or format_name not in (self.formats or (format_name,))
        ):
            return False
        if config is None:
            return True
        kind = config.get(BASE, config.get("model_type"))
        return (not self.kinds or kind in self.kinds) and (not self.code or "auto_map" in config)


_PAIRS = "tests/formats/engines/test_pairs.py::test_a_pair_gives_equal_logits_or_is_refused"
_VLLM = "tests/interop/test_vllm.py::test_vllm_computes_every_loop"
_VLLM_NATIVE = "tests/interop/test_vllm.py::test_vllm_runs_the_codes_of_native_checkpoints"
_LLAMA = "tests/formats/gguf/test_model.py::test_logits_of_llama_cpp"
_ONCE = "it runs every layer once: it does not read looped_layers"
#: Dense models whose layers the plugin runs in a loop.
_LAYERS = ("llama", "mistral", "qwen2", "qwen3")
_PLUGIN = "loopq's plugin (loopq.runtime.vllm)"
#: The first entry of an engine, a system and a format holds; without one the engine does not run the system.
ENTRIES = (
    Support(
        "transformers", ("huginn",), "optimum leaves buffers without data", "5.24 with optimum 2.3: run", _PAIRS, _GPTQ,
        runs=False,
    ),
    Support(
        "transformers", ("dory", "inkling"), "optimum leaves layers as initialised", "5.24 with optimum 2.3: run",
        _PAIRS, _GPTQ, runs=False, silent=True,
    ),
    Support(
        "transformers", ("mamba", "zamba"), "its own class reads weights that packed layers do not have", "5.24: run",
        _PAIRS, (*_GPTQ, *_CT), runs=False,
    ),
    Support("transformers", ("dory",), "its own class", "5.24: run", _PAIRS),
    Support("transformers", ("inkling",), "its own class", "5.24: run", _PAIRS, (*_NATIVE, *_CT)),
    Support("transformers", ("hrm_text", "zamba", "mamba", "albert"), "its own class", "5.24: run", _PAIRS),
    Support(
        "transformers", ("huginn", "rllama", "ouro", "nanbeige", "ponder", "iquest"), "code of the checkpoint",
        "4.57.6: run", code=True,
    ),
    Support("transformers", ("generic",), "where the model is one of transformers'", "5.24: run", _PAIRS),
    Support("transformers", ("looped",), "loopq's integration", "5.24: run", _PAIRS, _NATIVE),
    Support(
        "transformers", ("looped",), "its own class reads weights that packed layers do not have", "5.24: run",
        formats=(*_GPTQ, *_CT), kinds=("gpt_bigcode",), runs=False,
    ),
    Support(
        "transformers", ("looped",), "the code of the loop in the folder (--remote-code)", "5.24: run", _PAIRS,
        code=True,
    ),
    Support(
        "transformers", ("looped",), "it refuses the type; --remote-code puts the code of the loop into the folder",
        "5.24: run", _PAIRS, runs=False,
    ),
    Support("vllm", ("ouro",), _PLUGIN, "0.32 on a CPU: run", _VLLM_NATIVE, _NATIVE),
    Support("vllm", ("looped",), _PLUGIN, "0.32 on a CPU: run", _VLLM_NATIVE, _NATIVE, ("llama",)),
    Support("vllm", ("ouro", "huginn", "rllama"), _PLUGIN, "0.32 on a CPU: run", _VLLM, _CT),
    Support("vllm", ("looped",), _PLUGIN, "0.32 on a CPU: run", _VLLM, _CT, _LAYERS),
    Support(
        "vllm", ("dory",), f"{_PLUGIN}, files with the published names; 0.33's own class takes NVFP4 without it "
        "and INT4 with it (source read)", "0.32 on a CPU: run", _VLLM, _CT,
    ),
    Support("vllm", ("ouro", "huginn", "rllama", "dory"), _PLUGIN, "source read"),
    Support("vllm", ("looped",), _PLUGIN, "source read", kinds=_LAYERS),
    Support("vllm", ("nanbeige",), "transformers backend", "vLLM #56071", formats=_FOREIGN),
    Support("vllm", ("iquest",), "its own class (vLLM #31575)", "0.32 on a CPU: run", formats=_FOREIGN),
    Support("vllm", ("iquest",), "its class does not name what it fuses", "source read", formats=_NATIVE, runs=False),
    Support("vllm", ("zamba",), "Zamba2, its own class", "source read", formats=_FOREIGN),
    Support("vllm", ("mamba",), "its own class", "source read", formats=_FOREIGN),
    *(
        Support(engine, ("generic",), "code of a checkpoint is not known to it", "source read", code=True, runs=False)
        for engine in ("vllm", "sglang")
    ),
    Support("vllm", ("generic",), "where vLLM has the class", "source read"),
    Support(
        "vllm", ("hrm_text",), "its own class, files with --names published", "0.33: source read", formats=_FOREIGN
    ),
    Support(
        "vllm", ("inkling",), "vLLM up to 0.33 has no class for it, and loopq's plugin none either", "0.32: run",
        "tests/interop/test_vllm.py::test_inkling_is_refused_with_the_version_that_it_needs", runs=False,
    ),
    Support("sglang", ("hrm_text",), "its own class, files with --names published", "0.5.23: not tried"),
    Support("sglang", ("nanbeige",), "its own class", "SGLang #32151"),
    Support("sglang", ("iquest",), "its own class; its gates are loaded since SGLang #38193", "source read"),
    Support("sglang", ("generic",), "where SGLang has the class", "source read"),
    Support(
        "sglang", ("ouro",), "its fallback to transformers breaks the cache of the loops", "SGLang #32894", runs=False
    ),
    Support("gptqmodel", ("hrm_text",), "layers in numbered blocks, by transformers' class", "7.7: run", _PAIRS),
    Support("gptqmodel", ("ouro",), "its own definition of the class", "source read"),
    Support("gptqmodel", ("generic",), "layers in numbered blocks, by transformers' class", "7.7: run", _PAIRS),
    Support("llama.cpp", ("nanbeige",), "its own class (llama.cpp #25994)", "xllamacpp 2026.10: run", _LLAMA),
    Support("llama.cpp", ("hrm_text",), "its own class (llama.cpp #27625)", "xllamacpp 2026.10: run", _PAIRS),
    Support("llama.cpp", ("looped",), "Llama, the loop written out", "xllamacpp 2026.10: run", _PAIRS),
    Support("llama.cpp", ("generic",), "Llama alone", "source read"),
    Support(
        "llama.cpp", ("dory",), "its release of October 2026 has no such architecture; the vendor's has, and the file "
        "is checked against its converter and its graph", "xllamacpp 2026.10: run", _PAIRS, runs=False,
    ),
    Support(
        "llama.cpp", ("ouro",), "its release of October 2026 has no such architecture", "xllamacpp 2026.10: run",
        runs=False,
    ),
    Support(
        "gptqmodel", ("looped",), "it looks for other names of fused layers or of experts", "7.7: run", _PAIRS,
        kinds=("glm4", "mixtral", "phi3"), runs=False,
    ),
    Support(
        "gptqmodel", ("looped",), "its logits are other ones, or not finite", "7.7: run", _PAIRS,
        kinds=("gemma4_text", "gpt_neox", "gpt_oss"), runs=False, silent=True,
    ),
    Support(
        "gptqmodel", ("looped",), "the code of the loop in the folder (--remote-code)", "7.7: run", _PAIRS, code=True
    ),
    *(
        Support(engine, ("looped",), _ONCE, "source read", runs=False) for engine in ("sglang", "gptqmodel")
    ),
)  # fmt: skip
#: Systems of loopq whose classes no engine has.
NOWHERE = ("coconut", "loopformer", "loopus", "parcae", "trm")
#: Systems that the table speaks of. Another package's are tried, not refused.
KNOWN = frozenset(system for entry in ENTRIES for system in entry.systems) | frozenset(NOWHERE)


def is_embedded(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an embedded model. These are loopq's alone: no engine has their class."""
    return str(config.get("model_type", "")).startswith("loopq-zoo-")


def entry_of(
    engine: str, system: str, format_name: str, config: Mapping[str, Any] | None = None
) -> Support | None:
    """Return what is known of an engine, a system, a format and a model's config.json. None if nothing is."""
    if is_embedded(config or {}) and engine != "llama.cpp":
        return None
    return next((entry for entry in ENTRIES if entry.about(engine, system, format_name, config)), None)
