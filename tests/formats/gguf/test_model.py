"""GGUF: our codes as llama.cpp's blocks, bit for bit, read back by its own Python package."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import struct
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import benches.zoo.models
import loopq
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import FORMATS
from loopq.formats.checkpoint import load_into
from loopq.formats.convert import read_any, write_as
from loopq.formats.gguf import blocks
from loopq.formats.gguf.file import open_gguf
from loopq.layers.grids import LEVELS
from loopq.storage.files import RawTensor
from tests.support import pairs
from tests.support.interop import models
from tests.support.interop.environments import interpreter
from tests.support.marks import slow_unless

gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")


def looped(width=64, middle=96, **grid):
    """A Nanbeige-shaped model and its checkpoint, with the config.json of the published class."""
    config = {
        "architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige", "vocab_size": 96, "hidden_size": width,
        "intermediate_size": middle, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_loops": 3,
    }  # fmt: skip
    small = {
        "model_type": "loopq-zoo-nanbeige", "vocab_size": 96, "n_embd": width, "intermediate_size": middle,
        "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": max(width // 4, 24), "block_size": 64, "num_loops": 3,
    }  # fmt: skip
    config["head_dim"] = small["head_dim"]
    torch.manual_seed(3)
    model = benches.zoo.models.build(small).eval()
    return model, models.checkpoint_of(model, config, **{"bits": 4, "group_size": 32, **grid})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_blocks_stand_for_the_very_weights(bits, group_size):
    weight = np.random.default_rng(1).normal(size=(5, 128)).astype(np.float32)
    layer = models.rounded("a.weight", weight, bits=bits, group_size=group_size)
    flipped = dataclasses.replace(layer, scales=-layer.scales)
    for quantized in (layer, flipped):
        kind, data = blocks(quantized)
        assert kind.name == f"Q{bits}_0"
        again = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.name])
        assert np.array_equal(again, quantized.dequantize())


@pytest.mark.parametrize(
    ("levels", "kind", "group_size"),
    [("uneven", "IQ4_NL", 32), ("uneven", "IQ4_NL", -1), ("mxfp4", "MXFP4", 32)],
)
def test_blocks_of_levels_stand_for_the_very_weights(levels, kind, group_size):
    weight = np.random.default_rng(1).normal(size=(5, 128)).astype(np.float32)
    layer = models.rounded("a.weight", weight, bits=4, group_size=group_size, levels=levels)
    block_type, data = blocks(layer)
    assert block_type.name == kind
    again = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(again, layer.dequantize())
    assert (layer.scales < 0).any() == (levels == "uneven")


def test_int2_is_q2_0_with_codes_turned_round():
    weight = np.random.default_rng(1).normal(size=(5, 128)).astype(np.float32)
    for layer in (models.rounded("a.weight", weight, bits=2, group_size=g) for g in (64, -1)):
        kind, data = blocks(layer)
        assert kind.name == "Q2_0"
        assert data.shape == (5, 2 * 18)
        each = data.reshape(5, 2, 18)
        codes = each[:, :, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        scales = np.ascontiguousarray(each[:, :, :2]).view("<f2").astype(np.float32)
        again = (codes.reshape(5, 2, 64).astype(np.float32) - 1) * scales
        assert np.array_equal(again.reshape(5, 128), layer.dequantize())


def test_one_file_mixes_types_and_gives_them_back(tmp_path):
    model, checkpoint = looped(levels="q5_1")
    down = [n for n in checkpoint.layers if "down_proj" in n]
    others = dict(zip(down, ({"levels": "q4_0"}, {"levels": "q5_0"}), strict=True))
    weights = dict(model.named_parameters())
    for name, grid in {"model.layers.0.self_attn.q_proj.weight": {"levels": "q2_0"}, **others}.items():
        weight = weights[name].detach().numpy()
        layer = models.rounded(name, weight, bits=4, group_size=128, **grid)
        checkpoint = dataclasses.replace(checkpoint, layers=checkpoint.layers | {name: layer})
    write_as(tmp_path / "q", checkpoint, "native")
    lines = loopq.export(tmp_path / "q", tmp_path / "m.gguf", "gguf").lines()
    assert "21 tensors equal" in "\n".join(lines)
    facts = FORMATS.get("gguf").facts(tmp_path / "m.gguf")
    kinds = {t["name"]: t["type"] for t in facts["tensors"]}
    assert kinds["blk.0.attn_q.weight"] == "Q2_0"
    assert [kinds[f"blk.{i}.ffn_down.weight"] for i in (0, 1)] == ["Q4_0", "Q5_0"]
    assert kinds["blk.1.ffn_up.weight"] == "Q5_1"
    again = read_any(tmp_path / "q")
    assert all(layer.same_as(again.layers[name]) for name, layer in checkpoint.layers.items())


def test_outside_the_loop_a_type_may_be_named(tmp_path):
    model, _ = looped()
    settings = {"method": "rtn", "levels": "q5_0", "outside": "q8_0"}
    result = loopq.quantize(model, [list(range(20))] * 2, out=tmp_path / "q", **settings)
    assert result.layers["model.layers.0.mlp.up_proj.weight"].grid.gguf.name == "Q5_0"
    assert result.layers["model.embed_tokens.weight"].grid.gguf.name == "Q8_0"
    with pytest.raises(
        ConfigError, match=r"layer model\.layers\.0\.\S+: Q4_K has blocks of 256 weights, and 64"
    ):
        loopq.quantize(model, [list(range(20))] * 2, method="rtn", levels="q4_k")


@pytest.mark.parametrize(
    ("grid", "match"),
    [
        ({"bits": 4, "group_size": 16, "levels": "nvfp4"}, r"layer a\.weight: NVFP4: llama\.cpp has no type for it"),
        ({"bits": 3, "group_size": 32, "levels": "uneven"}, r"3 bits, uneven levels: llama\.cpp has no type for it"),
        ({"bits": 3, "group_size": 32}, r"layer a\.weight: INT3: llama\.cpp has no type.*--levels q4_0"),
        ({"bits": 2, "group_size": 32}, r"groups of 32: a block of Q2_0 is 64 weights"),
        ({"bits": 4, "group_size": 32, "symmetric": False}, r"INT4, asymmetric"),
        ({"bits": 4, "group_size": 16}, r"128 columns in groups of 16: a block of Q4_0 is 32 weights"),
        ({"bits": 4, "group_size": 48}, r"128 columns in groups of 48"),
        ({"bits": 4, "group_size": 32, "scale_dtype": "float32"}, r"GGUF stores scales in float16"),
    ],
)  # fmt: skip
def test_what_llama_cpp_has_no_type_for_is_refused(grid, match):
    weight = np.random.default_rng(1).normal(size=(5, 128)).astype(np.float32)
    with pytest.raises(CheckpointError, match=match):
        blocks(models.rounded("a.weight", weight, **grid))


@pytest.mark.parametrize("grid", [{}, {"bits": 8, "group_size": -1}, {"leave": ("lm_head", "mlp")}])
def test_a_looped_model_is_written_out_with_rows_in_order(tmp_path, grid):
    _, checkpoint = looped(**grid)
    write_as(tmp_path / "q", checkpoint, "native")
    lines = loopq.export(tmp_path / "q", tmp_path / "m.gguf", "gguf").lines()
    assert "nanbeige, 3 loops, 21 tensors" in lines[0]
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    entries = {name: field.contents() for name, field in reader.fields.items()}
    assert entries["general.architecture"] == "nanbeige"
    assert entries["nanbeige.num_loops"] == 3
    assert entries["nanbeige.skip_loop_final_norm"] is False
    assert entries["nanbeige.attention.key_length"] == 24
    tensors = {t.name: t for t in reader.tensors}
    value = tensors["blk.1.attn_q.weight"]
    weight = gguf.quants.dequantize(value.data, value.tensor_type)
    layer = checkpoint.layers["model.layers.1.self_attn.q_proj.weight"].dequantize()
    # Row r of the first half of a head and row r of its second half become neighbours.
    head = layer[24:48]
    assert np.array_equal(weight[24:48:2], head[:12])
    assert np.array_equal(weight[25:48:2], head[12:])
    other = tensors["blk.1.attn_v.weight"]
    plain = checkpoint.layers["model.layers.1.self_attn.v_proj.weight"].dequantize()
    assert np.array_equal(gguf.quants.dequantize(other.data, other.tensor_type), plain)


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "nanbeige")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(96)])
    writer.add_token_scores([0.5] * 96)
    writer.add_token_types([1] * 96)
    writer.add_bos_token_id(1)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    return path


def test_the_tokenizer_of_another_file_is_copied(tmp_path, vocabulary):
    _, checkpoint = looped()
    write_as(tmp_path / "q", checkpoint, "native")
    loopq.export(tmp_path / "q", tmp_path / "m.gguf", "gguf", vocabulary=vocabulary, verify=False)
    source, copied = (gguf.GGUFReader(p).fields for p in (vocabulary, tmp_path / "m.gguf"))
    names = [n for n in source if n.startswith("tokenizer.")]
    assert len(names) == 5
    assert {n: copied[n].contents() for n in names} == {n: source[n].contents() for n in names}


def test_a_damaged_vocabulary_is_named_and_nothing_is_written(tmp_path, vocabulary):
    write_as(tmp_path / "q", looped()[1], "native")
    whole = vocabulary.read_bytes()
    at = whole.index(b"<7>")
    for damaged in (whole[: len(whole) // 2], whole[:at] + b"\x80" + whole[at + 1 :]):
        vocabulary.write_bytes(damaged)
        with pytest.raises(
            CheckpointError, match=r"vocabulary\.gguf: a GGUF file that is (cut off or )?damaged"
        ) as error:
            loopq.export(tmp_path / "q", tmp_path / "m.gguf", "gguf", vocabulary=vocabulary)
        assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "vocabulary.gguf"]


#: Log-probabilities of all tokens after each beginning of a prompt.
LLAMA = """
import json, sys, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = sys.argv[1], 64, 1, False
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
server, ids, found = xllamacpp.Server(settings), json.loads(sys.argv[2]), []
asked = {"n_predict": 1, "temperature": 0, "n_probs": 96, "cache_prompt": False}
for n in range(1, len(ids) + 1):
    said = server.handle_completions({"prompt": ids[:n], **asked})
    (token,) = said["choices"][0]["logprobs"]["content"]
    found.append([p["logprob"] for p in sorted(token["top_logprobs"], key=lambda p: p["id"])])
