"""Models of transformers: their class, code of their own, names of the hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import loopq
import loopq.runtime.transformers
from loopq.errors import CheckpointError, ConfigError
from loopq.models.hf import auto_class
from loopq.models.load import load_model
from loopq.storage.files import read_tensors
from tests.support.looped import change, fp8, save_dense
from tests.support.remote import _saved
from tests.support.systems import CASES, build
from tests.support.vendors import logits, tokens


def test_pickled_weights_are_refused_unless_allowed(tmp_path: Path) -> None:
    folder = _saved("transformers HRM-Text", tmp_path)
    model = build(CASES["transformers HRM-Text"])
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights in it"):
        load_model(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model\.bin\)"):
        load_model(folder)
    assert load_model(folder, allow_pickle=True).system.name == "hrm_text"


def test_pooler_may_be_missing(tmp_path: Path) -> None:
    folder = _saved("transformers ALBERT", tmp_path)
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if "pooler" not in k}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = load_model(folder).report
    assert report.missing == ("pooler.bias", "pooler.weight")
    # The replacement is the same each time: equal work gives equal bytes.
    torch.manual_seed(7)
    state = torch.get_rng_state()
    one, other = (load_model(folder).model.pooler.weight for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_remote_code_runs_only_when_trusted(remote_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"code of its own \(modeling_loop\.py\).*--trust-remote-code"):
        load_model(remote_folder)
    loaded = load_model(remote_folder, trust_remote_code=True)
    assert loaded.system.name == "nanbeige"
    assert "modeling_loop.py" in loaded.side_files


def test_remote_code_that_fails_names_a_version_to_try(remote_folder: Path) -> None:
    code = (remote_folder / "modeling_loop.py").read_text()
    (remote_folder / "modeling_loop.py").write_text(code.replace("self.post_init()", "self.gone_in_5()"))
    with pytest.raises(CheckpointError, match=r"gone_in_5.*pip install 'transformers==4\.57\.6'"):
        load_model(remote_folder, trust_remote_code=True)


@pytest.mark.parametrize(
    ("config", "trusted", "expected"),
    [
        ({"architectures": ["HrmTextForCausalLM"]}, False, "AutoModelForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"]}, False, "AutoModelForCausalLM"),
        ({"architectures": ["AlbertForMaskedLM"]}, False, "AutoModelForMaskedLM"),
        ({"architectures": ["AlbertModel"]}, False, "AutoModel"),
        ({"model_type": "mamba"}, False, "AutoModelForCausalLM"),
        ({"model_type": "albert"}, False, "AutoModel"),
        ({"auto_map": {"AutoModel": "a.B"}, "architectures": ["XForCausalLM"]}, True, "AutoModel"),
        (
            {"auto_map": {"AutoModel": "a.B"}, "architectures": ["XForCausalLM"]},
            False,
            "AutoModelForCausalLM",
        ),
    ],
)
def test_auto_class(config: dict[str, Any], trusted: bool, expected: str) -> None:
    assert auto_class(config, trusted) == expected


def test_hub_ids_and_only_those_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(hub_id: str, **settings: Any) -> str:
        asked.append((hub_id, settings["revision"], "*.bin" in settings["allow_patterns"]))
        return str(folder)

    folder = _saved("transformers HRM-Text", tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load_model(folder)
    assert asked == []
    assert load_model("owner/name", revision="abc").system.name == "hrm_text"
    assert asked == [("owner/name", "abc", False)]


def test_a_name_that_the_hub_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        ConfigError, match=r"'owner/name' is no folder, .* cannot be fetched from the hub: no route"
    ):
        load_model("owner/name")


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0", "model": {"type": "none"}}'])
def test_a_broken_tokenizer_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    folder = _saved("transformers HRM-Text", tmp_path)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded") as refused:
        load_model(folder)
    assert "\n" not in str(refused.value)


def test_code_of_a_tokenizer_needs_consent(tmp_path: Path) -> None:
    folder = _saved("transformers HRM-Text", tmp_path)
    (folder / "own.py").write_text("raise SystemExit('code ran')\n")
    settings = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["own.T", "own.T"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_model(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "notes.txt", "chat_template.jinja"])
def test_a_file_beside_the_weights_is_refused_by_its_size(tmp_path: Path, name: str) -> None:
    folder = save_dense(tmp_path / "m")
    with (folder / name).open("ab") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=rf"{name}: {2**40} bytes; allowed: {2**28}"):
        load_model(f"looped:{folder}[1:3]x2")


@pytest.mark.parametrize("name", ["p", "p.safetensors", "p.bin"])
@pytest.mark.parametrize("kind", ["pipe", "device", "outside"])
def test_what_an_index_names_is_looked_at_before_transformers_opens_it(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = save_dense(tmp_path / "m")
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (tmp_path / "b").write_bytes(b"x")
        (folder / name).symlink_to("/dev/zero" if kind == "device" else tmp_path / "b")
    tensors = read_tensors(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    first, *rest = sorted(tensors)
    index = {"weight_map": {first: name, **dict.fromkeys(rest, "a.safetensors")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not a plain file|leads out"):
        load_model(f"looped:{folder}[1:3]x2")


def test_a_pipe_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = save_dense(tmp_path / "m")
    os.mkfifo(folder / "special_tokens_map.json")
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json: not a plain file"):
        load_model(f"looped:{folder}[1:3]x2")


_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("stated", [_BLOCKS, {"quant_method": "odd"}], ids=["fp8", "unknown"])
def test_the_result_has_no_method_of_its_source(tmp_path: Path, stated: dict[str, Any]) -> None:
    folder = save_dense(tmp_path / "m")
    dense = load_file(folder / "model.safetensors")
    change(folder, fp8 if stated is _BLOCKS else lambda n, t: {n: t}, quantization_config=stated)
    (folder / "quantize_config.json").write_text("{}")
    source = f"looped:{folder}[1:3]x2"
    name = "model.layers.1.mlp.up_proj.weight"
    expected = dense[name]
    if stated is _BLOCKS:
        scale = expected.abs().max() / 448
        expected = (expected / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(load_model(source).model.get_parameter(name), expected)
    loopq.quantize(source, tokens(2), out=tmp_path / "q", group_size=16, method="rtn")
    assert not (tmp_path / "q" / "quantize_config.json").exists()
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "loopq"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q").eval()
    with torch.no_grad():
        got = model(torch.from_numpy(tokens(1)), use_cache=False).logits
    torch.testing.assert_close(got, logits(loopq.load(tmp_path / "q")), rtol=1e-4, atol=1e-5)


def test_codes_that_transformers_keeps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_dense(tmp_path / "m")
    monkeypatch.setattr(LlamaForCausalLM, "is_quantized", True, raising=False)
    with pytest.raises(CheckpointError, match="keeps the codes"):
        load_model(f"looped:{folder}[1:3]x2")


def test_codes_of_another_tool_need_the_memory_of_the_whole_model(tmp_path: Path) -> None:
    folder = save_dense(tmp_path / "m")
    change(folder, fp8, quantization_config=_BLOCKS)
    with pytest.raises(CheckpointError, match=r"fp8.* do not fit in the memory"):
        load_model(f"looped:{folder}[1:3]x2", memory=1000)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder, name = save_dense(tmp_path / "m"), "model.layers.1.mlp.up_proj.weight"
    change(folder, lambda n, t: {n: t[:20].clone() if n == name else t})
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight has shape \[20, 32\].*\[48, 32\]"
    ):
        load_model(f"looped:{folder}[1:3]x2")


def test_licence_and_chat_templates_travel_with_the_model(tmp_path: Path) -> None:
    folder, template = save_dense(tmp_path / "m"), "additional_chat_templates/tools.jinja"
    (folder / "additional_chat_templates").mkdir()
    texts = {
        "LICENSE": "Apache",
        "NOTICE.md": "n",
        template: "{{ messages }}",
        "chat_template.jinja": "{{ x }}",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "LICENSES").mkdir()
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    source = f"looped:{folder}[1:3]x2"
    loopq.quantize(source, tokens(2), out=tmp_path / "q", group_size=16, method="rtn", levels="even")
    loopq.export(tmp_path / "q", tmp_path / "ct", "compressed-tensors", remote_code=True, verify=False)
    for place in (tmp_path / "q", tmp_path / "ct"):
        for name in (*texts, "generation_config.json"):
            assert (place / name).read_bytes() == (folder / name).read_bytes()
    assert template in loopq.load(tmp_path / "ct").side_files
    (tmp_path / "q" / template).write_text("other")
    with pytest.raises(CheckpointError, match=r"tools\.jinja"):
        loopq.load(tmp_path / "q")
