"""Small models that the interop tests export, and their checkpoints made by rounding."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import loopq._native as native
from loopq.formats.checkpoint import Checkpoint
from loopq.layers.layer import QuantizedLayer
from loopq.quantizers.grid import GridSettings
from loopq.storage.model_files import model_tensors


def linear_names(model, leave=("lm_head",)):
    """Names of the linear layers that are quantized."""
    return [
        n
        for n, m in model.named_modules()
        if type(m) is torch.nn.Linear and not any(part in n for part in leave)
    ]


def rounded(
    name,
    weight,
    *,
    bits,
    group_size,
    symmetric=True,
    scale_dtype="float16",
    scale_bits=None,
    orientation="out_in",
    levels="even",
):
    """A layer rounded to nearest."""
    settings = GridSettings(bits, group_size, symmetric, levels, scale_dtype)
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    grid = settings.make().fitted(weight, None, 1)
    core = grid.core(scale_bits=scale_bits)
    solved = native.rtn(weight, core)
    return QuantizedLayer(name, grid, solved["codes"], solved["scales"], solved["zeros"], orientation)


def checkpoint_of(model, config, *, leave=("lm_head",), side=None, **grid):
    """Round every linear layer of a model; `config` is what config.json says."""
    tensors, ties = model_tensors(model)
    layers = {}
    for module in linear_names(model, leave):
        name = f"{module}.weight"
        if name in ties:
            continue
        layers[name] = rounded(name, tensors[name].float32(), **grid)
    dense = {n: t for n, t in tensors.items() if n not in layers}
    files = {"config.json": (json.dumps(config, indent=2) + "\n").encode(), **(side or {})}
    return Checkpoint(layers, dense, ties, {"system": None}, files)


def tiny_llama(dtype="float32", **changes):
    """A Llama of two layers with random weights, its config, and what is left dense."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    for parameter in model.parameters():
        # Rotary tables stay in float32, as transformers keeps them when it loads a model.
        parameter.data = parameter.data.to(getattr(torch, dtype))
    config = model.config.to_dict()
    config["architectures"] = ["LlamaForCausalLM"]
    return model, config


def tiny_hrm():
    """transformers' HRM-Text with random weights."""
    pytest.importorskip("transformers", minversion="5.9")
    from transformers import HrmTextConfig, HrmTextForCausalLM

    settings = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "num_layers_per_stack": 2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = HrmTextForCausalLM(HrmTextConfig(**settings)).eval()
    config = model.config.to_dict()
    config["architectures"] = ["HrmTextForCausalLM"]
    return model, config


def _code(name):
    """A module of `code/`, under a name that pickles of nothing depend on."""
    path = Path(__file__).parent / "code" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, {path.name: path.read_bytes()}


def looped_code():
    """A looped model with its code in the checkpoint; returns the code files too."""
    module, files = _code("modeling_loop")
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model = module.LoopForCausalLM(module.LoopConfig()).eval()
    return model, _with_code(model, "modeling_loop", "LoopConfig", "LoopForCausalLM"), files


def streams(**changes):
    """SenseNova-Loop's shape: 4 of 6 layers run twice, 24 of 32 do there; returns the code files too."""
    pytest.importorskip("transformers", minversion="5.24")
    module, files = _code("modeling_streams")
    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_experts": 0, "loop_settings": {"start": 1, "end": 5, "eval_count": 2},
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = module.StreamsForCausalLM(module.StreamsConfig(**(settings | changes))).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name and parameter.ndim == 2:
                    parameter.normal_(std=0.1)
    return model, _with_code(model, "modeling_streams", "StreamsConfig", "StreamsForCausalLM"), files


def wrapped_zoo():
    """The embedded model's class in the wrapper that transformers loads; returns the code files too."""
    module, files = _code("modeling_loopq_zoo")
    inner = {
        "model_type": "loopq-zoo-huginn", "n_embd": 64, "n_heads": 2, "intermediate_size": 96, "mean_recurrence": 4,
        "vocab_size": 96, "block_size": 32,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(10)
        model = module.LoopqZooForCausalLM(module.LoopqZooConfig(zoo=inner)).eval()
    return model, _with_code(model, "modeling_loopq_zoo", "LoopqZooConfig", "LoopqZooForCausalLM"), files


def _with_code(model, module, config_class, model_class):
    config = model.config.to_dict()
    config["architectures"] = [model_class]
    config["auto_map"] = {
        "AutoConfig": f"{module}.{config_class}",
        "AutoModelForCausalLM": f"{module}.{model_class}",
    }
    return config


def prompts(n=3, length=12, vocab=96):
    """Token ids of a few prompts."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, vocab, (n, length), generator=generator)


def put_in(model, checkpoint, dtype=None):
    """Put dequantized weights into a model, rounded to its type."""
    from loopq.formats.checkpoint import load_into

    load_into(model, checkpoint)
    return model if dtype is None else model.to(dtype)


def logits_of(model, ids):
    """Logits in float32."""
    with torch.no_grad():
        return model(ids).logits.float().numpy()


def tokenizer_files(vocab=96):
    """Files of a tokenizer of single words; GPTQModel does not load a model without one."""
    import tempfile

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}