with open(sys.argv[3], "w") as file:
    json.dump(found, file)
"""


TYPES = (
    "q8_0",
    "q4_k",
    "q2_0",
    "q4_0",
    "iq4_nl",
    "q4_1",
    "q5_0",
    "q5_1",
    "q2_k",
    "q3_k",
    "q5_k",
    "q6_k",
    "iq4_xs",
)


@pytest.mark.parametrize("levels", slow_unless(TYPES[:2].__contains__, TYPES))
def test_logits_of_llama_cpp(tmp_path, vocabulary, levels):
    """Of a loop with rows of whole blocks of every type."""
    model, checkpoint = looped(256, 256, group_size=128, levels=levels)
    write_as(tmp_path / "q", checkpoint, "native")
    loopq.export(tmp_path / "q", tmp_path / "m.gguf", "gguf", vocabulary=vocabulary, verify=False)
    load_into(model, checkpoint)
    ids = [5, 9, 7, 30, 11, 12]
    said = tmp_path / "said.json"
    arguments = [str(tmp_path / "m.gguf"), json.dumps(ids), str(said)]
    subprocess.run([interpreter("llama"), "-c", LLAMA, *arguments], check=True, capture_output=True)
    logits = torch.tensor(json.loads(said.read_text()))
    expected = model(torch.tensor([ids]), use_cache=False).logits[0].detach().log_softmax(-1)
    # Products round the activations to 8 bits.
    logits, expected = (p - p.mean(-1, keepdim=True) for p in (logits, expected))
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() > 0.999


def test_a_loop_of_a_dense_model_is_written_out(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, looped_layers=[1, 3, 2], tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    settings = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    write_as(tmp_path / "q", models.checkpoint_of(model, settings, bits=4, group_size=32), "native")
    lines = loopq.export(tmp_path / "q", tmp_path / "m.gguf", "gguf").lines()
    assert "the loop is written out: 6 layers in the order in which they run" in lines
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["llama.block_count"].contents() == 6
    data = {t.name: t.data for t in reader.tensors}
    for part in ("attn_q.weight", "ffn_down.weight", "ffn_norm.weight"):
        assert np.array_equal(data[f"blk.1.{part}"], data[f"blk.3.{part}"])
        assert np.array_equal(data[f"blk.2.{part}"], data[f"blk.4.{part}"])
    layers = loopq.load(tmp_path / "q").model.model.layers
    for k, i in ((0, 0), (1, 1), (2, 2), (5, 3)):
        again = gguf.quants.dequantize(data[f"blk.{k}.ffn_down.weight"], gguf.GGMLQuantizationType.Q4_0)
        assert np.array_equal(again, layers[i].mlp.down_proj.weight.detach().numpy())


@pytest.mark.parametrize("biases", [False, True])
def test_a_loop_of_all_layers_is_run_by_llama_cpp(tmp_path, biases):
    """Each layer is in the file once. Nanbeige's architecture, which runs it, has no biases."""
    torch.manual_seed(0)
    model = pairs._class("Llama", looped_layers=[0, 4, 3], attention_bias=biases)()
    model.save_pretrained(tmp_path / "m")
    words = pairs.vocabulary(tmp_path / "v.gguf", 64)
    lines = loopq.export(tmp_path / "m", tmp_path / "x.gguf", "gguf", vocabulary=words).lines()
    keys = {n: f.contents() for n, f in gguf.GGUFReader(tmp_path / "x.gguf").fields.items()}
    if biases:
        assert keys["llama.block_count"] == 12
        return
    assert keys["nanbeige.block_count"] == 4
    assert keys["nanbeige.num_loops"] == 3
    assert keys["nanbeige.skip_loop_final_norm"] is True
    assert not any("written out" in line for line in lines)


