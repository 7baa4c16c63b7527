"""Tiny random models of looped classes that vendors ship, as folders, and what every one of them must show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import loopq
from loopq.models.load import LoadedModel
from loopq.storage.files import map_tensors
from loopq.systems.base import Batch
from tests.support.kills import Kill, Killer

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def dory(**changes: Any) -> Any:
    """A model of 4 layers, of which 2 run 3 times."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    settings = {"vocab_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "n_input_layers": 1,
                "n_output_layers": 1, "n_recurrent_loops": 3, "sliding_window": 8}  # fmt: skip
    torch.manual_seed(0)
    config = transformers.DoryConfig(**{**SIZES, **settings, **changes})
    return transformers.DoryForCausalLM(config).eval()


def inkling_config(**changes: Any) -> Any:
    """Configuration of a text model of 6 layers: 2 of them run 3 times, and the head is padded on disk."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    settings = {"vocab_size": 72, "unpadded_vocab_size": 64, "num_hidden_layers": 6, "swa_num_attention_heads": 2,
                "swa_num_key_value_heads": 1, "swa_head_dim": 16, "sliding_window_size": 8, "d_rel": 4,
                "rel_extent": 16, "n_layers_per_attn_res_block": 2, "moe_intermediate_size": 16,
                "n_routed_experts": 4, "num_experts_per_tok": 2, "loop_layer_index_start": 2,
                "loop_layer_index_end": 4, "loop_num_passes": 3, "loop_gate_rank": 8}  # fmt: skip
    config: Any = transformers.Inkling2LoopTextConfig(**{**SIZES, **settings, **changes})
    return config


def inkling(**changes: Any) -> Any:
    """A text model with nonzero messages and residuals; the class begins with zeros."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    torch.manual_seed(0)
    model = transformers.Inkling2LoopForCausalLM(inkling_config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.2)
    return model


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nvfp4(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A stack of experts as Inkling's files hold NVFP4, and its values: two codes in a byte, a scale for 16 values.

    The first of two is in the lower half; a factor for each expert is `amax / outer_scale_denominator`.
    """
    denominator, amax = torch.tensor(2688.0), weight.abs().amax(dim=(1, 2))
    factor = (amax / denominator)[:, None, None, None]
    groups = weight.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / (6 * factor)).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    scaled = groups / (scale.float() * factor)
    codes = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
    values = _E2M1[codes] * scaled.sign() * scale.float() * factor
    codes = (codes + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
    stored = {
        name: codes[..., ::2] | codes[..., 1::2] << 4,
        f"{name}_scale": scale[..., 0],
        f"{name}_amax": amax,
        f"{name}_outer_scale_denominator": denominator,
    }
    return stored, values.flatten(-2)


def mxfp8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A stack of experts as Inkling's files hold MXFP8, and its values: a power of two for 32 values."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).log2().floor() - 8
    codes = (groups / exponent.exp2()).to(torch.float8_e4m3fn)
    stored = {name: codes.flatten(-2), f"{name}_scale": (exponent[..., 0] + 127).to(torch.uint8)}
    return stored, (codes.float() * exponent.exp2()).flatten(-2)


def paired(name: str) -> str:
    """Name in files that keep attention and MLP of a layer as two blocks, as the published ones do."""
    match = re.match(r"backbone\.layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)(.*)", name)
    if match is None:
        return name
    second = match[2] in ("mlp", "lambda_2")
    part = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}.get(match[2], "mixer")
    return f"backbone.layers.{2 * int(match[1]) + second}.{part}{match[3]}"


def rename(folder: Path, names: Any) -> None:
    """Give the tensors of a folder other names."""
    file = folder / "model.safetensors"
    tensors = {names(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def tokens(n: int = 4, length: int = 24) -> np.ndarray[Any, Any]:
    """Token ids."""
    return np.random.default_rng(0).integers(0, 60, (n, length))


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Of one prompt at the model's depth."""
    return loaded.system.rollout(Batch(torch.from_numpy(tokens(1)), (0,)), loaded.system.n_steps)


def check_round_trip(source: Path, out: Path, **options: Any) -> loopq.Checkpoint:
    """Quantize with the loop metric, with a kill in between; reload by loopq and by transformers, with equal logits.

    Unchanged tensors keep the name and the bytes of the source.
    """
    transformers = pytest.importorskip("transformers")
    import loopq.runtime.transformers

    given = {"group_size": 16, "metric": "loop", "descent": 2, **options}
    settings = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(Kill):
        loopq.quantize(source, tokens(), out=out / "codes", progress=Killer(6), **settings)
    result = loopq.quantize(source, tokens(), out=out / "codes", **settings)
    whole = loopq.quantize(source, tokens(), **settings)
    assert all(layer.same_as(whole.layers[name]) for name, layer in result.layers.items())
    before, after = (map_tensors(f / "model.safetensors") for f in (source, out / "codes"))
    assert set(result.dense) <= set(before)
    assert all(np.array_equal(after[name].data, before[name].data) for name in result.dense)
    measured = loopq.evaluate(source, [out / "codes"], tokens(2))
    assert 0 < measured[1].kl.mean() < 1
    coded = loopq.load(out / "codes", quantized=True)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(out / "codes", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        reloaded = model.eval()(torch.from_numpy(tokens(1)), use_cache=False).logits
    assert torch.equal(reloaded, logits(coded))
    torch.testing.assert_close(logits(loopq.load(out / "codes")), reloaded, rtol=1e-3, atol=1e-4)
    model.save_pretrained(out / "again")
    saved = load_file(out / "again" / "model.safetensors")
    written = load_file(out / "codes" / "model.safetensors")
    assert set(saved) == set(written)
    assert all(torch.equal(tensor, written[name]) for name, tensor in saved.items())
    return result
