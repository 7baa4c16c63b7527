"""All pairs of a system and a format: what the gate says, and what the engines that are here make of the file.

`python -m tests.support.pairs` writes the record `benches/record/engines.json` anew, which `python docs/engines.py`
prints. An engine that is not here keeps its last result.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import LoopqError
from loopq.formats.engines.base import Question, Reading, ask, compared
from loopq.formats.rules import READS, entry_of
from loopq.inference.restore import load_checkpoint
from loopq.run.export import round_weights
from loopq.run.gate import Gate
from loopq.systems.base import Batch
from tests.support import systems, vendors
from tests.support.interop import models
from tests.support.interop.environments import interpreter

RECORD = Path(__file__).parents[2] / "benches" / "record" / "engines.json"
IDS = np.random.default_rng(0).integers(4, 60, (2, 8))
#: Which environment has an engine for a format.
KINDS = {"transformers": "ct", "gptqmodel": "gptq", "llama.cpp": "llama", "vllm": "vllm"}
INT4 = {"method": "rtn", "bits": 4, "group_size": 32}
#: Grid of each format, and its options.
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compressed-tensors": (INT4, {"ragged": "split"}),
    "gptq": (INT4, {"ragged": "split"}),
    "gptq_v2": ({**INT4, "symmetric": False}, {"ragged": "split"}),
    "gguf": (INT4, {}),
    "modelopt": ({"method": "rtn", "levels": "nvfp4", "group_size": 16}, {}),
    "marlin": ({**INT4, "group_size": 128}, {}),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny model that an engine may have the class of, and settings of its quantization."""

    build: Callable[[], Any]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def _class(kind: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        config = {
            "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, **settings,
        }  # fmt: skip
        return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))

    return make


def _hrm_text() -> Any:
    return models.tiny_hrm()[0]


LOOP = {"looped_layers": [1, 3, 2]}
_WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
MODELS: dict[str, Model] = {
    "Dory": Model(lambda: vendors.dory(**_WIDE)),
    "Dory, width no multiple of the group": Model(vendors.dory),
    "Inkling-2, padded head": Model(lambda: vendors.inkling(hidden_size=64, head_dim=32, swa_head_dim=32)),
    "Inkling-2, an expert left out": Model(
        lambda: vendors.inkling(hidden_size=64, head_dim=32, swa_head_dim=32), {"exclude": ("*experts*1*",)}
    ),
    "HRM-Text": Model(_hrm_text),
    "looped Llama": Model(_class("Llama", **LOOP)),
    "looped Llama, tied head": Model(_class("Llama", **LOOP, tie_word_embeddings=True)),
    "looped Qwen3": Model(_class("Qwen3", **LOOP)),
    "looped OLMoE, an expert left out": Model(
        _class("Olmoe", **LOOP, num_experts=4, num_experts_per_tok=2), {"exclude": ("*experts.1.*",)}
    ),
    **{
        name: Model(systems.CASES[f"transformers {name}"].build)
        for name in ("ALBERT, head", "Mamba", "Zamba", "Zamba2", "GPT-NeoX Ponder")
    },
}


def save(name: str, folder: Path) -> None:
    """Write a model with a loop that matters, and a tokenizer."""
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(std=0.2)
            elif "lambda" in key or "scale" in key:
                value.mul_(4)
    model.save_pretrained(folder)
    for file, content in models.tokenizer_files(96).items():
        (folder / file).write_bytes(content)


def vocabulary(path: Path, n: int) -> Path:
    """Write a GGUF file with a tokenizer."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(n)])
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
    save(name, work / "m")
    return [_pair(work, name, form) for form in only]


def _pair(work: Path, name: str, form: str) -> Pair:
    grid, options = FORMATS[form]
    if form == "gguf":
        rows = json.loads((work / "m" / "config.json").read_text("utf-8"))["vocab_size"]
        options = {"vocabulary": str(vocabulary(work / "vocabulary.gguf", rows))}
    pair, out = Pair(name, form), work / form
    try:
        result = loopq.quantize(work / "m", IDS.tolist(), threads=1, **{**grid, **MODELS[name].settings})
        pair.system = result.settings["system"]
        config = json.loads(result.side_files["config.json"])
        pair.engines = Gate().of(form, result, options)[0]
    except LoopqError as error:
        pair.refused = str(error)
        if not pair.system:
            return pair
        reading = [engine for engine in KINDS if form in READS[engine]]
        found = {engine: entry_of(engine, pair.system, form, config) for engine in reading}
        pair.named = tuple(engine for engine in READS if _reads(engine, form, result, options))
        pair.wrong = tuple(
            e for e, entry in found.items() if entry and not entry.runs and "run" in entry.known
        )
    try:
        loopq.export(result, out, form, verify=False, force=True, **options)
    except LoopqError as error:
        pair.refused, pair.engines, pair.wrong, pair.named = str(error), (), (), ()
        return pair
    loaded = load_checkpoint(result)
    with torch.no_grad():
        logits = loaded.system.rollout(Batch(torch.from_numpy(IDS), (0, 1)), loaded.system.n_steps)
        round_weights(loaded.model)
        rounded = loaded.system.rollout(Batch(torch.from_numpy(IDS), (0, 1)), loaded.system.n_steps)
    trusted, slack = "remote_code" in options, float((rounded - logits).abs().max())
    pair.question = Question(out, form, IDS, logits.float().numpy(), trusted, slack)
    return pair


def _reads(engine: str, form: str, result: loopq.Checkpoint, options: dict[str, Any]) -> bool:
    try:
        return bool(Gate(engine=engine).of(form, result, options)[0])
    except LoopqError:
        return False


def ask_all(pairs: list[Pair]) -> list[Pair]:
    """Let the engines that are here read the files, each in one process."""
    asked: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        for engine in (*pair.engines, *pair.named, *pair.wrong):
            if engine in KINDS and pair.question is not None:
                kind = (
                    "gptq" if pair.format.startswith("gptq") and engine == "transformers" else KINDS[engine]
                )
                asked.setdefault((engine, kind), []).append(pair)
    for (engine, kind), group in asked.items():
        try:
            python = interpreter(kind)
        except pytest.skip.Exception:
            continue
        questions = [pair.question for pair in group if pair.question is not None]
        for pair, reading in zip(group, ask(engine, questions, python), strict=True):
            pair.readings[engine] = reading
    return pairs


def without_loop(pair: Pair) -> float:
    """Difference of the logits at depth 1, in differences that rounding would explain."""
    assert pair.question is not None
    loaded = loopq.load(pair.question.path)
    with torch.no_grad():
        found = loaded.system.rollout(Batch(torch.from_numpy(IDS), (0, 1)), 1).float().numpy()
    reading = compared("loopq", found, pair.question.expected, "float32")
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


def main() -> None:
    """Walk all pairs and write the record."""
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
    with tempfile.TemporaryDirectory() as place:
        pairs = []
        for number, name in enumerate(MODELS):
            (Path(place) / str(number)).mkdir()
            pairs += written(Path(place) / str(number), name)
        found: dict[str, dict[str, Any]] = {}
        for pair in ask_all(pairs):
            before = record.get(pair.model, {}).get(pair.format, {})
            found.setdefault(pair.model, {})[pair.format] = recorded(pair, before)
    text = json.dumps(found, indent=1).replace(place, "FOLDER")
    RECORD.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
