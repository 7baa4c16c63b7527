"""Folders as Hugging Face lays them out: shards, side files, ties."""

from __future__ import annotations

import copy
import json

import pytest

from loopq.errors import CheckpointError, ConfigError
from loopq.formats import hf_folder
from loopq.formats.convert import read_any, write_as
from loopq.formats.record import RECORD
from loopq.storage.files import read_json, read_tensors, write_json, write_tensors
from tests.support.formats import (
    CT,
    V1,
    V2,
    broken,
)

from ..support.checkpoints import checkpoint, layer


def test_side_files_and_config_are_copied(tmp_path):
    whole = checkpoint(layer(8, 32))
    write_as(tmp_path / "ct", whole, "compressed-tensors")
    assert (tmp_path / "ct" / "modeling_made.py").read_bytes() == b"# code\n"
    config = read_json(tmp_path / "ct" / "config.json")
    assert config["name"] == "größe"
    assert list(config) == ["model_type", "hidden_size", "name", "quantization_config"]
    assert read_any(tmp_path / "ct").side_files == whole.side_files


def test_a_weight_tied_to_several_modules_is_stored_for_each(tmp_path):
    quantized = layer(8, 32, name="x.0.w.weight")
    whole = checkpoint(quantized, ties={"x.1.w.weight": "x.0.w.weight"})
    written = write_as(tmp_path / "ct", whole, "compressed-tensors")
    assert written.notes == {quantized.name: ("tied: stored again for x.1.w",)}
    assert written.n_bytes == 2 * written.n_bytes_before
    again = read_any(tmp_path / "ct")
    assert list(again.layers) == [quantized.name]
    assert again.ties == whole.ties


def test_shards_of_other_tools(tmp_path):
    quantized = layer(32, 32)
    folder = tmp_path / "g"
    write_as(folder, checkpoint(quantized), "gptq")
    (folder / RECORD).unlink()
    tensors = read_tensors(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    parts = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, chosen in parts.items():
        write_tensors(folder / file, {n: tensors[n] for n in chosen})
    index = folder / "model.safetensors.index.json"
    weight_map = {n: f for f, chosen in parts.items() for n in chosen}
    write_json(index, {"weight_map": weight_map})
    assert read_any(folder).layers[quantized.name].same_as(quantized)
    write_json(index, {"weight_map": weight_map | {"more": "model-00001-of-00002.safetensors"}})
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'more': .*index\.json says model-00001-of-00002\.safetensors, it is in no shard",
    ):
        read_any(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: missing"):
        read_any(folder)
    index.unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is a pickle"):
        read_any(folder)


def test_truncated_files_are_refused(tmp_path):
    for form in (CT, V1, V2):
        folder = broken(tmp_path / "d", form, source=layer(256, 128, 4, 128))
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(
            CheckpointError, match=r"damaged, truncated or not a safetensors file \(.*incomplete metadata"
        ):
            read_any(folder)


def test_the_files_of_a_folder_without_an_index(tmp_path):
    def found(*names):
        folder = tmp_path / "-".join(names or ("none",))
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"")
        return hf_folder._weight_files(folder)

    assert found("x.safetensors") == ["x.safetensors"]
    assert found("a.safetensors", "model.safetensors") == ["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"2 safetensors files and no model\.safetensors\.index\.json"):
        found("a.safetensors", "b.safetensors")
    with pytest.raises(CheckpointError, match=r"no safetensors file; a\.bin is a pickle"):
        found("b.bin", "a.bin")
    with pytest.raises(CheckpointError, match=r"no safetensors file$"):
        found("x.json")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    tensors = checkpoint(layer(8, 32)).dense
    for name in ("a", "b"):
        write_tensors(tmp_path / f"{name}.safetensors", tensors)
    weight_map = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(sorted(tensors))}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(CheckpointError, match="is in another shard too"):
        hf_folder.read_all_tensors(tmp_path)


def test_settings_stand_in_the_config_or_beside_it(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "m"})
    assert hf_folder.read_config(tmp_path) == ({"model_type": "m"}, None)
    write_json(tmp_path / "hf_quant_config.json", {"quantization": {"quant_algo": "W4A16"}})
    assert hf_folder.read_config(tmp_path)[1] == {"quant_method": "modelopt", "quant_algo": "W4A16"}
    write_json(tmp_path / "quantize_config.json", {"bits": 4})
    assert hf_folder.read_config(tmp_path)[1] == {"quant_method": "gptq", "bits": 4}
    write_json(tmp_path / "config.json", {"model_type": "m", "quantization_config": {"quant_method": "x"}})
    assert hf_folder.read_config(tmp_path) == ({"model_type": "m"}, {"quant_method": "x"})


