"""Generating text: the logits of one token after another, choosing tokens, and what cannot generate."""

from __future__ import annotations

import pytest
import torch

from loopq.errors import ConfigError, NonFiniteError
from loopq.models.load import load_model
from loopq.runtime.generate import Decoder, Generation, choose, end_ids, generate
from loopq.systems.base import Batch
from loopq.systems.capabilities import marked
from tests.support.looped import SIZES
from tests.support.marks import slow_unless
from tests.support.systems import CASES, open_system, rolled_out

pytestmark = pytest.mark.filterwarnings("ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*")

_TEXT = [5, 9, 7, 30, 11, 12]
_MORE = [8, 21, 4, 17]
_SILENT = ("albert", "trm")
_CAUSAL = {name: case for name, case in CASES.items() if case.system not in _SILENT}
#: Models whose keys and values are kept, by their class or by their adapter.
_CACHED = (
    "COCONUT", "Huginn", "IQuest", "LoopFormer", "LoopFormer, hub", "LoopUS", "Nanbeige", "Nanbeige, weighted loops",
    "Ouro", "Ouro, early exit", "Parcae", "R-Llama", "looped Llama", "looped OLMoE, experts", "looped Qwen2, windows",
    "transformers Dory", "transformers GPT-2 COCONUT", "transformers GPT-NeoX Ponder",
    "transformers GPT-NeoX Ponder, scaled", "transformers HRM-Text", "transformers Inkling-2", "transformers Mamba",
    "transformers Zamba", "transformers Zamba2", "generic HRM-Text", "generic Zamba",
)  # fmt: skip
#: Seconds each.
_LONG = (
    "looped OLMoE, experts",
    "transformers Inkling-2",
    "transformers Dory",
    "generic Zamba",
    "transformers HRM-Text",
)


@pytest.mark.parametrize("name", slow_unless(lambda name: name not in _LONG, _CAUSAL))
def test_one_token_after_another_gives_the_logits_of_a_rollout(name):
    case = _CAUSAL[name]
    system = open_system(case)
    # In float64, sums in another order differ by nothing that float32 shows. Inkling-2's gates stay float32.
    exact = name != "transformers Inkling-2"
    system.model.to(torch.float64 if exact else torch.float32)
    for n_steps in case.depths:
        decoder = Decoder(system, n_steps, Generation())
        assert decoder.backend.name == ("cache" if name in _CACHED else "rollout"), decoder.declined
        ids = marked(system, _TEXT)
        for n in range(len(_MORE) + 1):
            text = [*ids, *_MORE[:n]]
            expected = rolled_out(system, text, n_steps)[-1]
            room = 1e-6 if exact else 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(decoder(text), expected, rtol=1e-6 if exact else 1e-5, atol=room)
        assert decoder.depths == [n_steps] * 5


@pytest.mark.parametrize("name", ["looped Llama", "Ouro"])
def test_a_text_may_differ_from_the_one_before_or_repeat_it(name):
    system = open_system(CASES[name])
    decoder = Decoder(system, 2, Generation())
    for text in (_TEXT, [*_TEXT, 8], [3, *_TEXT], _TEXT[:4], _TEXT[:4]):
        torch.testing.assert_close(decoder(text), rolled_out(system, text, 2)[-1], rtol=1e-5, atol=1e-5)


def test_a_text_whose_run_was_stopped_is_run_anew(monkeypatch):
    system = open_system(CASES["looped Llama"])
    decoder, right = Decoder(system, 2, Generation()), system.extend
    decoder(_TEXT)

    def stopped(*args):
        right(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(system, "extend", stopped)
    with pytest.raises(KeyboardInterrupt):
        decoder([*_TEXT, 8])
    monkeypatch.setattr(system, "extend", right)
    text = [*_TEXT, 8]
    torch.testing.assert_close(decoder(text), rolled_out(system, text, 2)[-1], rtol=1e-5, atol=1e-5)


def test_a_token_starts_from_the_same_state_however_many_follow():
    system = open_system(CASES["Huginn"])
    ids = torch.tensor([_TEXT])
    long, short = (system.noise(Batch(i, (3,), 1, by_token=True)) for i in (ids, ids[:, :4]))
    assert torch.equal(long[:, :4], short)
    assert not torch.equal(long[:, 0], long[:, 1])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.system in _SILENT])
