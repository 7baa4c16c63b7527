"""Layers of a dense decoder that run several times: the same as a deeper model with those layers written out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import loopq
from loopq.errors import CheckpointError, ConfigError, SystemContractError
from loopq.models.load import load_model
from loopq.systems.base import Batch
from tests.support.looped import SIZES, save_dense
from tests.support.marks import slow_unless


def _ids(n: int = 12) -> torch.Tensor:
    return torch.randint(256, (2, n), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(tmp_path_factory.mktemp("dense"))


def test_logits_are_those_of_the_model_written_out(folder: Path) -> None:
    loaded = load_model(f"looped:{folder}[1:3]x3")
    order = [0, 1, 2, 1, 2, 1, 2, 3, 4]
    deep = LlamaForCausalLM(LlamaConfig(num_hidden_layers=len(order), **SIZES)).eval()
    deep.model.embed_tokens = loaded.model.model.embed_tokens
    deep.model.norm, deep.lm_head = loaded.model.model.norm, loaded.model.lm_head
    for mine, i in zip(deep.model.layers, order, strict=True):
        mine.load_state_dict(loaded.model.model.layers[i].state_dict())
    with torch.no_grad():
        expected = deep(_ids(), use_cache=False).logits
    assert torch.equal(loaded.system.rollout(Batch(_ids(), (0, 1)), 3), expected)
    once = load_model(f"looped:{folder}[1:3]x1")
    with torch.no_grad():
        dense = once.model(_ids(), use_cache=False).logits
    assert torch.equal(loaded.system.rollout(Batch(_ids(), (0, 1)), 1), dense)
    assert not torch.equal(dense, expected)


def test_a_cache_has_a_slot_for_each_time_that_a_layer_runs(folder: Path) -> None:
    system = load_model(f"looped:{folder}[1:3]x2").system
    whole = system.rollout(Batch(_ids(), (0, 1)), 2)
    first, cache = system.extend(Batch(_ids()[:, :9], (0, 1)), 2, 0, None)
    rest, cache = system.extend(Batch(_ids(), (0, 1)), 2, 9, cache)
    assert len(cache.layers) == 7
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_knows_its_loop(folder: Path, tmp_path: Path) -> None:
    spec = f"looped:{folder}[1:3]x2"
    ids = [row.tolist() for row in _ids()]
    loopq.quantize(spec, ids, out=tmp_path / "q", group_size=16, preset="fast", seq_len=12)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    # Named for what it is, so that engines that go by this name do not take it for a dense model.
    assert (config["looped_layers"], config["architectures"]) == ([1, 3, 2], ["LoopedLlamaForCausalLM"])
    opened = loopq.load(tmp_path / "q")
    assert (opened.system.name, opened.system.n_steps) == ("looped", 2)
    filled = loopq.load(tmp_path / "q", load_model(spec))
    batch = Batch(_ids(), (0, 1))
    assert torch.equal(opened.system.rollout(batch, 2), filled.system.rollout(batch, 2))
    calls = {p.name.split(".")[2]: p.invocations for p in opened.system.shared_parameters(2)}
    assert calls == {"0": 1, "1": 2, "2": 2, "3": 1, "4": 1}


@pytest.mark.parametrize("told_by", ["name", "files"])
def test_transformers_runs_the_loop_of_a_checkpoint(folder: Path, tmp_path: Path, told_by: str) -> None:
    from transformers import AutoModelForCausalLM

    import loopq.runtime.transformers

    ids, source = [row.tolist() for row in _ids()], f"looped:{folder}[1:3]x2"
    if told_by == "files":
        shutil.copytree(folder, source := str(tmp_path / "m"))
        data = json.loads((folder / "config.json").read_text()) | {"looped_layers": [1, 3, 2]}
        (tmp_path / "m" / "config.json").write_text(json.dumps(data))
    loopq.quantize(source, ids, out=tmp_path / "q", group_size=16, preset="fast", seq_len=12)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q").eval()
    with torch.no_grad():
        logits = model(_ids())
    expected = loopq.load(tmp_path / "q").system.rollout(Batch(_ids(), (0, 1)), 2)
    torch.testing.assert_close(logits.logits, expected, rtol=1e-4, atol=1e-4)
    assert len(logits.past_key_values.layers) == 7
    # An older loopq called it a Llama, which transformers runs without the loop.
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(
        CheckpointError, match=r"looped_layers \[1, 3, 2\], and transformers would run every layer once"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q")


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ("[1:3]", r"write looped:MODEL\[FIRST:LAST\]xTIMES"),
        ("[1:6]x2", r"with 5 layers: give FIRST, LAST and TIMES"),
        ("[3:3]x2", r"0 <= FIRST < LAST <= 5"),
        ("[1:3]x0", r"1 <= TIMES <= 65536"),
        ("[1:3]x9999999", r"write looped:MODEL"),
    ],
)
def test_loops_that_the_model_cannot_have_are_refused(folder: Path, loop: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_model(f"looped:{folder}{loop}")


def test_other_shapes_of_models_are_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    with pytest.raises(SystemContractError, match=r"only decoders with model\.layers"):
        load_model(f"looped:{tmp_path}[0:1]x2")


BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS = ["conv", "full_attention", "conv", "full_attention"]
ORDER = [0, 1, 2, 1, 2, 3]


def _vision() -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip


def _published(kind: str, order: Sequence[int]) -> Any:
    """A model of transformers with random weights and so many layers, in their kinds."""
    import transformers as t

    base = {**BASE, "num_hidden_layers": len(order)}
    heads = {"num_key_value_heads": 2}
    if kind == "GPTBigCode":
        sizes = {"n_embd": 32, "n_layer": len(order), "n_head": 4, "n_inner": 48, "n_positions": 64}
        return t.GPTBigCodeForCausalLM(t.GPTBigCodeConfig(vocab_size=64, **sizes))
    if kind == "Llava":
        text, vision = t.LlamaConfig(**base, **heads), t.CLIPVisionConfig(**_vision())
        config = t.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63)
        return t.LlavaForConditionalGeneration(config)
    if kind == "Gemma4":
        experts = {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        }
        own = {
            "head_dim": 16,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }
        kinds = [["sliding_attention", "full_attention"][i % 2] for i in order]
        config = t.Gemma4TextConfig(**base, **heads, **experts, **own, layer_types=kinds)
        return t.Gemma4ForCausalLM(config)
    if kind == "Lfm2":
        config = t.Lfm2Config(**base, **heads, block_ff_dim=48, layer_types=[KINDS[i] for i in order])
        return t.Lfm2ForCausalLM(config)
    if kind == "BioGpt":
        return t.BioGptForCausalLM(t.BioGptConfig(**base))
    return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**base))


@pytest.mark.parametrize(
    "kind",
    slow_unless(
        ("GPTNeoX", "Llava").__contains__, ["GPTNeoX", "GPTBigCode", "Lfm2", "Llava", "Gemma4", "BioGpt"]
    ),
)
def test_a_decoder_of_any_class_is_the_model_written_out(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _published(kind, range(4)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "m")
    written, state = _published(kind, ORDER).eval(), model.state_dict()
    list_of = re.compile(r"^(.*(?:layers|\.h)\.)(\d+)(\..*)$")
    numbered = {}
    for name in written.state_dict():
        found = None if "vision" in name else list_of.match(name)
        numbered[name] = f"{found[1]}{ORDER[int(found[2])]}{found[3]}" if found else name
    written.load_state_dict({name: state[source] for name, source in numbered.items()})
    loaded = load_model(f"looped:{tmp_path / 'm'}[1:3]x2")
    ids = _ids() % 60 + 3
    batch = Batch(ids, (0, 1))
    with torch.no_grad():
        expected = written(ids, use_cache=False).logits
        assert torch.equal(loaded.system.rollout(batch, 2), expected)
        assert torch.equal(loaded.model(ids, use_cache=False).logits, expected)
        assert not torch.equal(loaded.system.rollout(batch, 1), expected)
        assert torch.equal(
            loaded.model.generate(ids, max_new_tokens=3), written.generate(ids, max_new_tokens=3)
        )
        if loaded.system.has_steps:
            embedding = loaded.system.embed(batch)
            after = loaded.system.step(loaded.system.initial_state(batch, embedding), embedding, 0, 2)
            after = loaded.system.step(after, embedding, 1, 2)
            assert torch.allclose(loaded.system.predict(after, embedding), expected, atol=1e-5)
    result = loopq.quantize(
        loaded, ids, method="gptq", group_size=16, levels="even", threads=1, out=tmp_path / "q"
    )
    calls = {p.name: p.invocations for p in loaded.system.shared_parameters(2)}
    assert sum(n == 2 for n in calls.values()) == sum(n == 1 for n in calls.values())
    assert set(result.layers) == set(calls)
    assert not any("router" in name for name in result.layers)
    again = loopq.load(tmp_path / "q").system.rollout(batch, 2)
    assert torch.equal(again, loopq.load(result).system.rollout(batch, 2))


def test_layers_that_read_by_their_number_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Gemma-4")
    sizes = {
        **BASE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
    }
    config = transformers.Gemma4TextConfig(
        **sizes, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64
    )
    transformers.Gemma4ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(SystemContractError, match="config sets hidden_size_per_layer_input"):
        load_model(f"looped:{tmp_path}[1:3]x2")
