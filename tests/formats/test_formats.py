"""Formats of other tools: bytes from first principles, there and back, refusals."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopq.errors import CheckpointError, ConfigError
from loopq.formats import FORMATS
from loopq.formats.convert import format_names, format_of, inspect_any, read_any, verify, write_as
from loopq.formats.fitting import restore
from loopq.formats.quantized_folder import RECORD
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.layers.transforms import ChannelScale, Rotation
from loopq.storage.files import RawTensor, float_to_raw, read_json, read_tensors, write_json, write_tensors
from loopq.storage.schema import checked

from ..support.checkpoints import checkpoint, dequantized, layer, reseal

#: Formats that loopq reads back.
FOLDERS = [name for name in format_names() if FORMATS.get(name).reads]


def digest(folder):
    """Contents of every file of a folder."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def stored_settings(made, **changes):
    return checked(LayerSettings, made.settings() | changes, "file")


def bitstream(codes, bits):
    """Words of one run of codes, by the definition: code j in bits j*b to (j+1)*b of one long number."""
    number = sum(int(c) << (bits * j) for j, c in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return [(number >> (32 * i)) & 0xFFFFFFFF for i in range(count)]


def as_words(tensor):
    return tensor.array().view(np.uint32)


def test_names():
    assert format_names()[0] == "native"
    assert FOLDERS == ["native", "compressed-tensors", "gptq", "gptq_v2", "marlin"]
    assert {"gguf", "imatrix"} <= set(format_names())
    with pytest.raises(ConfigError, match=r"unknown format 'gptq2'.*did you mean"):
        write_as("out", checkpoint(layer(32, 32)), "gptq2")
    with pytest.raises(ConfigError, match="format native does not read ragged; its options: none"):
        write_as("out", checkpoint(layer(32, 32)), "native", ragged="split")
    with pytest.raises(ConfigError, match="ragged must be one of keep, split, pad; got 'cut'"):
        write_as("out", checkpoint(layer(32, 32)), "gptq", ragged="cut")
    with pytest.raises(ConfigError, match="imatrix is written from a calibration dump"):
        write_as("out", checkpoint(layer(32, 32)), "imatrix")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_tensors_by_definition(bits, symmetric):
    made = layer(40, 45, bits, 16, symmetric)
    form = FORMATS.get("gptq_v2")
    tensors = form.tensors("m", form.prepare(made, "keep").layer)
    middle = 1 << (bits - 1)
    u = made.codes.astype(int) + (middle if symmetric else 0)
    z = np.full(made.scales.shape, middle) if symmetric else made.zeros.astype(int)
    for column in (0, 7, 39):
        assert as_words(tensors["m.qweight"])[:, column].tolist() == bitstream(u[column], bits)
    for group in range(3):
        assert as_words(tensors["m.qzeros"])[group].tolist() == bitstream(z[:, group], bits)
        np.testing.assert_array_equal(tensors["m.scales"].array()[group], made.scales[:, group])
    assert tensors["m.g_idx"].array().tolist() == [j // 16 for j in range(45)]
    assert [t.dtype for t in tensors.values()] == ["I32", "I32", "F16", "I32"]


def test_gptq_version_1_stores_zero_minus_one_field_by_field():
    for bits in (2, 3, 4, 8):
        made = layer(32, 32, bits, 32)
        first = FORMATS.get("gptq").tensors("m", made)["m.qzeros"]
        assert as_words(first)[0].tolist() == bitstream([(1 << (bits - 1)) - 1] * 32, bits)
    assert set(as_words(FORMATS.get("gptq").tensors("m", layer(32, 32))["m.qzeros"]).flat) == {0x77777777}
    assert set(as_words(FORMATS.get("gptq_v2").tensors("m", layer(32, 32))["m.qzeros"]).flat) == {0x88888888}


def test_spec_example_of_the_bit_stream():
    made = layer(1, 11, 3, -1, False)
    made.codes[0] = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 6]
    assert as_words(made.tensors()["a.b.weight_packed"]).tolist() == [[0x88FAC688, 0x00000001]]


def marlin_by_formula(codes, scales):
    """Words and scales of Marlin from the closed formulas of docs/formats/packing.md, entry by entry."""
    n_out, k_in = codes.shape
    words = np.zeros((k_in // 16) * 2 * n_out, np.uint64)
    n, k = np.meshgrid(np.arange(n_out), np.arange(k_in), indexing="ij")
    word = (k >> 4) * 2 * n_out + (n >> 6) * 128 + (4 * (n & 7) + ((k & 7) >> 1)) * 4 + ((n >> 4) & 3)
    nibble = 2 * ((n >> 3) & 1) + ((k >> 3) & 1) + 4 * (k & 1)
    np.add.at(
        words,
        word.ravel(),
        ((codes.astype(int) + 8).astype(np.uint64) << (4 * nibble).astype(np.uint64)).ravel(),
    )
    rows = np.arange(n_out)
    if scales.shape[1] == 1:
        place = (rows & ~31) + 8 * ((rows & 7) >> 1) + 2 * ((rows & 31) >> 3) + (rows & 1)
    else:
        place = (rows & ~63) + 8 * (rows & 7) + ((rows & 63) >> 3)
    stored = np.zeros((scales.shape[1], n_out), np.float32)
    stored[:, place] = scales.T
    return words.astype(np.uint32).reshape(k_in // 16, 2 * n_out), stored


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "columns", "group"), [(5, 50, 16), (33, 7, -1), (8, 64, 64)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_and_names_are_those_of_what_is_stored(bits, rows, columns, group, symmetric):
    plain = layer(rows, columns, bits, group, symmetric)
    scaled = plain.with_transform(ChannelScale(np.ones(columns, np.float32)))
    for made in (plain, scaled, plain.with_transform(Rotation(columns, "random", 4))):
        stored = made.tensors()
        assert made.n_bytes == sum(t.data.size for n, t in stored.items() if not n.endswith("weight_shape"))
        again = stored_settings(made)
        reader = TensorReader("file", stored)
        assert QuantizedLayer.from_tensors(again, reader, {}).same_as(made)
        assert reader.used == set(stored)


@pytest.mark.parametrize(
    ("k", "n", "group"), [(128, 256, 128), (256, 256, 128), (512, 768, 128), (384, 512, -1)]
)
def test_marlin_bytes_equal_the_closed_formulas(k, n, group):
    made = layer(n, k, 4, group)
    form = FORMATS.get("marlin")
    prepared = form.prepare(made, None)
    assert prepared.notes == ()
    tensors = form.tensors("m", prepared.layer)
    words, scales = marlin_by_formula(made.codes, made.scales)
    assert tensors["m.B"].array().view(np.uint32).tobytes() == words.tobytes()
    assert tensors["m.s"].array().tobytes() == scales.astype(np.float16).tobytes()
    if k == 128:
        assert made.scales.shape[1] == 1, "K = g: stored in the order of one scale per output"


def test_marlin_pads_and_says_what_it_costs(tmp_path):
    made = layer(300, 200, 4, 128)
    written = write_as(tmp_path / "m", checkpoint(made), "marlin")
    assert (made.n_bytes, written.n_bytes) == (300 * 100 + 2 * 300 * 2, 512 * 128 + 2 * 512 * 2)
    assert written.notes == {
        made.name: ("padded from 300x200 to 512x256 with zeros: +36384 bytes (+116.6%)",)
    }
    stored = read_tensors(tmp_path / "m" / "model.safetensors")
    assert stored["a.b.B"].shape == (16, 1024)
    assert stored["a.b.s"].shape == (2, 512)
    (tmp_path / "m" / RECORD).unlink()
    alone = read_any(tmp_path / "m").layers[made.name]
    assert alone.shape == (512, 256)
    np.testing.assert_array_equal(alone.dequantize()[:300, :200], made.dequantize())
    assert not alone.dequantize()[300:].any()
    assert not alone.dequantize()[:, 200:].any()


def fitting(draw):
    """A layer that a format can hold, the format and the policy it needs."""
    form = draw(st.sampled_from(["native", "compressed-tensors", "gptq", "gptq_v2", "marlin"]))
    bits = draw(st.sampled_from([2, 3, 4, 8])) if form != "marlin" else 4
    symmetric = draw(st.booleans()) if form in ("native", "compressed-tensors", "gptq_v2") else True
    group = (
        draw(st.sampled_from([-1, 1, 4, 7, 16, 32, 128]))
        if form != "marlin"
        else draw(st.sampled_from([-1, 128]))
    )
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 150))
    kinds = (
        ["float16", "bfloat16", "float32"]
        if form in ("native", "compressed-tensors")
        else ["float16", "bfloat16"]
    )
    kind = draw(st.sampled_from(kinds))
    policy = draw(st.sampled_from(["keep", "split"])) if form.startswith("gptq") else "split"
    made = layer(rows, columns, bits, group, symmetric, scale_dtype=kind, seed=draw(st.integers(0, 99)))
    return made, form, None if form in ("native", "marlin") else policy


@settings(max_examples=60, deadline=None)
@given(st.composite(fitting)())
def test_there_and_back_gives_the_same_bytes(tmp_path_factory, case):
    made, form, policy = case
    base = tmp_path_factory.mktemp("there")
    whole = checkpoint(made)
    write_as(base / "native", whole, "native")
    written = write_as(base / "out", read_any(base / "native"), form, ragged=policy)
    assert written.checked == 1
    write_as(base / "back", read_any(base / "out"), "native")
    assert digest(base / "back") == digest(base / "native")
    write_as(base / "again", read_any(base / "back"), form, ragged=policy)
    assert digest(base / "again") == digest(base / "out")
    np.testing.assert_array_equal(
        read_any(base / "out").layers[made.name].dequantize(), dequantized(made).astype("f4")
    )
    # What a reader that knows nothing of loopq finds stands for the same weight.
    shutil.copytree(base / "out", base / "bare")
    if form != "native":
        (base / "bare" / RECORD).unlink()
        bare = read_any(base / "bare").layers[made.name].dequantize()
        rows, columns = made.shape
        np.testing.assert_array_equal(bare[:rows, :columns], made.dequantize())
    shutil.rmtree(base)


def test_ignore_lists_every_dense_matrix_by_exact_name(tmp_path):
    whole = checkpoint(layer(8, 32), ties={"lm_head.weight": "embed.weight"})
    write_as(tmp_path / "ct", whole, "compressed-tensors")
    config = read_json(tmp_path / "ct" / "config.json")["quantization_config"]
    assert config["ignore"] == ["early_exit_gate", "embed", "lm_head"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    write_as(tmp_path / "gptq", whole, "gptq")
    config = read_json(tmp_path / "gptq" / "config.json")["quantization_config"]
    assert list(config["dynamic"]) == ["-:^early_exit_gate$", "-:^embed$", "-:^lm_head$"]
    assert config == read_json(tmp_path / "gptq" / "quantize_config.json")


def test_what_an_engine_keeps_inside_the_entries_of_a_list_is_ignored_too(tmp_path):
    gate = checkpoint().dense["early_exit_gate.weight"]
    whole = checkpoint(layer(8, 32), dense={f"model.gates.{i}.weight": gate for i in range(2)})
    write_as(tmp_path / "ct", whole, "compressed-tensors")
    config = read_json(tmp_path / "ct" / "config.json")["quantization_config"]
    assert config["ignore"][-2:] == ["model.gates.1", r"re:model\.gates\.[0-9]+\..*"]


def test_layers_of_different_grids(tmp_path):
    made = [layer(64, 64, 4, 32, name="x.a.weight"), layer(64, 64, 8, 16, name="x.b.weight"),
            layer(64, 64, 4, 32, name="x.c.weight"), layer(64, 64, 3, -1, name="x.d.weight")]  # fmt: skip
    for form in ("compressed-tensors", "gptq", "gptq_v2"):
        write_as(tmp_path / form, checkpoint(*made), form)
        (tmp_path / form / RECORD).unlink()
        again = read_any(tmp_path / form)
        for one in made:
            assert again.layers[one.name].same_as(one), (form, one.name)
            assert again.layers[one.name].grid.group_size == one.grid.group_size
    groups = read_json(tmp_path / "compressed-tensors" / "config.json")["quantization_config"][
        "config_groups"
    ]
    assert [g["targets"] for g in groups.values()] == [["x.a", "x.c"], ["x.b"], ["x.d"]]
    mixed = checkpoint(layer(64, 256, 4, 128, name="x.a.weight"), layer(64, 256, 4, -1, name="x.b.weight"))
    with pytest.raises(
        CheckpointError, match=r"Marlin's config holds one group size; the layers have \[-1, 128\]"
    ):
        write_as(tmp_path / "m", mixed, "marlin")


def test_side_files_and_config_are_copied(tmp_path):
    whole = checkpoint(layer(8, 32))
    write_as(tmp_path / "ct", whole, "compressed-tensors")
    assert (tmp_path / "ct" / "modeling_made.py").read_bytes() == b"# code\n"
    config = read_json(tmp_path / "ct" / "config.json")
    assert config["name"] == "größe"
    assert list(config) == ["model_type", "hidden_size", "name", "quantization_config"]
    assert read_any(tmp_path / "ct").side_files == whole.side_files


def test_a_weight_tied_to_several_modules_is_stored_for_each(tmp_path):
    made = layer(8, 32, name="x.0.w.weight")
    whole = checkpoint(made, ties={"x.1.w.weight": "x.0.w.weight"})
    written = write_as(tmp_path / "ct", whole, "compressed-tensors")
    assert written.notes == {made.name: ("tied: stored again for x.1.w",)}
    assert written.n_bytes == 2 * written.n_bytes_before
    again = read_any(tmp_path / "ct")
    assert list(again.layers) == [made.name]
    assert again.ties == whole.ties


RAGGED = layer(64, 80, 4, 32)


def test_ragged_groups_ask_for_a_policy(tmp_path):
    for form in ("compressed-tensors", "gptq", "gptq_v2"):
        with pytest.raises(
            CheckpointError, match=r"layer a\.b\.weight: the last .* has 16 of 32 .*; choose .*'split'"
        ):
            write_as(tmp_path / form, checkpoint(RAGGED), form)
        assert not (tmp_path / form).exists()
    with pytest.raises(CheckpointError, match="compressed-tensors cannot keep it: the library refuses"):
        write_as(tmp_path / "x", checkpoint(RAGGED), "compressed-tensors", ragged="keep")
    with pytest.raises(CheckpointError, match="gptq cannot pad it: a padded matrix does not fit the model"):
        write_as(tmp_path / "x", checkpoint(RAGGED), "gptq", ragged="pad")
    with pytest.raises(ConfigError, match="keep, split, pad"):
        write_as(tmp_path / "x", checkpoint(RAGGED), "gptq", ragged="drop")
    with pytest.raises(CheckpointError, match="Marlin cannot split a ragged group"):
        write_as(tmp_path / "x", checkpoint(layer(64, 200, 4, 128)), "marlin", ragged="split")


def test_ragged_split_repeats_scales_and_changes_no_number(tmp_path):
    written = write_as(tmp_path / "ct", checkpoint(RAGGED), "compressed-tensors", ragged="split")
    assert written.notes == {RAGGED.name: ("groups of 32 cut to 16: +256 bytes",)}
    stored = read_tensors(tmp_path / "ct" / "model.safetensors")["a.b.weight_scale"].float32()
    np.testing.assert_array_equal(stored, RAGGED.scales[:, [0, 0, 1, 1, 2]])
    (tmp_path / "ct" / RECORD).unlink()
    np.testing.assert_array_equal(
        read_any(tmp_path / "ct").layers[RAGGED.name].dequantize(), RAGGED.dequantize()
    )


def test_gptq_splits_all_layers_alike_since_readers_know_one_group_size(tmp_path):
    made = [layer(32, 64, 4, 32, name="a.weight"), RAGGED, layer(32, 72, 4, 32, name="c.weight"),
            layer(32, 64, 4, 16, name="d.weight")]  # fmt: skip
    written = write_as(tmp_path / "g", checkpoint(*made), "gptq", ragged="split")
    assert written.notes == {
        "a.weight": ("groups of 32 cut to 8: +384 bytes",),
        RAGGED.name: ("groups of 32 cut to 16: +256 bytes", "groups of 16 cut to 8: +640 bytes"),
        "c.weight": ("groups of 32 cut to 8: +384 bytes",),
    }
    (tmp_path / "g" / RECORD).unlink()
    again = read_any(tmp_path / "g").layers
    assert [again[one.name].grid.group_size for one in made] == [8, 8, 8, 16]
    for one in made:
        np.testing.assert_array_equal(again[one.name].dequantize(), one.dequantize())


def test_one_short_group_is_one_scale_per_row(tmp_path):
    made = layer(8, 20, 4, 32)
    written = write_as(tmp_path / "ct", checkpoint(made), "compressed-tensors")
    assert written.notes == {made.name: ("one group of 20 columns, stored as one scale per row",)}
    group = read_json(tmp_path / "ct" / "config.json")["quantization_config"]["config_groups"]["group_0"][
        "weights"
    ]
    assert (group["strategy"], group["group_size"]) == ("channel", None)
    assert read_any(tmp_path / "ct").layers[made.name].grid.group_size == 32


def test_what_a_format_cannot_hold_is_refused_with_the_reason(tmp_path):
    asymmetric = checkpoint(layer(32, 32, symmetric=False))
    wide = checkpoint(layer(32, 32, scale_dtype="float32"))
    transposed = checkpoint(layer(32, 32, name="h.weight"))
    object.__setattr__(transposed.layers["h.weight"], "orientation", "in_out")
    for whole, form, match in [
        (asymmetric, "gptq", "use the format 'gptq_v2'"),
        (asymmetric, "marlin", "symmetric INT4 alone"),
        (wide, "gptq", r"scale\[\d+, \d+\] = .*quantize again with scale_dtype='float16'"),
        (wide, "gptq_v2", "cannot hold"),
        (transposed, "compressed-tensors", "keeps it transposed"),
        (checkpoint(layer(32, 32, name="experts.w1")), "gptq", "take a module's 'weight' alone"),
        (checkpoint(layer(32, 64, group_size=64)), "marlin", None),
        (
            checkpoint(layer(32, 128, group_size=64)),
            "marlin",
            "groups of 128 or one scale per row, not groups of 64",
        ),
    ]:
        if match is None:
            assert write_as(tmp_path / "one-group", whole, form).checked == 1
            continue
        with pytest.raises(CheckpointError, match=match):
            write_as(tmp_path / "x", whole, form)
    with pytest.raises(ConfigError, match=r"unknown format 'gtpq' \(did you mean gptq\?\)"):
        write_as(tmp_path / "x", wide, "gtpq")
    with pytest.raises(ConfigError, match="no quantized layer"):
        write_as(tmp_path / "x", checkpoint(), "gptq")
    assert not (tmp_path / "x").exists()


def test_bfloat16_scales_that_float16_holds_are_exported(tmp_path):
    made = layer(32, 32, scale_dtype="bfloat16")
    write_as(tmp_path / "g", checkpoint(made), "gptq")
    again = read_any(tmp_path / "g").layers[made.name]
    assert again.same_as(made)
    assert again.grid.scale_dtype == "bfloat16"
    made.scales[0, 0] = 2.0**-30
    with pytest.raises(CheckpointError, match=r"scale\[0, 0\]"):
        write_as(tmp_path / "x", checkpoint(made), "gptq")


def test_transformed_layers_stay_in_loopqs_own_format(tmp_path):
    made = layer(32, 32).with_transform(Rotation(32, "hadamard", 16))
    assert write_as(tmp_path / "n", checkpoint(made), "native").checked == 1
    for form in FOLDERS[1:]:
        with pytest.raises(CheckpointError, match=r"a\.b\.weight: its codes are for a transformed input"):
            write_as(tmp_path / form, checkpoint(made), form)


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path, monkeypatch):
    whole = checkpoint(layer(32, 32))
    write_as(tmp_path / "g", whole, "gptq")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        write_as(tmp_path / "g", whole, "compressed-tensors")
    monkeypatch.setattr("loopq.storage.files.free_bytes", lambda path: 10)
    with pytest.raises(CheckpointError, match="the disk has"):
        write_as(tmp_path / "x", whole, "gptq")
    monkeypatch.setattr("loopq.storage.files.free_bytes", lambda path: 1 << 40)
    monkeypatch.setattr("loopq.storage.model_files.write_tensors", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_as(tmp_path / "x", whole, "gptq")
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


def test_inspect_explains_each_format(tmp_path):
    whole = checkpoint(layer(64, 128, 4, 128))
    for form in FOLDERS:
        write_as(tmp_path / form, whole, form)
        assert format_of(tmp_path / form).name == form
        found = inspect_any(tmp_path / form)
        assert found["format"] == form
        assert found["layers"][0]["bits_per_weight"] == 4.125
        assert {d["name"] for d in found["dense"]} == set(whole.dense)
        assert found["settings"]["seed"] == 3
        json.dumps(found)
        if form != "native":
            on_disk = (tmp_path / form / "model.safetensors").stat().st_size
            assert found["n_bytes_files"] == on_disk
            assert found["exported_by_loopq"]
            (tmp_path / form / RECORD).unlink()
            assert inspect_any(tmp_path / form)["exported_by_loopq"] is None


def test_shards_of_other_tools(tmp_path):
    made = layer(32, 32)
    folder = tmp_path / "g"
    write_as(folder, checkpoint(made), "gptq")
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
    assert read_any(folder).layers[made.name].same_as(made)
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


def test_quantize_config_alone_is_enough(tmp_path):
    made = layer(32, 32)
    write_as(tmp_path / "g", checkpoint(made), "gptq_v2")
    (tmp_path / "g" / RECORD).unlink()
    config = read_json(tmp_path / "g" / "config.json")
    old = config.pop("quantization_config")
    (tmp_path / "g" / "config.json").write_text(json.dumps(config))
    write_json(tmp_path / "g" / "quantize_config.json", {k: v for k, v in old.items() if k != "quant_method"})
    assert read_any(tmp_path / "g").layers[made.name].same_as(made)


def broken(folder, form, change_tensors=None, change_config=None, made=None):
    """An export without its record, with tensors or config changed."""
    shutil.rmtree(folder, ignore_errors=True)
    write_as(folder, checkpoint(made or layer(64, 64, 4, 32, symmetric=form != "asym")), form)
    (folder / RECORD).unlink()
    path = folder / "model.safetensors"
    if change_tensors:
        tensors = read_tensors(path)
        change_tensors(tensors)
        write_tensors(path, tensors)
    if change_config:
        config = read_json(folder / "config.json")
        change_config(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, array, dtype=None):
    return lambda tensors: tensors.__setitem__(name, RawTensor.of(np.asarray(array), dtype))


def edit(name, change):
    def apply(tensors):
        array = tensors[name].array().copy()
        change(array)
        tensors[name] = RawTensor.of(array, tensors[name].dtype)

    return apply


CT, V1, V2, MA = "compressed-tensors", "gptq", "gptq_v2", "marlin"
DAMAGED_TENSORS = [
    (CT, drop("a.b.weight_scale"), r"tensor 'a\.b\.weight_scale' is missing"),
    (CT, drop("a.b.weight_shape"), r"tensor 'a\.b\.weight_shape' is missing"),
    (CT, put("a.b.weight_packed", np.zeros((64, 8), np.int64)), r"weight_packed' is I64 \[64, 8\]; expected I32"),
    (CT, put("a.b.weight_packed", np.zeros((64, 7), np.int32)), r"'a\.b\.weight_packed' is I32 \[64, 7\]"),
    (CT, put("a.b.weight_scale", np.ones((64, 3), np.float16)), r"'a\.b\.weight_scale' is F16 \[64, 3\]"),
    (CT, put("a.b.weight_scale", np.ones((64, 2), np.int8)), r"'a\.b\.weight_scale' is I8"),
    (CT, edit("a.b.weight_scale", lambda a: a.__setitem__((3, 1), 0)), r"'a\.b\.weight_scale' holds a scale"),
    (CT, edit("a.b.weight_shape", lambda a: a.__setitem__(1, 60)), r"'a\.b\.weight_(packed|scale)'"),
    (CT, put("a.b.weight_shape", np.array([0, 64])), r"'a\.b\.weight_shape': shape\[0\]: 0; allowed: 1 to"),
    (CT, put("a.b.weight_g_idx", np.zeros(64, np.int32)), r"'a\.b\.weight_g_idx'"),
    (V1, drop("a.b.qzeros"), r"tensor 'a\.b\.qzeros' is missing"),
    (V1, drop("a.b.scales"), r"tensor 'a\.b\.scales' is missing"),
    (V1, put("a.b.qweight", np.zeros((9, 64), np.int32)), r"'a\.b\.qweight' is I32 \[9, 64\]"),
    (V1, put("a.b.qzeros", np.zeros((2, 9), np.int32)), r"'a\.b\.qzeros' is I32 \[2, 9\]"),
    (V1, edit("a.b.qzeros", lambda a: a.__setitem__((1, 0), 0)), r"'a\.b\.qzeros': zero point 1 of output 0, group 1"),
    (V2, edit("a.b.qzeros", lambda a: a.__setitem__((0, 1), 0)), r"'a\.b\.qzeros': zero point 0 of output 8, group 0"),
    (V1, edit("a.b.g_idx", lambda a: a.__setitem__(5, 1)), r"'a\.b\.g_idx': column 5 is in group 1 instead of 0"),
    (V1, edit("a.b.scales", lambda a: a.__setitem__((0, 0), np.inf)), r"'a\.b\.scales' holds a scale"),
    (V1, put("a.b.scales", np.ones((2, 64), np.float64)), r"'a\.b\.scales' is F64"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "change", "match"), DAMAGED_TENSORS)
def test_wrong_tensors_are_refused_by_name(tmp_path, form, change, match):
    with pytest.raises(CheckpointError, match=match):
        read_any(broken(tmp_path / "d", form, change))


def test_bits_beyond_the_last_code_are_refused(tmp_path):
    made = layer(5, 13, 3, -1, False)
    top = lambda a: a.__setitem__((2, -1), a[2, -1] | -(1 << 31))  # noqa: E731
    with pytest.raises(
        CheckpointError, match=r"'a\.b\.weight_packed': row 2 has bits after its last code: 13 codes"
    ):
        read_any(broken(tmp_path / "d", CT, edit("a.b.weight_packed", top), made=made))
    last = lambda a: a.__setitem__((-1, 0), -1)  # noqa: E731
    with pytest.raises(
        CheckpointError, match=r"'a\.b\.weight_zero_point': row 0 has bits after its last code"
    ):
        read_any(broken(tmp_path / "d", CT, edit("a.b.weight_zero_point", last), made=made))
    with pytest.raises(CheckpointError, match=r"'a\.b\.qweight'"):
        read_any(broken(tmp_path / "d", V2, edit("a.b.qweight", last), made=made))
    write_as(tmp_path / "n", checkpoint(made), "native")
    tensors = read_tensors(tmp_path / "n" / "model.safetensors")
    edit("a.b.weight_packed", top)(tensors)
    with pytest.raises(CheckpointError, match=r"'a\.b\.weight_packed': row 2 has bits after"):
        type(made).from_tensors(stored_settings(made), TensorReader("file", tensors), {})
    tensors = read_tensors(tmp_path / "n" / "model.safetensors")
    edit("a.b.weight_zero_point", last)(tensors)
    with pytest.raises(CheckpointError, match=r"'a\.b\.weight_zero_point': row 0 has bits after"):
        type(made).from_tensors(stored_settings(made), TensorReader("file", tensors), {})


def test_marlin_files_with_wrong_tensors(tmp_path):
    made = layer(256, 256, 4, 128)
    for change, match in [
        (drop("a.b.s"), "there is no quantized layer"),
        (put("a.b.s", np.ones((3, 256), np.float16)), r"'a\.b\.s' is F16 \[3, 256\]"),
        (put("a.b.B", np.zeros((16, 100), np.int32)), r"'a\.b\.B' has shape \[16, 100\]"),
        (put("a.b.B", np.zeros((16, 512), np.int8)), r"'a\.b\.B' is I8"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            read_any(broken(tmp_path / "d", MA, change, made=made))
    with pytest.raises(CheckpointError, match="group_size: 64; allowed: -1, 128"):
        read_any(broken(tmp_path / "d", MA, None, lambda c: c.update(group_size=64), made=made))


@pytest.mark.parametrize(
    ("form", "change", "match"),
    [
        (
            V1,
            lambda c: c.update(checkpoint_format="gptq_p", format="gptq_p"),
            "'gptq', format 'gptq_p': loopq reads",
        ),
        (V1, lambda c: c.update(quant_method="awq"), "quant_method 'awq'"),
        (V1, lambda c: c.update(bits=5), r"module 'a\.b': bits: 5; allowed: 2, 3, 4, 8"),
        (V1, lambda c: c.update(bits=8), r"'a\.b\.qweight'"),
        (V1, lambda c: c.update(group_size="big"), "group_size: 'big'; allowed: a whole number"),
        (V1, lambda c: c.update(pack_dtype="int8"), "pack_dtype: 'int8'; allowed: 'int32'"),
        (CT, lambda c: c.update(config_groups={}), r"module 'a\.b': no config group says how"),
        (
            CT,
            lambda c: c["config_groups"]["group_0"].update(format="naive-quantized"),
            "format 'naive-quantized'; loopq reads pack-quantized",
        ),
        (
            CT,
            lambda c: c["config_groups"]["group_0"]["weights"].update(type="float"),
            "type: 'float'; allowed: 'int'",
        ),
        (
            CT,
            lambda c: c["config_groups"]["group_0"]["weights"].update(strategy="tensor"),
            "strategy: 'tensor'; allowed: 'group', 'channel'",
        ),
        (
            CT,
            lambda c: c["config_groups"]["group_0"].update(input_activations={"num_bits": 8}),
            "quantized activations",
        ),
        (CT, lambda c: c["config_groups"]["group_0"].update(targets=["re:.*other"]), "no config group"),
    ],
)
def test_wrong_configs_are_refused(tmp_path, form, change, match):
    with pytest.raises(CheckpointError, match=match):
        read_any(broken(tmp_path / "d", form, None, change))


def test_truncated_files_are_refused(tmp_path):
    for form in (CT, V1, V2, MA):
        folder = broken(tmp_path / "d", form, made=layer(256, 128, 4, 128))
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(
            CheckpointError, match=r"damaged, truncated or not a safetensors file \(.*incomplete metadata"
        ):
            read_any(folder)


def test_records_that_do_not_fit_are_refused(tmp_path):
    def record(change):
        folder = tmp_path / "d"
        shutil.rmtree(folder, ignore_errors=True)
        write_as(folder, checkpoint(layer(64, 64, 4, 32)), V1)
        reseal(folder / RECORD, change)
        return folder

    fit = r"layer a\.b\.weight: its tensors are not those of"
    for change, match in [
        (lambda d: d.update(version=3), "version 3; this loopq reads version 2"),
        (lambda d: d.update(format="x"), "its format is not 'loopq-export'"),
        (lambda d: d.update(target="marlin"), "config.json says gptq, .* 'marlin'"),
        (lambda d: d["layers"][0].update(name="other.weight"), "layer 'other.weight' is in loopq_export"),
        (lambda d: d["layers"].clear(), "layer 'a.b.weight' is not in"),
        (lambda d: d.pop("ties"), "'ties' is missing; known: loopq_version"),
        (lambda d: d["layers"][0].pop("bits"), r"layers\[0\]: 'bits' is missing"),
        (lambda d: d["layers"][0].update(bits=8), fit),
        (lambda d: d["layers"][0].update(shape=[64, 60]), "was changed after the export|choose what to do"),
        (lambda d: d["layers"][0].update(shape=[32, 64]), "was changed after the export"),
        (lambda d: d["layers"][0].update(group_size=64), "was changed after the export"),
        (lambda d: d["layers"][0].update(group_size=16), "was changed after the export"),
        (lambda d: d["layers"][0].update(symmetric=False), fit),
        (lambda d: d["layers"][0].update(transform={"type": "channel_scale"}), fit),
        (lambda d: d["layers"][0].update(trellis={"state_bits": 8, "stream_rows": 512}), fit),
    ]:
        with pytest.raises(CheckpointError, match=match):
            read_any(record(change))
    folder = record(lambda d: None)
    tensors = read_tensors(folder / "model.safetensors")
    edit("a.b.qweight", lambda a: a.__setitem__((0, 0), a[0, 0] ^ 1))(tensors)
    write_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"layer a\.b\.weight: reads back differently"):
        verify(folder, checkpoint(layer(64, 64, 4, 32)))


def test_an_asymmetric_layer_is_not_restored_as_a_symmetric_one():
    made = layer(8, 32, 4, 32, False)
    with pytest.raises(CheckpointError, match="its tensors are not those of"):
        restore(made, stored_settings(made, symmetric=True), "f")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 5}, r"bits: 5; allowed: 2, 3, 4, 8"),
        ({"bits": True}, "bits: True; allowed: a whole number"),
        ({"bits": 4.0}, r"bits: 4\.0; allowed: a whole number"),
        ({"scale_dtype": "int8"}, "scale_dtype: 'int8'; allowed: float32, float16, bfloat16"),
        ({"orientation": "up"}, "orientation: 'up'; allowed: 'out_in', 'in_out'"),
        ({"symmetric": None}, "symmetric: None; allowed: true or false"),
        ({"group_size": 0}, "group_size: 0; allowed: -1 or 1 to"),
        ({"group_size": "32"}, "group_size: '32'; allowed: a whole number"),
        ({"shape": [8]}, r"shape: \[8\]; allowed: a list of 2"),
        ({"shape": [8, -1]}, r"shape\[1\]: -1; allowed: 1 to"),
        ({"name": "../a.weight"}, r"name: '\.\./a\.weight'; allowed: a plain name"),
        ({"trellis": {"state_bits": 40, "stream_rows": 512}}, r"trellis\.state_bits: 40; allowed: 4 to 16"),
        ({"trellis": {"state_bits": 8, "stream_rows": 0}}, r"trellis\.stream_rows: 0; allowed: 1 to"),
        ({"trellis": {"state_bits": 8, "stream_rows": 9, "function": "x"}}, "trellis.function: 'x'; allowed"),
        ({"colour": "red"}, "'colour' is unknown; known: name, bits"),
    ],
)
def test_an_index_entry_that_is_wrong_is_refused(change, match):
    with pytest.raises(CheckpointError, match=f"^file: {match}"):
        stored_settings(layer(8, 64), **change)