def test_llama_cpp_refuses_two_tensors_in_one_place(tmp_path):
    """Else a loop that is written out could hold each layer once."""
    pairs.save("looped Llama", tmp_path / "m")
    words = pairs.vocabulary(tmp_path / "v.gguf", 64)
    loopq.export(tmp_path / "m", tmp_path / "whole.gguf", "gguf", vocabulary=words, verify=False)
    data = bytearray((tmp_path / "whole.gguf").read_bytes())
    places = []
    for name in (b"blk.1.ffn_down.weight", b"blk.3.ffn_down.weight"):
        # After the name: the number of dimensions, the dimensions, the type, the offset.
        start = data.index(name) + len(name)
        (n_dims,) = struct.unpack_from("<I", data, start)
        places.append(start + 4 + 8 * n_dims + 4)
    first, second = (struct.unpack_from("<Q", data, place)[0] for place in places)
    assert first != second
    struct.pack_into("<Q", data, places[1], first)
    (tmp_path / "shared.gguf").write_bytes(data)
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "shared.gguf").tensors}
    assert np.array_equal(tensors["blk.1.ffn_down.weight"], tensors["blk.3.ffn_down.weight"])
    for name, why in (("whole", ""), ("shared", f"has offset {first}, expected {second}")):
        arguments = [str(tmp_path / f"{name}.gguf"), "[5]", str(tmp_path / "said.json")]
        done = subprocess.run(
            [interpreter("llama"), "-c", LLAMA, *arguments], capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) == (not why)
        assert why in done.stderr


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_model_that_is_not_quantized_is_written_as_it_is(tmp_path, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "m")
    lines = loopq.export(f"looped:{tmp_path / 'm'}[1:3]x2", tmp_path / "m.gguf", "gguf").lines()
    assert "the loop is written out: 5 layers in the order in which they run" in lines
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    file_type = reader.fields["general.file_type"].contents()
    assert gguf.LlamaFileType(file_type).name == ("ALL_F32" if kind == "F32" else f"MOSTLY_{kind}")
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["blk.4.ffn_up.weight"].tensor_type.name == kind
    again = gguf.quants.dequantize(
        tensors["blk.4.ffn_up.weight"].data, tensors["blk.4.ffn_up.weight"].tensor_type
    )
    assert np.array_equal(again, model.model.layers[2].mlp.up_proj.weight.detach().float().numpy())
    # Without a loop, a plain Llama.
    loopq.export(tmp_path / "m", tmp_path / "plain.gguf", "gguf")
    assert gguf.GGUFReader(tmp_path / "plain.gguf").fields["llama.block_count"].contents() == 3
    with pytest.raises(CheckpointError, match="no checkpoint"):
        loopq.export(tmp_path, tmp_path / "none.gguf", "gguf")


