"""Models of a Python file."""

from __future__ import annotations

import huggingface_hub.constants
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopq
from loopq.errors import ConfigError, SystemContractError
from loopq.models.from_python import Opening, load_python, open_model, wrap
from loopq.models.load import encode_bytes, load_model
from loopq.models.systems.generic import Generic
from tests.support.accelerator import DEVICE, accelerator
from tests.support.python_models import MODULE
from tests.support.subwords import dense_folder


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    return f"{tmp_path / 'own.py'}:make"


def test_from_python_at_half_and_at_twice_the_depth(spec):
    model = load_python(spec).model
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    result = loopq.quantize(model, ids, group_size=16)
    assert list(result.layers) == ["core.weight"]
    with pytest.raises(ConfigError, match=r"Generic\(model, depth='...'\)"):
        loopq.evaluate(model, {"q": result}, ids, n_steps=2)
    named = Generic(model, depth="n_steps")
    for depth in (2, 8):
        _, measured = loopq.evaluate(named, {"q": result}, ids, n_steps=depth)
        assert measured.kl.mean() > 0
        again = loopq.quantize(named, ids, n_steps=depth, group_size=16)
        assert again.layers["core.weight"].report["steps"] == list(range(depth))
    assert "ranks" in loopq.diagnose(named, ids, n_steps=2, only=["ranks"])["sections"]


