"""All pairs of a system and a format: what the gate says, and what the engines that are here make of the file.

`python -m tests.support.pairs` writes the record `benches/record/engines.json` anew, which `python docs/engines.py`
prints; names of models after it walk those alone. An engine that is not here keeps its last result, with its date.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import loopq
from benches.pages import json_lines
from benches.quality.peers_table import processor
from loopq.errors import LoopqError
from loopq.formats.engines.base import Question, Reading, ask, compared
from loopq.formats.hf_folder import looped_files
from loopq.formats.native import NATIVE
from loopq.formats.support import READS, entry_of
from loopq.models.load import load_model
from loopq.models.restore import load_checkpoint
from loopq.run.config import Override, QuantConfig
from loopq.run.export import expected_of, quantized_format, round_weights
from loopq.run.gate import Expectation, Gate
from loopq.systems.base import Batch
from tests.support import coded, systems, vendors
from tests.support.experts import routed_loop
from tests.support.interop import models
from tests.support.interop.environments import interpreter

RECORD = Path(__file__).parents[2] / "benches" / "record" / "engines.json"
IDS = np.random.default_rng(0).integers(4, 60, (2, 8))
#: Which environment has an engine for a format.
KINDS = {"transformers": "ct", "gptqmodel": "gptq", "llama.cpp": "llama", "vllm": "vllm"}
INT4 = {"method": "rtn", "bits": 4, "group_size": 32}
#: Answers of transformers to native files, which it reads by loopq's integration.
INTEGRATED = (
    "import runpy, loopq.runtime.transformers; runpy.run_module('loopq.formats.engines', run_name='__main__')"
)
#: Grid of each format, and its options.
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    NATIVE.name: (INT4, {}),
    "compressed-tensors": (INT4, {"ragged": "split"}),
    "gptq": (INT4, {"ragged": "split"}),
    "gptq_v2": ({**INT4, "symmetric": False}, {"ragged": "split"}),
    "gguf": (INT4, {}),
    "modelopt": ({"method": "rtn", "levels": "nvfp4", "group_size": 16}, {}),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny model that an engine may have the class of, and settings of its quantization."""

    build: Callable[[], Any]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Options of the formats that are folders.
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Engines that need parts of the published code, which the small class does not have.
    unasked: tuple[str, ...] = ()


def _class(kind: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        config = {
            "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, **settings,
        }  # fmt: skip
        text = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
        return getattr(transformers, f"{kind}ForCausalLM")(text(**config))

    return make


def _hrm_text() -> Any:
    return models.tiny_hrm()[0]


def _zoo(name: str, **changes: Any) -> Callable[[], Any]:
    """A small class whose folder has code of its own."""
    return systems.small(name, **{"vocab_size": 64, "n_embd": 64, "intermediate_size": 96, **changes})


LOOP = {"looped_layers": [1, 3, 2]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_CODE = {"remote_code": True}
_WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
_TWO_GRIDS = {"config": QuantConfig.of(Override("*down_proj*", {"group_size": 16}))}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_ROTARY = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
_ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_MIXED = {"moe_intermediate_size": 32, "pad_token_id": 0, **_EXPERTS}
_LINEAR = {f"linear_{part}": n for part, n in (
    ("num_value_heads", 4), ("num_key_heads", 2), ("key_head_dim", 16), ("value_head_dim", 16))}  # fmt: skip
#: Decoders that a `looped:` name may have, beside those above: settings of a small one of each class.
DECODERS: dict[str, dict[str, Any]] = {
    "Llama, gelu and llama3 rotary": {"hidden_act": "gelu", "rope_parameters": _ROTARY, "max_position_embeddings": 256},
    "Mistral, windows": {"sliding_window": 4},
    "Ministral, windows": _ALTERNATING,
    "Qwen2, windows": {"use_sliding_window": True, **_ALTERNATING},
    "Gemma": {},
    "Gemma2, windows": _ALTERNATING,
    "Gemma3, windows": _ALTERNATING,
    "Gemma4": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, **_ALTERNATING,
    },
    "Phi": {},
    "Phi3": {"pad_token_id": 0},
    "Granite": {
        "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25,
    },
    "SmolLM3": {"pad_token_id": 0},
    "Cohere": {},
    "Olmo2": {},
    "Glm4": {"pad_token_id": 0},
    "Starcoder2": {"sliding_window": None},
    "Ernie4_5": {},
    "Exaone4": _ALTERNATING,
    "Lfm2": {"block_ff_dim": 96, "layer_types": ["conv", "full_attention"] * 2},
    "GPTNeoX": {},
    "GPTBigCode": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 96, "n_positions": 64},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, **_ALTERNATING},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": _MIXED,
    "Qwen3Next": {
        **_MIXED, **_LINEAR, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}  # fmt: skip
