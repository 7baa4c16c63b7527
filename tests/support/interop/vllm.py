"""Tiny looped models in vLLM's CPU build, and how far its logits are from loopq's.

Models have random weights. Each is quantized, exported and loaded by vLLM in bfloat16. Log-probabilities of
all tokens of four prompts, and of eight more that vLLM generates one by one from its caches, are compared
with `loopq.load` in float32 on whole texts. Results are the KL in nats per token, and how often the most
likely token agrees. In full precision both have float32. On a processor without AVX-512 vLLM has no int4
product. A plain product replaces it there; everything around it is vLLM's.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import loopq
from benches.zoo.models.llama_loops import OuroConfig, SmallOuro
from benches.zoo.models.rllama import RLlamaConfig, SmallRLlama
from loopq.formats.convert import is_checkpoint
from loopq.models.classes import register_model
from loopq.models.load import load_model
from loopq.systems.base import Batch
from loopq.zoo.huginn import HuginnConfig, SmallHuginn
from tests.support import vendors

SHAPE = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 5e5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
LLAMA = {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "looped_layers": [0, 2, 1]}
OURO = {
    **SHAPE, "architectures": ["OuroForCausalLM"], "model_type": "ouro", "total_ut_steps": 4, "num_key_value_heads": 4,
}  # fmt: skip
HUGINN = {
    "architectures": ["RavenForCausalLM"], "model_type": "huginn_raven", "n_embd": 256, "n_heads": 4, "n_layers": 4,
    "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 1, "mean_recurrence": 6,
    "intermediate_size": 512, "block_size": 512, "vocab_size": 512, "rope_base": 50_000, "norm_eps": 1e-6,
    "qk_bias": False, "bias": False, "tie_word_embeddings": True, "state_init": "like-init",
}  # fmt: skip
RLLAMA = {
    **HUGINN, "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 512,
    "rope_theta": 10_000.0, "init_values": {"std": (2 / (5 * 256)) ** 0.5, "embed_scale": 1.0},
}  # fmt: skip
LOOPED = {
    **LLAMA,
    "architectures": ["LoopedLlamaForCausalLM"],
    "num_hidden_layers": 4,
    "looped_layers": [1, 3, 3],
}
DORY = {
    "model_type": "dory", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "sliding_window": 48,
}  # fmt: skip
#: Token ids of a prompt, and those that are generated after it, one by one from the cache.
LENGTH, MORE = 64, 8
#: Runs in the other environment: a folder and prompts in, token ids and their log-probabilities out.
SERVE = """
import json, os, sys
import numpy as np
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
import torch
from vllm import LLM, SamplingParams, _custom_ops
import vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 as scheme
from vllm.model_executor.kernels.linear import nvfp4
import loopq.runtime.vllm
loopq.runtime.vllm.register()