def test_a_file_is_called_by_the_number_of_its_type():
    grids = [LEVELS.get(name)(4, 32, "float16") for name in TYPES if name not in ("q2_0", "mxfp4")]
    types = {grid.gguf for grid in grids}
    assert len({kind.place for kind in types}) == len({kind.number for kind in types}) == len(grids)
    for kind in types:
        called = gguf.LlamaFileType(kind.number).name
        assert called in (f"MOSTLY_{kind.name}", f"MOSTLY_{kind.name}_S")


def test_a_mixed_file_is_called_by_its_type_of_lowest_place(tmp_path):
    _, checkpoint = looped(bits=8)
    one = looped(levels="q4_0")[1].layers["model.layers.0.mlp.up_proj.weight"]
    write_as(
        tmp_path / "m.gguf",
        dataclasses.replace(checkpoint, layers={**checkpoint.layers, one.name: one}),
        "gguf",
    )
    assert gguf.GGUFReader(tmp_path / "m.gguf").fields["general.file_type"].contents() == 2


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"levels": "q4_0"}, {"token_embd": "Q6_K", "output": "Q6_K"}),
        ({"bits": 8, "group_size": 32}, {"token_embd": "Q8_0", "output": "Q8_0"}),
        ({"levels": "q4_0", "outside": "none"}, {"token_embd": "F32", "output": "F32"}),
        ({"levels": "q4_0", "hidden_size": 96}, {"token_embd": "Q8_0", "output": "Q8_0"}),
    ],
)
def test_embedding_and_head_are_rounded_by_default(tmp_path, settings, kinds):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    width = settings.pop("hidden_size", 256)
    config = LlamaConfig(
        vocab_size=100, hidden_size=width, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    model, out = f"looped:{tmp_path / 'm'}[1:2]x2", tmp_path / "m.gguf"
    loopq.quantize(model, [list(range(20))] * 2, out=out, write="gguf", method="rtn", **settings)
    facts = FORMATS.get("gguf").facts(out)
    types = {t["name"].removesuffix(".weight"): t["type"] for t in facts["tensors"]}
    assert kinds.items() <= types.items()


def test_export_tells_the_bytes_of_a_float_embedding(tmp_path):
    _, checkpoint = looped(leave=("lm_head", "embed"))
    write_as(tmp_path / "q", checkpoint, "native")
    lines = loopq.export(tmp_path / "q", tmp_path / "m.gguf", "gguf").lines()
    assert any("token_embd.weight and output.weight not quantized" in line for line in lines)


def test_a_head_that_is_tied_and_said_not_to_be_is_refused(tmp_path):
    _, checkpoint = looped()
    config = json.loads(checkpoint.side_files["config.json"]) | {"tie_word_embeddings": False}
    side_files = checkpoint.side_files | {"config.json": json.dumps(config).encode()}
    ties = {"lm_head.weight": "model.embed_tokens.weight"}
    tied = dataclasses.replace(checkpoint, side_files=side_files, ties=ties)
    with pytest.raises(CheckpointError, match=r"is tied, and config.json says tie_word_embeddings: false"):
        FORMATS.get("gguf").write(tmp_path / "m.gguf", tied)


def saved(folder, config=(), tensors=lambda found: None):
    """A plain Llama's folder with changed settings and tensors."""
    from safetensors.numpy import load_file, save_file

    pairs._class("Llama", num_hidden_layers=3)().save_pretrained(folder)
    path, stored = folder / "config.json", dict(load_file(folder / "model.safetensors"))
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | dict(config)), "utf-8")
    tensors(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("config", "tensors", "match"),
    [
        ({"hidden_act": "gelu"}, lambda found: None, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": 4}, lambda found: None, r"lack 9 tensors .* such as blk\.3\.attn_k\.weight"),
        (
            {},
            lambda found: found.pop("model.layers.1.mlp.up_proj.weight"),
            r"lack 1 tensors .* blk\.1\.ffn_up",
        ),
        ({}, lambda found: found.pop("model.embed_tokens.weight"), r"lack 1 tensors .* token_embd\.weight"),
        ({}, lambda found: found.pop("lm_head.weight"), r"the files have no lm_head\.weight"),
        (
            {"tie_word_embeddings": True},
            lambda found: None,
            r"lm_head\.weight differs from model\.embed_tokens",
        ),
    ],
)
def test_a_model_that_its_files_do_not_hold_is_not_written(tmp_path, config, tensors, match):
    source, out = saved(tmp_path / "m", config, tensors), tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=match):
        loopq.export(source, out, "gguf", verify=False)
    assert not out.exists()