_DEEP = {"n_prelude": 1, "n_coda": 1, "mean_recurrence": 3}
MODELS: dict[str, Model] = {
    "Dory": Model(lambda: vendors.dory(**_WIDE)),
    "Dory, width no multiple of the group": Model(vendors.dory),
    "Dory, two grids and a dense layer": Model(
        lambda: vendors.dory(**_WIDE), {**_TWO_GRIDS, "exclude": ("*o_proj*",)}
    ),
    "Inkling-2, padded head": Model(lambda: vendors.inkling(hidden_size=64, head_dim=32, swa_head_dim=32)),
    "Inkling-2, an expert left out": Model(
        lambda: vendors.inkling(hidden_size=64, head_dim=32, swa_head_dim=32), {"exclude": ("*experts*1*",)}
    ),
    "Inkling-2, dense experts": Model(
        lambda: vendors.inkling(hidden_size=64, head_dim=32, swa_head_dim=32), {"exclude": ("*experts*",)}
    ),
    "HRM-Text": Model(_hrm_text),
    "HRM-Text, two grids and a dense layer": Model(_hrm_text, {**_TWO_GRIDS, "exclude": ("*o_proj*",)}),
    "looped Llama": Model(_class("Llama", **LOOP)),
    "looped Llama, tied head": Model(_class("Llama", **LOOP, tie_word_embeddings=True)),
    "looped Llama, all layers": Model(_class("Llama", looped_layers=[0, 4, 3])),
    "looped Llama, code": Model(_class("Llama", **LOOP), {}, _CODE),
    "looped Llama, tied head, code": Model(_class("Llama", **LOOP, tie_word_embeddings=True), {}, _CODE),
    "looped Llama, biases, code": Model(_class("Llama", **LOOP, **_BIASED), {}, _CODE),
    "looped Llama, width no multiple of the group, code": Model(
        _class("Llama", **LOOP, intermediate_size=80), {}, _CODE
    ),
    "looped Llama, two grids and a dense layer, code": Model(
        _class("Llama", **LOOP), {**_TWO_GRIDS, "exclude": ("*o_proj*",)}, _CODE
    ),
    "looped Qwen2, biases, code": Model(_class("Qwen2", **LOOP), {}, _CODE),
    "looped Qwen3": Model(_class("Qwen3", **LOOP)),
    "looped Qwen3, code": Model(_class("Qwen3", **LOOP), {}, _CODE),
    "looped OLMoE, an expert left out": Model(
        _class("Olmoe", **LOOP, **_EXPERTS), {"exclude": ("*experts.1.*",)}
    ),
    "looped OLMoE, an expert left out, code": Model(
        _class("Olmoe", **LOOP, **_EXPERTS), {"exclude": ("*experts.1.*",)}, _CODE
    ),
    "looped OLMoE, code": Model(_class("Olmoe", **LOOP, **_EXPERTS), {}, _CODE),
    **{
        f"looped {name}, code": Model(_class(name.partition(",")[0], **LOOP, **more), {}, _CODE)
        for name, more in DECODERS.items()
    },
    "Ouro": Model(_zoo("ouro", total_ut_steps=3, n_heads=4), unasked=("gptqmodel",)),
    "Nanbeige": Model(_zoo("nanbeige", n_heads=4, head_dim=16, n_kv_heads=2)),
    "Huginn": Model(_zoo("huginn", **_DEEP)),
    "R-Llama": Model(_zoo("rllama", n_heads=4, **_DEEP)),
    "IQuest": Model(_zoo("iquest", n_heads=4, loop_num=2, loop_window_size=4)),
    "LoopFormer": Model(_zoo("loopformer")),
    "Parcae": Model(_zoo("parcae", **_DEEP)),
    "COCONUT": Model(_zoo("coconut", intermediate_size=256)),
    "Ponder": Model(_zoo("ponder", pondering_steps=3)),
    "LoopUS": Model(systems.CASES["LoopUS"].build),
    "TRM": Model(systems.CASES["TRM"].build),
    "any torch module": Model(routed_loop),
    **{
        name: Model(systems.CASES[f"transformers {name}"].build)
        for name in ("ALBERT, head", "Mamba", "Zamba", "Zamba2", "GPT-NeoX Ponder")
    },
}