def test_side_files_are_plain_visible_and_no_weights(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in (
        "a.json",
        "b.py",
        ".hidden",
        "w.safetensors",
        "w.bin",
        "config.json",
        "quantize_config.json",
        "left",
    ):
        (tmp_path / name).write_text(name)
    assert hf_folder.side_files(tmp_path, frozenset({"left"})) == {"a.json": b"a.json", "b.py": b"b.py"}
    assert hf_folder.side_files(tmp_path, frozenset(), ("*.py", "l*")) == {"b.py": b"b.py", "left": b"left"}


def test_a_config_with_a_loop_gets_its_type_and_code_on_request():
    plain = {"config.json": b'{"model_type": "llama"}', "a": b"b"}
    assert hf_folder.looped_files(plain, remote_code=False) == plain
    assert hf_folder.looped_files({}, remote_code=False) == {}
    with pytest.raises(ConfigError, match="--remote-code"):
        hf_folder.looped_files(plain, remote_code=True)
    old = {"model_type": "llama", "looped_layers": [1, 3, 2], "architectures": ["LlamaForCausalLM"], "n": "é"}
    (key,) = [k for k in hf_folder.with_loop({}, [1, 3, 2]) if k != "architectures"]
    old[key] = old.pop("looped_layers")
    files = hf_folder.looped_files({"config.json": json.dumps(old).encode(), "a": b"b"}, remote_code=False)
    config = json.loads(files["config.json"])
    assert set(files) == {"config.json", "a"}
    assert (config["model_type"], config["architectures"], config["n"]) == (
        "loopq_looped",
        ["LoopedLlamaForCausalLM"],
        "é",
    )
    assert "é".encode() in files["config.json"]
    assert hf_folder.looped_files(files, remote_code=False) == files
    code = hf_folder.looped_files(files, remote_code=True)
    assert set(code) == {"config.json", "a", "modeling_looped.py"}
    assert json.loads(code["config.json"])["auto_map"] == {
        "AutoConfig": "modeling_looped.LoopedConfig", "AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM"
    }  # fmt: skip
    assert hf_folder.looped_files(code, remote_code=True) == code


def test_a_folder_needs_weights_that_may_be_read(tmp_path):
    with pytest.raises(CheckpointError, match="no weights in it"):
        hf_folder.check_weight_files(tmp_path, allow_pickle=True)
    (tmp_path / "a.pt").write_bytes(b"")
    (tmp_path / "b.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"only as pickles \(b\.bin, a\.pt\)|only as pickles \(a\.pt, b\.bin\)"
    ):
        hf_folder.check_weight_files(tmp_path, allow_pickle=False)
    hf_folder.check_weight_files(tmp_path, allow_pickle=True)
    (tmp_path / "a.safetensors").write_bytes(b"")
    hf_folder.check_weight_files(tmp_path, allow_pickle=False)
    (tmp_path / "c.json").symlink_to(tmp_path / "missing")
    with pytest.raises(CheckpointError):
        hf_folder.check_weight_files(tmp_path, allow_pickle=False)


def test_patterns_of_a_file_are_bounded():
    assert hf_folder.matches(r"model\.layers\.\d+", "model.layers.3.q", "f")
    assert not hf_folder.matches("layers", "model.layers.3", "f")
    for pattern in (r".*layers\.\d+\.mlp.*", r"model\.layers\.0\.(q|k|v)_proj$", r"^x\.0\.a$", r".*lm_head"):
        assert not hf_folder.matches(pattern, "nothing", "f")
    assert hf_folder.matches(r"x\.\d+\.(a|b)", "x.12.a", "f")
    assert hf_folder.matches("a*b*c*d*", "abcd", "f")
    assert hf_folder.matches("a" * 2000, "a" * 2000, "f")
    for bad in ("a*b*c*d*e*", "(a)*", "(a){2}", "a" * 2001, "(", "(a+)+$", "(?P<a", "[", "(a|b){99}"):
        with pytest.raises(CheckpointError, match=r"^f: pattern "):
            hf_folder.matches(bad, "a" * 60, "f")


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WAVES = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
KINDS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}


@pytest.mark.parametrize(
    ("kind", "given", "more"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}),
        ("llama", {**SCALED, "rope_theta": 500.0}, {"rope_theta": 500.0, "rope_scaling": SCALED}),
        (
            "glm4",
            {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
            {"rope_theta": 300.0, "partial_rotary_factor": 0.25},
        ),
        (
            "gpt_neox",
            {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
            {"rotary_emb_base": 300.0, "rotary_pct": 0.5},
        ),
        (
            "phi3",
            {"rope_type": "longrope", "rope_theta": 300.0, **WAVES, "original_max_position_embeddings": 64},
            {
                "rope_theta": 300.0,
                "rope_scaling": {"type": "longrope", **WAVES},
                "original_max_position_embeddings": 64,
            },
        ),
        (
            "gemma3_text",
            KINDS,
            {
                "rope_theta": 700.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 50.0,
            },
        ),
        ("dory", KINDS, {}),
        ("llama", None, {}),
    ],
)
def test_rotary_settings_are_there_for_both_versions_of_transformers(kind, given, more):
    """Logits of both were compared by transformers 4.57.6 on folders of 5.24: equal."""
    config = {"model_type": kind, "rope_parameters": given}
    assert hf_folder.with_rotary(config) == config | more
    typed = {"model_type": "loopq_looped", "looped_base": kind, "rope_parameters": given}
    assert hf_folder.with_rotary(typed) == typed | more
    assert hf_folder.with_rotary({"text_config": config}) == {"text_config": config | more}
    old = {**config, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert hf_folder.with_rotary(old) == old
    # Version 5 reads the same from both.
    transformers = pytest.importorskip("transformers")
    if more and not transformers.__version__.startswith("4."):
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 512}
        # Phi-3's files have the length in both places, and the class has a default.
        sizes |= {"original_max_position_embeddings": 64} if kind == "phi3" else {}
        read = transformers.CONFIG_MAPPING[kind].from_dict
        one, both = (
            read({**c, **sizes}).rope_parameters for c in map(copy.deepcopy, (config, config | more))
        )
        assert {**one, "type": None} == {**both, "type": None}
