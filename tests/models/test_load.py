"""Loading: what is refused, what is reported, what is set right."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopq
from loopq.errors import CheckpointError, ConfigError, SystemContractError
from loopq.models.buffers import fresh_buffers, repair_buffers, unsaved_buffers, without_weights
from loopq.models.check import check_model
from loopq.models.hf import auto_class
from loopq.models.load import load_model
from loopq.systems.base import Batch
from loopq.systems.coconut import wrap_gpt2
from tests.support.systems import CASES, build, prompts

# A published class in small: its own weight initialisation, and rotary frequencies that no checkpoint holds.
REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class LoopConfig(PretrainedConfig):
    model_type = "loopq_test_loop"

    def __init__(self, hidden_size=16, num_loops=3, vocab_size=64, **kwargs):
        self.hidden_size, self.num_loops, self.vocab_size = hidden_size, num_loops, vocab_size
        super().__init__(**kwargs)


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q_proj = nn.Linear(d, d, bias=False)
        self.register_buffer("inv_freq", 1.0 / 10.0 ** torch.arange(d).div(d), persistent=False)

    def forward(self, x):
        return self.q_proj(x * self.inv_freq)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.self_attn = Attention(d)


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config.hidden_size)])


class LoopForCausalLM(PreTrainedModel):
    config_class = LoopConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Inner(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.2)

    def forward(self, input_ids, use_cache=None):
        x = self.model.embed_tokens(input_ids)
        for _ in range(self.config.num_loops):
            x = x + self.model.layers[0].self_attn(x)
        return CausalLMOutputWithPast(logits=self.lm_head(x))
"""


