"""Run by the Python of another environment: load folders with the real libraries and write what comes out.

    python library.py JOBS.json

A job is `{"tool", "folder", "out", ...}`; beside `out` goes `out.json` with the error, if there was one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# GPTQModel measures its threads at import, and compiles its reference kernel unless told not to.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

torch.set_num_threads(1)


def logits(model: Any, job: dict[str, Any]) -> np.ndarray:
    """Logits in float32."""
    with torch.no_grad():
        return model.eval()(torch.from_numpy(np.load(job["ids"]))).logits.float().numpy()


@contextlib.contextmanager
def own_names(model_type: str | None) -> Iterator[None]:
    """Let transformers take a model's tensors by the names in the file, without its rules for other files."""
    if model_type is None:
        yield
        return
    from transformers import conversion_mapping as rules

    before = rules.get_checkpoint_conversion_mapping(model_type)
    assert before, f"transformers has no rules for {model_type} any more: the switch is not needed"
    rules.register_checkpoint_conversion_mapping(model_type, [], overwrite=True)
    try:
        yield
    finally:
        rules.register_checkpoint_conversion_mapping(model_type, before, overwrite=True)


def run_transformers(job: dict[str, Any]) -> dict[str, Any]:
    """`AutoModelForCausalLM.from_pretrained`."""
    import transformers

    kwargs: dict[str, Any] = {"dtype": getattr(torch, job["dtype"]), "trust_remote_code": True}
    if job.get("dequantize"):
        kwargs["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    with own_names(job.get("own_names")):
        model = transformers.AutoModelForCausalLM.from_pretrained(job["folder"], **kwargs)
    before = kinds(model, job)
    if job.get("transforms"):
        from compressed_tensors.transform import TransformConfig, apply_transform_config

        apply_transform_config(model, TransformConfig(**job["transforms"]))
    if job.get("again"):
        model.save_pretrained(job["again"])
        for file in Path(job["folder"]).glob("tokenizer*"):
            Path(job["again"], file.name).write_bytes(file.read_bytes())
    np.save(job["out"], logits(model, job))
    return {"modules": before}


def kinds(model: Any, job: dict[str, Any]) -> dict[str, str]:
    """Class of every module that the job names, and whether it came packed."""
    modules = dict(model.named_modules())
    return {
        n: type(modules[n]).__name__ + (" packed" if hasattr(modules[n], "weight_packed") else "")
        for n in job.get("modules", ())
    }


def run_gptqmodel(job: dict[str, Any]) -> dict[str, Any]:
    """`GPTQModel.load` with its plain torch kernel; also the weights that its modules dequantize to."""
    from gptqmodel import BACKEND, GPTQModel

    loaded = GPTQModel.load(
        job["folder"], device="cpu", dtype=torch.float16, backend=BACKEND.GPTQ_TORCH, trust_remote_code=True
    )
    model = loaded.model
    np.save(job["out"], logits(model, job))
    modules = dict(model.named_modules())
    weights = {n: modules[n].dequantize_weight().T.contiguous().float().numpy() for n in job["modules"]}
    np.savez(job["out"] + ".weights.npz", **weights)
    return {"modules": kinds(model, job)}


def run_compress(job: dict[str, Any]) -> dict[str, Any]:
    """Let compressed-tensors itself quantize, pack and save a dense folder; save what it dequantizes to."""
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=getattr(torch, job["dtype"])
    )
    config = QuantizationConfig(**job["config"])
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        width = scheme.weights.group_size or module.weight.shape[1]
        groups = module.weight.detach().unflatten(1, (-1, width))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(job["out"] + ".folder")
    compressor.update_config(job["out"] + ".folder")
    compressor.decompress_model(model)
    np.savez(
        job["out"] + ".weights.npz",
        **{n: dict(model.named_modules())[n].weight.detach().float().numpy() for n in job["modules"]},
    )
    return {}


def run_gptq_quantize(job: dict[str, Any]) -> dict[str, Any]:
    """Let GPTQModel itself quantize and save a dense folder."""
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(job["folder"], QuantizeConfig(**job["config"]), device="cpu")
    ids = np.load(job["ids"])
    model.quantize(
        [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids], batch_size=1
    )
    model.save(job["out"] + ".folder")
    return {}


TOOLS = {
    "transformers": run_transformers,
    "gptqmodel": run_gptqmodel,
    "compress": run_compress,
    "gptq-quantize": run_gptq_quantize,
}


def main() -> None:
    """Run all jobs; an error is a result."""
    for job in json.loads(Path(sys.argv[1]).read_text("utf-8")):
        try:
            result = TOOLS[job["tool"]](job)
        except Exception as error:  # noqa: BLE001  # whatever the library raises is what the test looks at
            result = {"error": f"{type(error).__name__}: {error}"}
        Path(job["out"] + ".json").write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main()