def test_tensors_of_a_layer_that_config_json_does_not_count_are_named(tmp_path):
    source = saved(tmp_path / "m", {"num_hidden_layers": 2})
    lines = loopq.export(source, tmp_path / "m.gguf", "gguf", verify=False).lines()
    assert any("left out" in line and "model.layers.2." in line and "6 more" in line for line in lines)
    assert not any(t.name.startswith("blk.2.") for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors)


def test_a_model_without_a_loop_is_shown_to_llama_cpp(tmp_path):
    """Its layers run once."""
    interpreter("llama")
    source, words = saved(tmp_path / "m"), pairs.vocabulary(tmp_path / "v.gguf", 64)
    done = loopq.export(source, tmp_path / "m.gguf", "gguf", vocabulary=words)
    assert any("read it: largest difference" in line for line in done.read_by) == (
        importlib.util.find_spec("xllamacpp") is not None
    )


def test_a_tensor_of_another_type_is_refused(tmp_path):
    _, checkpoint = looped()
    dense = checkpoint.dense | {"model.norm.weight": RawTensor.of(np.ones(64, np.int32))}
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': of type I32; GGUF holds F32, F16"):
        FORMATS.get("gguf").write(tmp_path / "m.gguf", dataclasses.replace(checkpoint, dense=dense))


def test_a_file_with_other_tensors_is_noticed(tmp_path, monkeypatch):
    _, checkpoint = looped()
    form, path = FORMATS.get("gguf"), tmp_path / "m.gguf"
    form.write(path, checkpoint, form.taken({"vocabulary": "none"}))
    fewer = dict(list(checkpoint.dense.items())[1:])
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor .*: written and not in the checkpoint"):
        form.verify(path, dataclasses.replace(checkpoint, dense=fewer))
    tensors = open_gguf(path).tensors[1:]
    monkeypatch.setattr("loopq.formats.gguf.model.open_gguf", lambda _: SimpleNamespace(tensors=tensors))
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor .*: not in the file"):
        form.verify(path, checkpoint)