@pytest.fixture
def remote_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with code of its own, written by hand."""
    from safetensors.torch import save_file

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "modeling_loop.py").write_text(REMOTE)
    config = {
        "model_type": "loopq_test_loop",
        "architectures": ["LoopForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_loop.LoopConfig",
            "AutoModelForCausalLM": "modeling_loop.LoopForCausalLM",
        },
        "hidden_size": 16,
        "num_loops": 3,
        "vocab_size": 64,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 16),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(16, 16),
        "lm_head.weight": torch.randn(64, 16),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def _saved(name: str, tmp_path: Path) -> Path:
    model = build(CASES[name])
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "name", ["transformers HRM-Text", "transformers ALBERT, head", "transformers Zamba2"]
)
@pytest.mark.filterwarnings("ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*")
def test_folder_gives_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = _saved(name, tmp_path)
    loaded = load_model(folder)
    assert loaded.system.name == case.system
    assert loaded.report.missing == loaded.report.unexpected == loaded.report.repaired == ()
    assert loaded.report.dtype == "float32"
    expected = build(case)
    n_steps = case.depths[0]
    got = loaded.system.rollout(prompts(case), n_steps)
    torch.testing.assert_close(got, type(loaded.system)(expected).rollout(prompts(case), n_steps))
    assert "config.json" in loaded.side_files
    assert not any(name.endswith(".safetensors") for name in loaded.side_files)
    with pytest.raises(ConfigError, match=r"no tokenizer"):
        loaded.encode("text")


@pytest.mark.filterwarnings("ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*")
def test_tied_weights_stay_tied_and_are_reported(tmp_path: Path) -> None:
    loaded = load_model(_saved("transformers Zamba2", tmp_path))
    shared = loaded.system.shared_parameters(loaded.system.n_steps)
    assert all(len(p.owners) == 2 for p in shared)
    names = [group[0] for group in loaded.report.tied]
    assert {p.name for p in shared} <= set(names)


def test_dtype_is_cast_and_reported(tmp_path: Path) -> None:
    folder = _saved("transformers HRM-Text", tmp_path)
    assert load_model(folder, dtype="bfloat16").report.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"float32, bfloat16, float16; got 'int4'"):
        load_model(folder, dtype="int4")


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


def test_parameters_that_a_rollout_needs_must_be_there(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _saved("transformers HRM-Text", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors["stray.weight"] = tensors.pop(gone)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"lacks .*{gone.split('.layers')[0]}.*random numbers"):
        load_model(folder)


def test_codes_are_not_taken_for_a_model_in_full_precision(tmp_path: Path) -> None:
    folder = _saved("transformers HRM-Text", tmp_path)
    loopq.quantize(folder, [[1, 2, 3]], out=tmp_path / "q", method="rtn")
    with pytest.raises(
        CheckpointError, match=r"q: holds codes, not weights .* name the model that it was made from"
    ):
        load_model(tmp_path / "q")


def test_unexpected_tensors_are_reported(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _saved("transformers HRM-Text", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "stray.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    report = load_model(folder).report
    assert report.unexpected == ("stray.weight",)
    assert "in the checkpoint but not in the model: stray.weight" in report.lines()


def test_pooler_may_be_missing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _saved("transformers ALBERT", tmp_path)
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if "pooler" not in k}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = load_model(folder).report
    assert report.missing == ("pooler.bias", "pooler.weight")
    # What is drawn in its place is the same each time: equal work gives equal bytes.
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


def test_buffers_of_remote_code_are_right_after_loading(remote_folder: Path) -> None:
    """transformers 5 leaves whatever the memory held in them, transformers 4 loads them rightly."""
    loaded = load_model(remote_folder, trust_remote_code=True)
    expected = 1.0 / 10.0 ** torch.arange(16).div(16)
    assert torch.equal(loaded.model.model.layers[0].self_attn.inv_freq, expected)
    assert loaded.report.repaired in ((), ("model.layers.0.self_attn.inv_freq",))


def test_remote_code_that_fails_names_a_version_to_try(remote_folder: Path) -> None:
    code = (remote_folder / "modeling_loop.py").read_text()
    (remote_folder / "modeling_loop.py").write_text(code.replace("self.post_init()", "self.gone_in_5()"))
    with pytest.raises(CheckpointError, match=r"gone_in_5.*pip install 'transformers==4\.57\.6'"):
        load_model(remote_folder, trust_remote_code=True)


def test_damaged_buffer_is_found_and_set_right() -> None:
    model = build(CASES["transformers HRM-Text"])
    right = {name: b.clone() for name, b in unsaved_buffers(model).items()}
    assert repair_buffers(model) == ()
    model.model.rotary_emb.inv_freq[1] = float("nan")
    assert repair_buffers(model) == ("model.rotary_emb.inv_freq",)
    model.model.rotary_emb._buffers["inv_freq"] = torch.empty(8, device="meta")
    assert repair_buffers(model) == ("model.rotary_emb.inv_freq",)
    assert all(torch.equal(b, right[name]) for name, b in unsaved_buffers(model).items())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    repair_buffers(model)
    assert torch.equal(state, torch.get_rng_state())


def test_buffer_that_cannot_be_told_is_refused() -> None:
    model = build(CASES["transformers HRM-Text"])
    name = "model.rotary_emb.inv_freq"
    model.model.rotary_emb.inv_freq.zero_()
    with pytest.raises(CheckpointError, match=r"not the same in two new models"):
        repair_buffers(model, lambda m: {n: torch.randn_like(b) for n, b in unsaved_buffers(m).items()})
    with pytest.raises(CheckpointError, match=r"another shape"):
        repair_buffers(model, lambda m: {})
    nan = torch.full_like(model.model.rotary_emb.inv_freq, float("nan"))
    with pytest.raises(CheckpointError, match=r"not the same|NaN"):
        repair_buffers(model, lambda m: fresh_buffers(m) | {name: nan})


def test_class_that_cannot_be_built_again_is_refused() -> None:
    class Once(nn.Module):
        built = 0

        def __init__(self, config: Any) -> None:
            if Once.built:
                raise ValueError("only once")
            Once.built += 1
            super().__init__()
            self.config = config
            self.register_buffer("mask", torch.ones(3), persistent=False)

    with pytest.raises(CheckpointError, match=r"cannot be built again.*only once"):
        repair_buffers(Once({}))


def test_modules_without_weights_have_buffers() -> None:
    with without_weights():
        model = nn.BatchNorm1d(4)
        linear = nn.Linear(3, 2)
    assert linear.weight.is_meta
    assert not model.running_mean.is_meta
    assert not nn.Linear(3, 2).weight.is_meta


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


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"neither a folder .* nor a hub id .* nor an embedded model: huginn_small"
    ):
        load_model("no such model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json in it"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "nothing_known"}')
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"'nothing_known' is not known to transformers"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"allowed: an object"):
        load_model(tmp_path / "empty")


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


def test_wrong_system_is_refused(tmp_path: Path) -> None:
    folder = _saved("transformers HRM-Text", tmp_path)
    assert load_model(folder, system="hrm_text").system.name == "hrm_text"
    assert load_model(folder, system="generic").system.n_steps == 6
    with pytest.raises(SystemContractError, match=r"'ouro' does not fit HrmTextForCausalLM"):
        load_model(folder, system="ouro")


def test_coconut_state_dict(tmp_path: Path) -> None:
    """The published file is a pickled state dict of the wrapper; a converted one is taken without asking."""
    from safetensors.torch import save_file

    model = build(CASES["transformers GPT-2 COCONUT"])
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    assert "embedding.weight" in state
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles"):
        load_model(tmp_path, system="coconut")
    expected = type(CASES)({})
    case = CASES["transformers GPT-2 COCONUT"]
    pickled = load_model(tmp_path, system="coconut", allow_pickle=True)
    save_file(state, tmp_path / "model.safetensors")
    safe = load_model(tmp_path, system="coconut")
    assert (safe.system.start_id, safe.system.end_id) == (61, 62)
    assert safe.report.missing == safe.report.unexpected == expected.get("", ())
    again = wrap_gpt2(model.base_causallm, start_id=61, end_id=62, latent_id=63)
    outputs = [s.rollout(prompts(case), 3) for s in (pickled.system, safe.system, type(safe.system)(again))]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    del state["base_causallm.transformer.h.0.mlp.c_fc.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks .*c_fc"):
        load_model(tmp_path, system="coconut")


@pytest.mark.data
def test_plbert_runs_its_twelve_steps(data_folder: Path, tmp_path: Path) -> None:
    """PL-BERT: a real looped checkpoint (one ALBERT layer, twelve times) with phonemes for tokens."""
    source = data_folder / "models" / "plbert_kokoro"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(
        lzma.decompress((source / "model.safetensors.xz").read_bytes())
    )
    loaded = load_model(tmp_path)
    system = loaded.system
    assert (system.name, system.output, system.n_steps) == ("albert", "hidden", 12)
    assert len(system.shared_parameters(12)) == 6
    assert loaded.report.missing == ("pooler.bias", "pooler.weight")
    lines = lzma.decompress((source / "wikitext2_valid_phonemes.jsonl.xz").read_bytes()).splitlines()[:4]
    ids = torch.tensor([json.loads(line)["ids"][:64] for line in lines])
    batch = Batch(ids, (0, 1, 2, 3))
    hidden = system.rollout(batch, 12)
    assert hidden.shape == (4, 64, 768)
    with torch.no_grad():
        state = system.initial_state(batch, system.embed(batch))
        moved = []
        for t in range(12):
            after = system.step(state, None, t, 12)
            moved.append(float((after - state).norm() / state.norm()))
            state = after
    torch.testing.assert_close(state, hidden, rtol=1e-4, atol=1e-4)
    # It uses its loop: every step still moves the state.
    assert min(moved) > 0.05
    report = check_model(loaded)
    assert report.ok, "\n".join(report.lines())