def test_models_that_are_not_causal_are_refused(name):
    system = open_system(CASES[name])
    with pytest.raises(ConfigError, match=r"no text to generate|cannot generate text"):
        Decoder(system, system.n_steps, Generation())


def test_a_model_without_a_rule_is_not_left_early():
    with pytest.raises(ConfigError, match=r"^exit: nanbeige has no rule"):
        Decoder(open_system(CASES["Nanbeige"]), 2, Generation(exit=0.5))


def test_tokens_are_greedy_or_drawn_from_the_most_probable():
    logits = torch.tensor([0.0, 2.0, 1.0, -9.0])
    generator = torch.Generator().manual_seed(0)
    assert choose(logits, Generation(), generator) == 1
    drawn = [choose(logits, Generation(temperature=1.0, top_p=0.9), generator) for _ in range(200)]
    assert set(drawn) == {1, 2}
    share = drawn.count(1) / 200
    assert abs(share - 0.731) < 0.1
    assert {choose(logits, Generation(temperature=5.0, top_p=1e-6), generator) for _ in range(20)} == {1}


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e38])
def test_the_smallest_temperatures_choose_greedily(temperature, scale):
    logits = torch.tensor([0.0, 2.0, 1.0, -3.0]) * scale
    logits[0] = -torch.inf
    assert choose(logits, Generation(temperature=temperature), torch.Generator().manual_seed(0)) == 1


def test_logits_of_nan_are_named_with_layer_and_step():
    loaded = load_model("huginn_small")
    decoder = Decoder(loaded.system, 3, Generation())
    name, weight = next(n for n in loaded.model.named_parameters() if "core_block" in n[0] and n[1].ndim == 2)
    with torch.no_grad():
        weight.fill_(torch.inf)
    for run in (
        lambda: decoder(list(b"The sea")),
        lambda: Decoder(loaded.system, 3, Generation()),
        lambda: Decoder(loaded.system, 3, Generation(exit=0.5)),
    ):
        with pytest.raises(
            NonFiniteError, match=rf"NaN or infinity; .*layer {name.removesuffix('.weight')}, step 0"
        ):
            run()
    assert not any(m._forward_hooks for m in loaded.model.modules())


def test_logits_of_infinity_are_refused():
    loaded = load_model("huginn_small")
    decoder = Decoder(loaded.system, 2, Generation())
    below, above = torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, torch.inf])
    decoder._refuse_nan(below, decoder._batch([1]))
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        decoder._refuse_nan(above, decoder._batch([1]))


@pytest.mark.parametrize("vocabulary", [2, 5, 8])
def test_a_small_vocabulary_has_enough_tokens_for_the_trials(tmp_path, vocabulary):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=4, **{**SIZES, "vocab_size": vocabulary})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    system = load_model(f"looped:{tmp_path}[1:3]x2").system
    decoder = Decoder(system, 2, Generation())
    assert decoder.backend.name == "cache"
    assert decoder([1, 0]).shape == (vocabulary,)


def test_marks_of_the_end_of_another_kind_end_no_text():
    loaded = load_model("huginn_small")
    for odd in ("abc", [[1]], {"a": 1}, [None, 1.5], 7):
        loaded.config["eos_token_id"] = odd
        assert end_ids(loaded) <= {7}


def test_a_prompt_beyond_the_positions_names_no_negative_number():
    loaded = load_model("huginn_small")
    decoder = Decoder(loaded.system, 2, Generation())
    with pytest.raises(ConfigError, match=r"positions of the model; give a shorter prompt$"):
        next(generate(loaded, [5] * 100_000, decoder, Generation()))


def test_generation_repeats_and_stops_at_the_end_token():
    loaded = load_model("huginn_small")
    settings = Generation(n_tokens=8, temperature=0.8, seed=4)

    def text(given):
        decoder = Decoder(loaded.system, 2, given)
        return list(generate(loaded, list(b"The sea"), decoder, given))

    written = text(settings)
    assert len(written) == 8
    assert written == text(settings)
    assert written[:5] == text(settings.changed(n_tokens=5))
    assert written != text(settings.changed(seed=5))
    loaded.config["eos_token_id"] = [written[3]]
    assert text(settings) == written[: written.index(written[3])]
    assert end_ids(loaded) == {written[3]}
    with pytest.raises(ConfigError, match=r"n_tokens 128: .* 7 tokens more than the 128 positions"):
        text(Generation())