def save(name: str, folder: Path) -> Any:
    """Write a model with a loop that matters, and a tokenizer; return the folder, or the model of a class without."""
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(std=0.2)
            elif "lambda" in key or "scale" in key:
                value.mul_(4)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    elif not hasattr(getattr(model, "config", None), "to_dict"):
        return model
    else:
        coded.save(model, folder)
    rows = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    for file, content in models.tokenizer_files(rows).items():
        (folder / file).write_bytes(content)
    return folder


def vocabulary(path: Path, n: int) -> Path:
    """Write a GGUF file with the tokenizer of `save`, whose kind loopq does not read."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, n))])
    writer.add_token_scores([0.5] * n)
    writer.add_token_types([1] * n)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    return path


@dataclasses.dataclass
class Pair:
    """A model in a format: the reason of a refusal, or the file and the engines that are to read it."""

    model: str
    format: str
    system: str = ""
    refused: str = ""
    engines: tuple[str, ...] = ()
    question: Question | None = None
    #: Engines that read it, where others read it wrong without an error.
    named: tuple[str, ...] = ()
    #: The engine must read it wrong: the refusal says that it was run.
    wrong: tuple[str, ...] = ()
    readings: dict[str, Reading] = dataclasses.field(default_factory=dict)


def written(work: Path, name: str, only: tuple[str, ...] = tuple(FORMATS)) -> list[Pair]:
    """Quantize a model and write it in each format, also where the gate refuses it on the word of a run."""
    source = save(name, work / "m")
    made: dict[str, _Made] = {}
    return [_pair(work, source, name, form, made) for form in only]


@dataclasses.dataclass
class _Made:
    """A model quantized on one grid, which several formats share, and what engines must say of it."""

    result: loopq.Checkpoint
    expected: Expectation | None = None

    def asked(self) -> Expectation:
        """Return logits of loopq, with the difference that weights in float16 make."""
        if self.expected is None:
            loaded = load_checkpoint(self.result, trust_remote_code=True)
            expected = expected_of(loaded, torch.from_numpy(IDS))
            assert expected is not None
            self.expected = dataclasses.replace(expected, slack=round_weights(loaded, expected))
        return self.expected


def _quantized(source: Any, name: str, grid: dict[str, Any], made: dict[str, _Made]) -> _Made:
    settings = {**grid, **MODELS[name].settings}
    key = repr(settings)
    if key not in made:
        saved = isinstance(source, Path)
        length = getattr(getattr(source, "config", None), "seq_len", 8)
        loaded = load_model(source, trust_remote_code=True) if saved else source
        made[key] = _Made(loopq.quantize(loaded, np.resize(IDS, (2, length)).tolist(), threads=1, **settings))
    return made[key]


def _pair(work: Path, source: Any, name: str, form: str, made: dict[str, _Made]) -> Pair:
    grid, options = FORMATS[form]
    saved = isinstance(source, Path)
    if form == "gguf" and saved:
        rows = json.loads((source / "config.json").read_text("utf-8"))["vocab_size"]
        options = {"vocabulary": str(vocabulary(work / "vocabulary.gguf", rows))}
    elif form != NATIVE.name:
        options = {**options, **MODELS[name].options}
    pair, out = Pair(name, form), work / form
    try:
        quantized = _quantized(source, name, grid, made)
        result = quantized.result
        pair.system = result.settings["system"]
        files = looped_files(result.side_files, bool(options.get("remote_code")))
        config = json.loads(files.get("config.json", "{}"))
        if form == NATIVE.name:
            others = tuple(engine for engine in READS if _reads(engine, form, result, options))
            pair.engines = ("loopq", *others)
        else:
            pair.engines = Gate().of(form, result, quantized_format(form).taken(options))[0]
    except LoopqError as error:
        pair.refused = str(error)
        if not pair.system:
            return pair
        reading = [engine for engine in KINDS if form in READS[engine]]
        entries = {engine: entry_of(engine, pair.system, form, config) for engine in reading}
        pair.named = tuple(engine for engine in READS if _reads(engine, form, result, options))
        pair.wrong = tuple(
            e for e, entry in entries.items() if entry and not entry.runs and "run" in entry.known
        )
    try:
        loopq.export(result, out, form, verify=False, force=True, **options)
    except LoopqError as error:
        pair.refused, pair.engines, pair.wrong, pair.named = str(error), (), (), ()
        return pair
    if saved:
        pair.question = quantized.asked().of(out, form, trust_remote_code=True)
    elif form == NATIVE.name:
        found, expected = (_filled(place, source) for place in (out, result))
        pair.readings["loopq"] = compared("loopq", found, expected, "float32")
    return pair


def _filled(checkpoint: Any, model: Any) -> NDArray[np.float32]:
    """Outputs of a model of a class that loopq does not build, with the weights of a checkpoint."""
    system = loopq.load(checkpoint, copy.deepcopy(model)).system
    ids = np.resize(IDS, (2, getattr(getattr(model, "config", None), "seq_len", 8)))
    with torch.no_grad():
        values: NDArray[np.float32] = (
            system.rollout(Batch(torch.from_numpy(ids), (0, 1)), system.n_steps).float().numpy()
        )
    return values


def _reads(engine: str, form: str, result: loopq.Checkpoint, options: dict[str, Any]) -> bool:
    try:
        return bool(Gate(engine=engine).of(form, result, quantized_format(form).taken(options))[0])
    except LoopqError:
        return False


def ask_all(pairs: list[Pair]) -> list[Pair]:
    """Let the engines that are here read the files, each in one process."""
    asked: dict[tuple[str, str, bool], list[Pair]] = {}
    for pair in pairs:
        for engine in (*pair.engines, *pair.named, *pair.wrong):
            if pair.question is None or engine in MODELS[pair.model].unasked:
                continue
            if engine == "loopq":
                pair.readings[engine] = _own(pair.question)
            elif engine in KINDS:
                kind = (
                    "gptq" if pair.format.startswith("gptq") and engine == "transformers" else KINDS[engine]
                )
                asked.setdefault((engine, kind, pair.format == NATIVE.name), []).append(pair)
    for (engine, kind, native), group in asked.items():
        try:
            python = interpreter(kind)
        except pytest.skip.Exception:
            continue
        questions = [pair.question for pair in group if pair.question is not None]
        if native:
            # Only the integration tells an engine of this format, and it is not asked after an export.
            questions = [dataclasses.replace(q, format="compressed-tensors") for q in questions]
        program = {"program": ("-c", INTEGRATED)} if native else {}
        for pair, reading in zip(group, ask(engine, questions, python, **program), strict=True):
            pair.readings[engine] = reading
    return pairs


def _own(question: Question) -> Reading:
    """What loopq makes of a file that it reads from the disk."""
    logits = _logits(question, None)
    return compared("loopq", logits, question.expected, "float32")


def _logits(question: Question, steps: int | None) -> NDArray[np.float32]:
    system = loopq.load(question.path, trust_remote_code=True).system
    batch = Batch(torch.from_numpy(question.ids), (0,) * len(question.ids), by_token=True)
    with torch.no_grad():
        logits = system.rollout(batch, steps or system.n_steps)
    values: NDArray[np.float32] = logits.float().numpy()
    return values


def without_loop(pair: Pair) -> float:
    """Difference of the logits at depth 1, in differences that rounding would explain."""
    assert pair.question is not None
    reading = compared("loopq", _logits(pair.question, 1), pair.question.expected, "float32")
    assert reading.difference is not None
    return reading.difference / reading.allowed


def recorded(pair: Pair, before: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a pair in the record: a refusal with what an engine made of the forced file, or readings."""
    today = datetime.date.today().isoformat()
    said = {
        engine: {**dataclasses.asdict(reading), "date": today} for engine, reading in pair.readings.items()
    }
    kept = {
        e: r for e, r in before.get("readings", {}).items() if e in (*pair.engines, *pair.named, *pair.wrong)
    }
    return {
        "system": pair.system, "refused": pair.refused, "engines": list(pair.engines),
        "named": list(pair.named), "readings": kept | said
    }  # fmt: skip


def main(*only: str) -> None:
    """Walk all pairs, or those of some models, and write the record."""
    record = json.loads(RECORD.read_text("utf-8"))["pairs"] if RECORD.is_file() else {}
    with tempfile.TemporaryDirectory() as place:
        pairs = []
        for number, name in enumerate(only or MODELS):
            (Path(place) / str(number)).mkdir()
            pairs += written(Path(place) / str(number), name)
            print(name, file=sys.stderr)
        walked: dict[str, dict[str, Any]] = {}
        for pair in ask_all(pairs):
            before = record.get(pair.model, {}).get(pair.format, {})
            walked.setdefault(pair.model, {})[pair.format] = recorded(pair, before)
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%s"], cwd=RECORD.parent, capture_output=True, text=True, check=True
    )
    about = {
        "command": "python -m tests.support.pairs",
        "commit": commit.stdout.strip(),
        "cpu": processor(),
        "date": datetime.date.today().isoformat(),
    }
    walked = {name: walked.get(name, record.get(name, {})) for name in MODELS}
    text = json_lines({"about": about, "pairs": walked}, 3).replace(place, "FOLDER")
    RECORD.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
