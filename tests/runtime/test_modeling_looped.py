"""The code beside an export runs the loop in transformers, in a process that cannot import loopq."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import loopq
from loopq.errors import CheckpointError, ConfigError
from loopq.formats.convert import read_any
from loopq.formats.hf_folder import looped_files
from loopq.layers.loop_spec import with_loop
from loopq.models.load import load_model
from loopq.runtime.modeling_looped import LoopedConfig, _model_class, run_order
from loopq.systems.base import Batch

LOOP, STEPS = "[1:3]x3", 3
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
#: Loads with code and writes four results: logits, whether a cache changes the tokens, its slots, and the
#: differences of a saved model.
ENGINE = """
import importlib.util, os, sys
sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p, "loopq"))]
assert importlib.util.find_spec("loopq") is None
import torch
from transformers import AutoModelForCausalLM
folder, place, ids = sys.argv[1], sys.argv[2], torch.load(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
told = {"max_new_tokens": 5, "do_sample": False}
with torch.no_grad():
    found = model(ids)
    tokens = [model.generate(ids, use_cache=cache, **told) for cache in (True, False)]
made = {"logits": found.logits, "tokens": tokens, "slots": len(found.past_key_values.layers)}
model.save_pretrained(place + "-again")
again = AutoModelForCausalLM.from_pretrained(place + "-again", trust_remote_code=True).eval()
with torch.no_grad():
    made["again"] = again(ids).logits
torch.save(made | {"stored": model.config.to_dict()["num_hidden_layers"]}, place)
"""


def _ids() -> torch.Tensor:
    return torch.randint(2, 64, (2, 10), generator=torch.Generator().manual_seed(1))


def _dense(place: Path, kind: str) -> Path:
    torch.manual_seed(0)
    more = {"Olmoe": {"num_experts": 4, "num_experts_per_tok": 2}, "Qwen3": {"head_dim": 8}}.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(place)
    return place


def _quantized(place: Path, kind: str = "Llama") -> Path:
    ids = [row.tolist() for row in _ids()]
    spec = f"looped:{_dense(place / 'm', kind)}{LOOP}"
    loopq.quantize(spec, ids, out=place / "q", group_size=16, preset="fast", seq_len=10)
    return place / "q"


def _logits(folder: Path) -> torch.Tensor:
    return loopq.load(folder).system.rollout(Batch(_ids(), (0, 1)), STEPS)


def _elsewhere(folder: Path, place: Path) -> dict[str, Any]:
    torch.save(_ids(), place / "ids.pt")
    command = [sys.executable, "-I", "-c", ENGINE, folder, place / "out.pt", place / "ids.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place)
    assert done.returncode == 0, done.stderr[-2000:]
    outputs: dict[str, Any] = torch.load(place / "out.pt")
    return outputs


def _check(outputs: dict[str, Any], expected: torch.Tensor) -> None:
    torch.testing.assert_close(outputs["logits"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs["again"], outputs["logits"])
    assert torch.equal(*outputs["tokens"])
    # A slot for each run of a layer, and each layer once in the file.
    assert (outputs["slots"], outputs["stored"]) == (8, 4)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Olmoe"])
def test_code_beside_a_model_runs_its_loop_without_loopq(tmp_path, kind):
    folder = _dense(tmp_path / "m", kind)
    rollout = load_model(f"looped:{folder}{LOOP}").system.rollout
    config = with_loop(json.loads((folder / "config.json").read_text()), [1, 3, 3])
    for name, data in looped_files({"config.json": json.dumps(config).encode()}, remote_code=True).items():
        (folder / name).write_bytes(data)
    expected = rollout(Batch(_ids(), (0, 1)), STEPS)
    _check(_elsewhere(folder, tmp_path), expected)
    # loopq needs none of that code.
    assert torch.equal(load_model(folder).system.rollout(Batch(_ids(), (0, 1)), STEPS), expected)


def test_compressed_tensors_with_code_run_the_loop(tmp_path):
    pytest.importorskip("compressed_tensors")
    folder = _quantized(tmp_path)
    loopq.export(folder, tmp_path / "ct", "compressed-tensors", remote_code=True)
    _check(_elsewhere(tmp_path / "ct", tmp_path), _logits(folder))
    assert torch.equal(_logits(tmp_path / "ct"), _logits(folder))
    # What transformers saved again has plain weights and the code of the loop.
    again = tmp_path / "out.pt-again"
    assert (again / "modeling_looped.py").read_bytes() == (
        tmp_path / "ct" / "modeling_looped.py"
    ).read_bytes()
    with pytest.raises(CheckpointError, match=r"remove quantization_config from config\.json"):
        loopq.load(again)
    config = json.loads((again / "config.json").read_text())
    del config["quantization_config"]
    (again / "config.json").write_text(json.dumps(config))
    dense = load_model(again).system.rollout(Batch(_ids(), (0, 1)), STEPS)
    torch.testing.assert_close(dense, _logits(folder), rtol=1e-4, atol=1e-4)


def test_plain_transformers_refuses_the_type_of_a_loop(tmp_path):
    folder = _quantized(tmp_path)
    loopq.export(folder, tmp_path / "ct", "compressed-tensors")
    plain = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    for place in (folder, tmp_path / "ct"):
        config = json.loads((place / "config.json").read_text())
        assert (config["model_type"], config["looped_base"]) == ("loopq_looped", "llama")
        done = subprocess.run(
            [sys.executable, "-c", plain, place], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "loopq_looped" in done.stderr


def test_a_folder_of_an_older_loopq_opens_and_gets_the_type(tmp_path):
    folder = _quantized(tmp_path)
    stored = read_any(folder)
    config = json.loads(stored.side_files["config.json"])
    del config["looped_base"]
    stored.side_files["config.json"] = json.dumps(config | {"model_type": "llama"}).encode()
    assert torch.equal(loopq.load(stored).system.rollout(Batch(_ids(), (0, 1)), STEPS), _logits(folder))
    loopq.export(stored, tmp_path / "ct", "compressed-tensors")
    assert json.loads((tmp_path / "ct" / "config.json").read_text())["model_type"] == "loopq_looped"


def test_code_of_a_loop_is_refused_for_other_models():
    with pytest.raises(ConfigError, match="--remote-code"):
        looped_files({"config.json": b'{"model_type": "llama"}'}, remote_code=True)


def test_a_looped_folder_without_its_base_is_refused(tmp_path):
    folder = _dense(tmp_path / "m", "Llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "loopq_looped"}))
    with pytest.raises(ConfigError, match="looped_base"):
        load_model(folder)


@pytest.mark.parametrize(
    "loop", [None, [1, 3], [1, 3, 2.0], [3, 3, 2], [1, 5, 2], [1, 3, 0], [1, 3, 1 << 17]]
)
def test_code_beside_a_model_refuses_a_loop_that_it_cannot_have(loop):
    with pytest.raises(ValueError, match=r"looped_layers .*: give FIRST < LAST <= 4"):
        run_order(loop, 4)


def test_code_beside_a_model_refuses_an_unknown_base():
    with pytest.raises(ValueError, match="looped_base is 'nothing', which this transformers does not know"):
        LoopedConfig.from_dict({"looped_base": "nothing"})


def test_a_model_that_was_saved_again_keeps_its_names(tmp_path: Path) -> None:
    """Its class has the name of the dense one, by which transformers renames tensors of the files."""
    folder = _quantized(tmp_path)
    loopq.export(folder, tmp_path / "ct", "compressed-tensors", remote_code=True, verify=False)
    before = json.loads((tmp_path / "ct" / "config.json").read_text("utf-8"))
    config = LoopedConfig.from_pretrained(tmp_path / "ct")
    model = _model_class(type(config))
    assert model.__name__ == "LlamaForCausalLM"
    config.architectures = [model.__name__]
    assert config.to_dict()["architectures"] == before["architectures"] == ["LoopedLlamaForCausalLM"]