def plain_product(input, q_weight, scales, zeros, bias, pack_factor, isa_hint):
    # Blocks of 16 outputs; in a block a column of inputs is two words of eight codes.
    codes = q_weight.view(len(q_weight), -1, 2, 1) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    codes = codes.reshape(len(q_weight), -1, 16).transpose(0, 1).flatten(1) - 8
    weight = codes * scales.repeat_interleave(len(codes) // len(scales), 0)
    out = input @ weight.to(input.dtype)
    return out if bias is None else out + bias


if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
    _custom_ops.cpu_gemm_wna16 = plain_product


class PlainFloats(nvfp4.NvFp4LinearKernel):
    is_supported = can_implement = staticmethod(lambda *args: (True, None))

    def process_weights_after_loading(self, layer):
        codes = torch.stack((layer.weight & 15, layer.weight >> 4), -1).flatten(1)
        values = LEVELS[codes.int()].unflatten(1, (-1, 16))
        scales = layer.weight_scale.float() * layer.weight_global_scale
        layer.dense = (values * scales[..., None]).flatten(1)

    def apply_weights(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.dense.to(x.dtype), bias)


LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LEVELS = torch.cat((LEVELS, -LEVELS))
scheme.init_nvfp4_linear_kernel = lambda use_a16: PlainFloats(nvfp4.NvFp4LinearLayerConfig())
folder, prompts, dtype, more, out, overrides, compiled = sys.argv[1:]
prompts = np.load(prompts)
model = LLM(model=folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=not compiled, max_model_len=128,
            max_logprobs=512, hf_overrides=json.loads(overrides))
asked = SamplingParams(max_tokens=int(more), prompt_logprobs=512, logprobs=512, temperature=0, detokenize=False,
                       ignore_eos=True)
found = model.generate([{"prompt_token_ids": row.tolist()} for row in prompts], asked)
tokens = np.array([[*f.prompt_token_ids, *f.outputs[0].token_ids] for f in found])
logits = np.full((*tokens[:, 1:].shape, 512), -np.inf)
for i, prompt in enumerate(found):
    for j, token in enumerate([*prompt.prompt_logprobs[1:], *prompt.outputs[0].logprobs]):
        for k, value in token.items():
            logits[i, j, k] = value.logprob
np.savez(out, tokens=tokens, logits=logits)
"""


def ouro(config: dict[str, Any]) -> torch.nn.Module:
    """Build Ouro's class in small from a published ``config.json``."""
    renamed = {
        "n_embd": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
        "norm_eps": "rms_norm_eps", "rope_base": "rope_theta", "block_size": "max_position_embeddings",
    }  # fmt: skip
    same = ("vocab_size", "intermediate_size", "total_ut_steps")
    return SmallOuro(OuroConfig(**{k: config[v] for k, v in renamed.items()}, **{k: config[k] for k in same}))


def huginn(config: dict[str, Any]) -> torch.nn.Module:
    """Build Huginn's class in small, or R-Llama's, from a published ``config.json``; without biases of q and k."""
    renamed = {
        "n_prelude": "n_layers_in_prelude", "n_core": "n_layers_in_recurrent_block", "n_coda": "n_layers_in_coda",
        "tie_embeddings": "tie_word_embeddings",
    }  # fmt: skip
    same = (
        "n_embd",
        "n_heads",
        "mean_recurrence",
        "intermediate_size",
        "block_size",
        "vocab_size",
        "rope_base",
        "norm_eps",
    )
    settings = {k: config[v] for k, v in renamed.items()} | {k: config[k] for k in same}
    if config.get("init_values", {}).get("embed_scale") == 1.0:
        rope = {"rope_base": config["rope_theta"], "n_kv_heads": config["num_key_value_heads"]}
        return SmallRLlama(RLlamaConfig(**(settings | rope)))
    return SmallHuginn(HuginnConfig(**settings))


CLASSES = {"ouro": ouro, "huginn_raven": huginn}
MODELS = {"Ouro": OURO, "Huginn": HUGINN, "R-Llama": RLLAMA, "Llama with a loop": LOOPED, "Dory": DORY}
#: Another depth by the setting of ``config.json`` that has it.
DEPTHS = {"Ouro": {"total_ut_steps": 2}, "Huginn": {"mean_recurrence": 3}, "Dory": {"n_recurrent_loops": 1}}


def make(folder: Path, config: dict[str, Any]) -> None:
    """Write a tiny model with random weights, vectors included."""
    import transformers

    if config["model_type"] == "dory":
        model = vendors.dory(**{name: value for name, value in config.items() if name != "model_type"})
        with torch.no_grad():
            for name, value in model.named_parameters():
                # As they begin, layers hardly change a state, and logits are nearly equal.
                value.mul_(8 if "lambda" in name else 100 if name == "lm_head.weight" else 1)
                if value.ndim < 2:
                    value.mul_(1 + 0.2 * torch.randn_like(value))
        model.save_pretrained(folder)
        vendors.rename(folder, vendors.paired)
        return
    torch.manual_seed(0)
    if config["model_type"] in CLASSES:
        model = CLASSES[config["model_type"]](config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, initializer_range=0.06))
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim < 2:
                value.add_(torch.randn_like(value), alpha=0.2)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def ours(folder: Path, tokens: NDArray[Any], n_steps: int | None = None) -> NDArray[Any]:
    """Log-probabilities by loopq, (n_prompts, n_tokens - 1, vocabulary), each text run alone and whole."""
    loaded = load_model(str(folder)) if not is_checkpoint(folder) else loopq.load(folder)
    system = loaded.system
    by_text = []
    for row in torch.from_numpy(tokens):
        with torch.no_grad():
            logits = system.rollout(Batch(row[None], (0,), by_token=True), n_steps or system.n_steps)
        by_text.append(logits.log_softmax(-1)[:, :-1].double().numpy())
    return np.concatenate(by_text)