def test_a_model_of_a_file_goes_to_the_device_that_is_asked_for(spec):
    with accelerator():
        assert load_python(spec, device=DEVICE).system.device.type == DEVICE


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own.py", r"give FILE\.py:FUNCTION, where FUNCTION returns a torch module"),
        ("absent.py:make", r"give FILE\.py:FUNCTION"),
        ("own.py:absent", "own.py: has no function 'absent'"),
        ("own.py:number", "returned int, which is neither a torch module nor an adapter"),
    ],
)
def test_a_file_that_gives_no_model_is_refused(tmp_path, name, said):
    (tmp_path / "own.py").write_text("def number():\n    return 3\n")
    with pytest.raises(ConfigError, match=said):
        load_python(f"{tmp_path}/{name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return dense_folder(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def module(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def bare(module):
    """The same model, of no folder."""
    model = type(module)(module.config)
    model.load_state_dict(module.state_dict())
    model.name_or_path = ""
    return model


def test_a_module_has_the_tokenizer_of_its_name(folder, module):
    text = loopq.generate(folder, "The sea was", n_tokens=4)
    assert loopq.generate(module, "The sea was", n_tokens=4) == text
    few = {"n_prompts": 2, "seq_len": 16, "group_size": 16, "preset": "fast", "threads": 1}
    results = [loopq.quantize(model, **few) for model in (folder, module)]
    assert results[0].settings["calibration"] == results[1].settings["calibration"]
    for name, layer in results[0].layers.items():
        assert results[1].layers[name].same_as(layer)
    assert loopq.evaluate(module, {"q": results[1]}, n_prompts=1, seq_len=16)[0].bits_per_byte > 0


def test_a_tokenizer_is_given(folder, bare):
    text, tokenizer = "The sea was", AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for given in (tokenizer, folder, str(folder), type("Processor", (), {"tokenizer": tokenizer})()):
        loaded = open_model(bare, Opening(tokenizer=given))
        assert loaded.encode(text) == ids
        assert loaded.tokenizer.decode(ids) == text
    assert wrap(bare, lambda text: map(len, text.split())).encode(text) == [3, 3, 3]
    # It also replaces the one of a folder and of a loaded model.
    for model in (folder, load_model(folder)):
        assert open_model(model, Opening(tokenizer=lambda text: [7])).encode(text) == [7]
    expected = loopq.generate(bare, tokenizer(text), n_tokens=3)
    assert loopq.generate(bare, text, n_tokens=3, tokenizer=tokenizer) == tokenizer.decode(expected)
    for wrong, said in ((5, "got int"), ("nowhere", "not a folder with tokenizer files")):
        with pytest.raises(ConfigError, match=rf"^tokenizer[^\n]*{said}[^\n]*$"):
            loopq.quantize(bare, ["a text"], tokenizer=wrong)


def test_a_module_without_a_tokenizer_takes_no_text(bare, tmp_path):
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    for name in ("", str(tmp_path), "nobody/nothing"):
        bare.name_or_path = name
        for call in (
            lambda: loopq.generate(bare, "The sea", n_tokens=2),
            lambda: loopq.quantize(bare, method="rtn", group_size=16),
            lambda: loopq.quantize(bare, ["a text"], method="rtn", group_size=16),
            lambda: loopq.evaluate(bare, {}),
            lambda: loopq.diagnose(bare, only=["ranks"]),
        ):
            with pytest.raises(ConfigError, match="tokenizer"):
                call()
    assert loopq.quantize(bare, ids, method="rtn", group_size=16).layers
    assert len(loopq.generate(bare, [1, 2, 3], n_tokens=2)) == 2


def test_a_tokenizer_that_cannot_be_loaded_is_no_matter_for_ids(bare, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    bare.name_or_path = str(tmp_path)
    loaded = open_model(bare)
    with pytest.raises(ConfigError, match=r"tokenizer cannot be loaded .*; pass tokenizer="):
        loaded.encode("a")
    assert loopq.quantize(loaded, [[1, 2, 3, 4]], method="rtn", group_size=16).layers


def test_a_tokenizer_is_found_in_the_cache_of_the_hub(folder, bare, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    at, commit = tmp_path / "models--someone--model", "0" * 40
    (at / "refs").mkdir(parents=True)
    (at / "refs" / "main").write_text(commit)
    (at / "snapshots" / commit).mkdir(parents=True)
    for path in folder.glob("tokenizer*"):
        (at / "snapshots" / commit / path.name).write_bytes(path.read_bytes())
    bare.name_or_path = "someone/model"
    assert open_model(bare).tokenizer.bos_token == "<s>"


class _Bytes(nn.Module):
    def __init__(self, n_ids, n_places):
        super().__init__()
        self.places, self.embed = nn.Embedding(n_places, 16), nn.Embedding(n_ids, 16)
        self.core, self.head = nn.Linear(16, 16), nn.Linear(16, n_ids)

    def forward(self, ids):
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        for _ in range(3):
            x = x + torch.tanh(self.core(x))
        return self.head(x)


@pytest.mark.parametrize(("n_ids", "n_places"), [(256, 300), (256, 64), (256, 256), (300, 256), (64, 300)])
def test_only_a_model_of_256_ids_takes_bytes(n_ids, n_places):
    loaded = wrap(_Bytes(n_ids, n_places))
    assert (loaded.encode is encode_bytes) == (n_ids == 256)
    assert any("UTF-8 bytes" in note for note in loaded.report.notes) == (n_ids == 256)


def test_the_code_of_a_folder_runs_if_it_is_trusted(remote_folder, monkeypatch):
    ids = [[1, 2, 3, 4, 5, 6]]
    doors = [
        lambda **trust: loopq.quantize(remote_folder, ids, group_size=16, **trust),
        lambda **trust: loopq.evaluate(remote_folder, {}, ids, **trust),
        lambda **trust: loopq.diagnose(remote_folder, ids, only=["ranks"], **trust),
        lambda **trust: loopq.generate(remote_folder, [1, 2], n_tokens=2, **trust),
    ]
    for door in doors:
        with pytest.raises(ConfigError, match="trust_remote_code=True"):
            door()
    # The code runs, and the adapter of its config misses some layers.
    with pytest.raises(SystemContractError, match="no module"):
        doors[0](trust_remote_code=True)
    allowed = []

    def load(spec, *, trust_remote_code, **options):
        allowed.append(trust_remote_code)
        raise ConfigError("seen")

    for place in ("from_python", "restore"):
        monkeypatch.setattr(f"loopq.models.{place}.load_model", load)
    for door in doors:
        with pytest.raises(ConfigError, match="seen"):
            door(trust_remote_code=True)
    assert allowed == [True] * 4


def test_what_is_no_model_is_refused(module):
    result = loopq.quantize(module, [[1, 2, 3, 4]], method="rtn", group_size=16)
    with pytest.raises(ConfigError, match="the model is a Checkpoint; give a torch module"):
        loopq.quantize(result, [[1, 2, 3]])