def test_folders_that_are_no_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither loopq\.json nor config\.json"):
        read_any(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="a model that is not quantized"):
        read_any(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: the whole: \[\]; allowed: an object"):
        read_any(tmp_path)


def test_zero_points_in_bytes_of_older_files():
    made = layer(40, 64, 4, 32, False)
    tensors = made.tensors()
    tensors["a.b.weight_zero_point"] = RawTensor.of((made.zeros.astype(np.int16) - 8).astype(np.int8))
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    config = {"format": "pack-quantized", "config_groups": {"g": {"targets": ["re:a.*"], "weights": weights}}}
    read = FORMATS.get(CT).read_layer("a.b", TensorReader("f", tensors), config)
    assert read.same_as(made)
    tensors["a.b.weight_zero_point"] = RawTensor.of(np.full((40, 2), 9, np.int8))
    with pytest.raises(CheckpointError, match="zero points outside 4 bits"):
        FORMATS.get(CT).read_layer("a.b", TensorReader("f", tensors), config)


def test_scales_in_other_types_are_read(tmp_path):
    made = layer(32, 32)
    wide = lambda t: t.__setitem__("a.b.scales", float_to_raw(t["a.b.scales"].float32(), "F32"))  # noqa: E731
    read = read_any(broken(tmp_path / "d", V1, wide, made=made)).layers["a.b.weight"]
    assert read.grid.scale_dtype == "float32"
    np.testing.assert_array_equal(read.scales, made.scales)