def served(
    python: str, folder: Path, prompts: Path, dtype: str, depth: dict[str, int], compiled: bool = False
) -> dict[str, NDArray[Any]]:
    """Tokens and log-probabilities by vLLM."""
    out = folder.with_suffix(".npz")
    command = [python, "-c", SERVE, str(folder), str(prompts), dtype, str(MORE), str(out), json.dumps(depth)]
    command.append("compiled" * compiled)
    env = os.environ | {"PYTHONPATH": str(Path(loopq.__file__).parents[1])}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    return dict(np.load(out))


def compared(
    python: str, theirs: Path, folder: Path, work: Path, dtype: str, depth: dict[str, int] | None = None,
    compiled: bool = False,
) -> dict[str, float]:  # fmt: skip
    """KL and agreement of a folder in vLLM with one in loopq.

    `prompt` is over the tokens of the prompts, which vLLM computes at once, `generated` over those that it computes one
    by one from its caches. `depth` is a setting of ``config.json`` with another number of loops.
    """
    got = served(python, theirs, work / "prompts.npy", dtype, depth or {}, compiled)
    expected = ours(folder, got["tokens"], *(depth or {}).values())
    kl = (np.exp(expected) * (expected - got["logits"])).sum(-1)
    same = expected.argmax(-1) == got["logits"].argmax(-1)
    return {
        "prompt": float(kl[:, : LENGTH - 1].mean()),
        "generated": float(kl[:, LENGTH - 1 :].mean()),
        "agreement": float(same.mean()),
    }


@functools.cache
def known() -> None:
    """Make the small classes known, once in a process."""
    for name, cls in CLASSES.items():
        register_model(name, cls)


def prepared(work: Path) -> Path:
    """Make the small classes known and put the prompts into a folder."""
    known()
    prompts = np.random.default_rng(0).integers(3, 500, (20, LENGTH))
    np.save(work / "calibration.npy", prompts[:16])
    np.save(work / "prompts.npy", prompts[16:])
    return work


def in_full(python: str, work: Path, model: str) -> dict[str, float]:
    """Make a model of `MODELS` and compare it in full precision, float32 in both."""
    make(work / model, MODELS[model])
    return compared(python, work / model, work / model, work, "float32")


def at_depth(python: str, work: Path, model: str) -> dict[str, float]:
    """The same at another depth of `DEPTHS`."""
    return compared(python, work / model, work / model, work, "float32", DEPTHS[model])


def in_codes(python: str, work: Path, model: str, grid: dict[str, Any]) -> dict[str, float]:
    """Compare the compressed-tensors export of a model that `in_full` made, on a grid."""
    name = "-".join(map(str, (model, *grid.values())))
    quantized, exported = work / name, work / f"{name}-exported"
    calibration = np.load(work / "calibration.npy").tolist()
    loopq.quantize(work / model, calibration, out=quantized, preset="fast", **grid)
    loopq.export(quantized, exported, "compressed-tensors", engine="vllm", verify=False)
    return compared(python, exported, quantized, work, "bfloat16")


def in_native(python: str, work: Path, model: str, **settings: Any) -> dict[str, float]:
    """Compare the native checkpoint of a model, float32 in both. vLLM compiles the model, as `vllm serve` does."""
    make(work / model, MODELS[model])
    calibration = np.load(work / "calibration.npy").tolist()
    quantized = work / f"{model}-native"
    loopq.quantize(work / model, calibration, out=quantized, **settings)
    return compared(python, quantized, quantized, work, "float32", compiled=True)
