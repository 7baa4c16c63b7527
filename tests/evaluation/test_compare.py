"""A model with its own weights and with others."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import loopq
from loopq.calibrate.data import from_ids
from loopq.calibrate.overlap import hashes_of
from loopq.errors import CheckpointError, ConfigError, NonFiniteError
from loopq.evaluation import compare as module
from loopq.evaluation.compare import Measurement, compare
from loopq.models.load import load_model
from loopq.models.restore import load_checkpoint
from loopq.settings.execution import Execution
from loopq.storage.files import RawTensor
from loopq.systems.base import Batch
from loopq.systems.declare import parameter_of
from tests.support.accelerator import DEVICE, accelerator
from tests.support.looped import save_dense
from tests.support.looptoys import LinearLoop, LinearSystem
from tests.support.looptoys import tokens as made_up


def test_comparison_of_a_model_with_itself(loaded, tokens):
    weights = {
        p.name: parameter_of(loaded.system.model, p).detach().numpy()
        for p in loaded.system.shared_parameters(3)
    }
    reference, same = compare(
        loaded.system, {"same": weights}, tokens, seeds=(0, 1), execution=Execution(batch_size=4)
    )
    assert np.array_equal(same.kl, np.zeros((2, 10)))
    assert np.array_equal(same.agreement, np.ones((2, 10)))
    assert np.array_equal(same.nll, reference.nll)
    assert not np.array_equal(reference.nll[0], reference.nll[1])
    other = {n: w + 0.05 * np.sign(w) for n, w in weights.items()}
    worse = compare(loaded.system, {"other": other}, tokens)[1]
    assert (worse.kl > 0).all()


def test_numbers_are_those_of_both_rollouts(loaded, tokens):
    system = loaded.system
    name = system.shared_parameters(3)[0].name
    weight = system.model.get_parameter(name).detach().numpy().copy()
    other = weight + 0.1 * np.sign(weight)
    few = tokens.take(0, 3)
    full, changed = compare(
        system, {"other": {name: other}}, few, seeds=(0, 4), execution=Execution(batch_size=2)
    )
    ids = torch.from_numpy(np.stack(few.sequences))
    for row, seed in enumerate((0, 4)):
        logs = []
        for values in (weight, other):
            with torch.no_grad():
                system.model.get_parameter(name).copy_(torch.from_numpy(values))
                logs.append(system.rollout(Batch(ids, (0, 1, 2), seed), 3).double().log_softmax(-1))
        p, q = logs
        np.testing.assert_allclose(changed.kl[row], (p.exp() * (p - q)).sum(-1).mean(-1), rtol=1e-9)
        np.testing.assert_allclose(changed.agreement[row], (p.argmax(-1) == q.argmax(-1)).double().mean(-1))
        for measured, log in ((full, p), (changed, q)):
            nll = -log[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)
            np.testing.assert_allclose(measured.nll[row], nll, rtol=1e-9)
            assert measured.answered[row].tolist() == (log[:, -2].argmax(-1) == ids[:, -1]).double().tolist()
    assert (changed.agreement < 1).any()
    with torch.no_grad():
        system.model.get_parameter(name).copy_(torch.from_numpy(weight))
    assert np.array_equal(compare(system, {}, few, seeds=(4,), n_steps=3)[0].nll[0], full.nll[1])
    assert not np.allclose(compare(system, {}, few, seeds=(4,), n_steps=2)[0].nll[0], full.nll[1])


def test_a_summary_is_made_of_means():
    kl = np.array([[1.0, 2.0, 6.0], [3.0, 4.0, 2.0]])
    measured = Measurement(
        "x", kl, kl / 10, np.log([[2.0, 4.0, 8.0]] * 2), np.zeros((2, 3)), 2.0, "logits", 7
    )
    assert measured.summary() == {
        "name": "x", "output": "logits", "kl": 3.0, "agreement": pytest.approx(0.3), "n_seeds": 2, "n_prompts": 3,
        "kl_by_seed": [3.0, 3.0], "agreement_by_seed": pytest.approx([0.3, 0.3]),
        "perplexity": pytest.approx(4.0), "bits_per_byte": pytest.approx(1.0), "n_bytes": 7,
    }  # fmt: skip
    interval = measured.kl_interval()
    assert interval.estimate == pytest.approx(3.0)
    assert (interval.n, interval.low >= 2.0, interval.high <= 4.0) == (3, True, True)
    two = dataclasses.replace(measured, kl=kl[:, :2])
    assert two.kl_interval().estimate == 2.5
    assert dataclasses.replace(measured, kl=kl[:, :1]).kl_interval() is None
    assert "n_bytes" not in dataclasses.replace(measured, n_bytes=None, output="hidden").summary()


def test_hidden_states_are_compared_as_vectors():
    class Hidden(LinearSystem):
        output = "hidden"

    system, data = Hidden(LinearLoop()), made_up(n_prompts=3)
    weight = system.model.adapter.weight.detach().float().numpy()
    measured = compare(
        system, {"a": {"adapter.weight": 1.1 * weight}}, data, n_steps=4, execution=Execution(batch_size=2)
    )[1]
    (batch,) = data.batches(3)
    a = system.rollout(batch, 4).flatten(1).numpy()
    with torch.no_grad():
        system.model.adapter.weight.copy_(torch.from_numpy(1.1 * weight))
    b = system.rollout(batch, 4).flatten(1).numpy()
    np.testing.assert_allclose(measured.kl[0], ((a - b) ** 2).sum(1) / (a**2).sum(1), rtol=1e-5)
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(measured.agreement[0], cosine, rtol=1e-6)
    assert np.isnan(measured.nll).all()
    assert measured.summary().keys().isdisjoint({"perplexity", "bits_per_byte"})


def test_a_prompt_needs_a_token_to_predict(loaded, tokens):
    short = dataclasses.replace(tokens, scored_from=22)
    assert compare(loaded.system, {}, short)[0].nll.shape == (1, 10)
    with pytest.raises(ConfigError, match="at least two tokens after 23"):
        compare(loaded.system, {}, dataclasses.replace(tokens, scored_from=23))
    with pytest.raises(ConfigError, match=r"at least two tokens$"):
        compare(loaded.system, {}, from_ids([[1, 2], [3]]))


def test_bits_per_byte_divide_by_the_bytes_of_predicted_tokens(loaded, tokens):
    """Tokens of even id stand for three bytes, the others for one."""
    few = dataclasses.replace(tokens.take(0, 2), scored_from=2)
    measured = compare(loaded.system, {}, few, count_bytes=lambda ids: int(np.where(ids % 2, 1, 3).sum()))
    predicted = np.concatenate([ids[3:] for ids in few.sequences])
    width = np.where(predicted % 2, 1, 3).mean()
    assert measured[0].bytes_per_token == width
    assert measured[0].bits_per_byte == pytest.approx(measured[0].nll.mean() / np.log(2.0) / width)
    assert compare(loaded.system, {}, few)[0].bits_per_byte is None
    assert compare(loaded.system, {}, few, count_bytes=loaded.count_bytes)[0].bytes_per_token == 1.0


def test_whole_answers_are_scored_behind_the_question(loaded, tokens):
    """Prompts are filled with what the model itself predicts, in one of them all but the first token of the answer."""
    ids = np.stack(tokens.take(0, 3).sequences)
    for at in range(20, 24):
        batch = Batch(torch.from_numpy(ids), (0, 1, 2), 0)
        logits = loaded.system.rollout(batch, loaded.system.n_steps).detach().numpy()
        ids[:, at] = logits[:, at - 1].argmax(-1) + (at == 20) * np.array([0, 1, 0])
    text = from_ids(ids)
    task = dataclasses.replace(text, scored_from=19)
    few = dataclasses.replace(text, scored_from=20)
    assert [compare(loaded.system, {}, t)[0].answered[0].tolist() for t in (text, task, few)] == [
        [1, 1, 1], [1, 0, 1], [1, 1, 1],
    ]  # fmt: skip
    logp = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    expected = [-np.mean([logp[p, at - 1, ids[p, at]] for at in range(20, 24)]) for p in range(3)]
    assert compare(loaded.system, {}, task)[0].nll[0] == pytest.approx(expected, rel=1e-5)


def test_scoring_in_pieces_gives_the_numbers_of_the_whole(loaded, tokens, monkeypatch):
    name = loaded.system.shared_parameters(3)[0].name
    weights = {name: np.zeros(tuple(loaded.model.get_parameter(name).shape), np.float32)}
    whole = compare(loaded.system, {"zero": weights}, tokens, execution=Execution(batch_size=3))
    score, sizes = module._tokens, []

    def tracked(reference, out, targets, **more):
        sizes.append(out.numel())
        return score(reference, out, targets, **more)

    monkeypatch.setattr(module, "_tokens", tracked)
    # Pieces of seven positions, which do not divide the prompt; and of one.
    for limit in (7 * 3 * 256, 1):
        monkeypatch.setattr(module, "_PIECE", limit)
        sizes.clear()
        measured = compare(loaded.system, {"zero": weights}, tokens, execution=Execution(batch_size=3))
        assert max(sizes) <= max(limit, 3 * 256)
        for a, b in zip(whole, measured, strict=True):
            for what in ("kl", "agreement", "nll", "answered"):
                np.testing.assert_allclose(getattr(a, what), getattr(b, what), rtol=1e-12)


def test_a_comparison_runs_where_the_model_is(tiny, tokens):
    name = tiny.system.shared_parameters(3)[0].name
    weight = tiny.model.get_parameter(name).detach().numpy()
    variants = {"other": {name: weight + 0.1 * np.sign(weight)}}
    expected = compare(tiny.system, variants, tokens)[1]
    with accelerator():
        tiny.model.to(DEVICE)
        measured = compare(tiny.system, variants, tokens)[1]
    for field in ("kl", "agreement", "nll", "answered"):
        np.testing.assert_allclose(getattr(measured, field), getattr(expected, field), rtol=1e-4)


def test_a_reference_of_nan_is_named_with_model_and_prompt():
    system, data = LinearSystem(LinearLoop()), made_up(n_prompts=3)
    with torch.no_grad():
        system.model.adapter.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"full precision, .*prompt 0: .*layer adapter, step 0"):
        compare(system, {}, data, n_steps=2)


def test_positions_are_summarized_with_their_errors():
    kl = np.array([0.0, 1.0, 2.0, 3.0])
    spread = module.spread(kl, np.array([1.0, 1.0, 1.0, 0.0]), np.log([2.0, 8.0, 2.0, 8.0]))["tokens"]
    assert (spread["n_scored"], spread["kl"], spread["same_top"]) == (4, 1.5, 0.75)
    # Of four values: the variance is 5/4, and three are free.
    assert spread["kl_error"] == pytest.approx((1.25 / 3) ** 0.5)
    assert spread["same_top_error"] == pytest.approx((0.75 * 0.25 / 3) ** 0.5)
    assert spread["perplexity"] == pytest.approx(4.0)
    assert len(spread["quantiles"]) == 101
    assert [spread["quantiles"][i] for i in (0, 50, 100)] == [0.0, 1.5, 3.0]
    assert spread["kl_99.9"] == pytest.approx(2.997)
    one = module.spread(np.array([2.0]), np.array([1.0]), np.array([0.0]))["tokens"]
    assert (one["kl_error"], one["same_top_error"], one["kl"]) == (0.0, 0.0, 2.0)


def test_chunks_leave_out_the_position_without_a_next_token(loaded, tokens):
    few = dataclasses.replace(tokens.take(0, 3), packing="chunks", scored_from=20)
    name = loaded.system.shared_parameters(3)[0].name
    weight = loaded.model.get_parameter(name).detach().numpy()
    other = {"other": {name: weight + 0.1 * np.sign(weight)}}
    full, measured = compare(loaded.system, other, few, seeds=(0, 1), execution=Execution(batch_size=2))
    # Positions 20, 21 and 22 of three prompts: the last of 24 tokens has no next one.
    assert full.by_token.shape == measured.by_token.shape == (3, 2, 9)
    kl, same, nll = measured.by_token
    np.testing.assert_allclose(kl.reshape(2, 3, 3).mean(-1), measured.kl, rtol=1e-9)
    np.testing.assert_allclose(same.reshape(2, 3, 3).mean(-1), measured.agreement)
    np.testing.assert_allclose(nll.reshape(2, 3, 3).mean(-1), measured.nll, rtol=1e-9)
    assert (kl > 0).all()
    assert not full.by_token[0].any()
    assert measured.summary()["tokens"]["n_scored"] == 18
    ids = torch.from_numpy(np.stack(few.sequences))
    log = loaded.system.rollout(Batch(ids, (0, 1, 2), 0), 3).double().log_softmax(-1)[:, 20:23]
    expected = -log.gather(-1, ids[:, 21:, None]).flatten()
    np.testing.assert_allclose(full.by_token[2, 0], expected.detach(), rtol=1e-6)


def made(system, tokens, **more):
    """A checkpoint of a system, calibrated on these prompts."""
    calibration = {
        "sha256": tokens.digest(), "prompt_hashes": hashes_of(tokens.sequences, cut=False)
    }  # fmt: skip
    return SimpleNamespace(settings={"system": system, "calibration": calibration}, **more)


def test_prompts_of_the_calibration_are_warned_of(loaded, tokens):
    said = []
    how = SimpleNamespace(progress=SimpleNamespace(warn=said.append))
    whole = from_ids(tokens.sequences)
    for name in ("huginn", None):
        shared = module.overlap("Q", made(name, whole.take(0, 4)), loaded.system, whole.take(2, 7), how)
        assert (shared.n_shared, shared.n_prompts) == (2, 5)
        assert [text.startswith("Q: 2 of 5 prompts were used") for text in said] == [True]
        said.clear()
    other = module.overlap("Q", made("huginn", whole.take(0, 4)), loaded.system, whole.take(4, 7), how)
    assert (other.n_shared, said) == (0, [])
    unknown = SimpleNamespace(settings={"system": None})
    assert module.overlap("Q", unknown, loaded.system, whole, how) is None
    with pytest.raises(CheckpointError, match="Q: a checkpoint of system 'ouro'; the model is 'huginn'"):
        module.overlap("Q", made("ouro", whole), loaded.system, whole, how)


class Layer:
    """A layer that counts how often it is dequantized."""

    def __init__(self, values):
        self.codes, self.values, self.n = values, values, 0

    def in_model_orientation(self):
        self.n += 1
        return self.values


def test_layers_are_held_where_memory_allows(tiny, monkeypatch):
    def content(n_checkpoints=1):
        layer = Layer(np.ones((10, 10), np.float32))
        checkpoint = SimpleNamespace(layers={"a": layer}, dense={})
        arrays = module.content(tiny.system, checkpoint, n_checkpoints)
        before = layer.n
        assert (np.asarray(arrays["a"]) == 1).all()
        return before, layer.n

    # Four bytes for each of 100 weights, of half of the free memory.
    for free, n_checkpoints, held in (
        (800, 1, True),
        (799, 1, False),
        (1600, 2, True),
        (1599, 2, False),
        (None, 1, True),
    ):
        monkeypatch.setattr(module, "available_bytes", lambda free=free: free)
        before, after = content(n_checkpoints)
        assert (before, after) == ((1, 1) if held else (0, 1))


def test_other_tensors_are_compared_with_the_models(tiny):
    parameters = {
        name: RawTensor.of(value.detach().numpy().copy()) for name, value in tiny.model.named_parameters()
    }  # fmt: skip
    name = "transformer.ln_f.weight"

    def changed(**dense):
        return module._changed(tiny.model, SimpleNamespace(dense=parameters | dense))

    assert changed() == {}
    assert changed(**{"half.bias": RawTensor.of(np.zeros(3, np.int32))}) == {}
    folded = parameters[name].array() * 2
    differing = changed(**{name: RawTensor.of(folded)})
    assert set(differing) == {name}
    np.testing.assert_array_equal(differing[name], folded)
    assert differing[name].dtype == np.float32
    content = module.content(
        tiny.system, SimpleNamespace(layers={}, dense=parameters | {name: RawTensor.of(folded)})
    )
    assert isinstance(content, ChainMap)
    np.testing.assert_array_equal(content[name], folded)
    # A vector that the model has no place for is left out; a matrix cannot be.
    assert changed(**{"more.bias": RawTensor.of(np.ones(3, np.float32))}) == {}
    with pytest.raises(CheckpointError, match=r"tensor 'more\.weight': the model has none of this name"):
        changed(**{"more.weight": RawTensor.of(np.ones((3, 3), np.float32))})


def test_memory_of_a_comparison_is_that_of_one_variant(tiny, monkeypatch):
    big, small = "transformer.adapter.weight", "transformer.ln_f.weight"
    sizes = {name: tiny.model.get_parameter(name).numel() for name in (big, small)}
    logits = torch.zeros(2, 3, 7, dtype=torch.float16)
    variants = {"a": dict.fromkeys((big, small)), "b": dict.fromkeys((small,))}
    # Weights in float32, the logits as they are, and five copies of a piece in float64.
    expected = 4 * sum(sizes.values()) + 2 * 42 + 5 * 8 * 42
    assert module._more_bytes(tiny.system, logits, variants) == expected
    assert module._more_bytes(tiny.system, logits, {}) == 2 * 42 + 5 * 8 * 42
    monkeypatch.setattr(module, "_PIECE", 10)
    assert module._more_bytes(tiny.system, logits, {}) == 2 * 42 + 5 * 8 * 10


def test_a_checkpoint_of_another_loop_or_without_a_tensor_is_refused(tmp_path):
    folder, ids = save_dense(tmp_path / "m"), np.arange(32).reshape(2, 16)
    made = loopq.quantize(f"looped:{folder}[1:3]x2", ids, method="rtn", group_size=16)
    with pytest.raises(CheckpointError, match=r"another loop: .*\[1, 3, 2\].*\[0, 2, 2\]"):
        loopq.evaluate(f"looped:{folder}[0:2]x2", {"q": made}, ids)
    other = load_model(f"looped:{folder}[0:2]x2")
    with pytest.raises(CheckpointError, match="another loop"):
        load_checkpoint(made, other)
    # How often it runs is the depth.
    assert loopq.evaluate(f"looped:{folder}[1:3]x3", {"q": made}, ids)[1].kl.mean() > 0
    norm = next(name for name in made.dense if "norm" in name)
    less = dataclasses.replace(made, dense={k: v for k, v in made.dense.items() if k != norm})
    with pytest.raises(CheckpointError, match=f"missing .*{norm}"):
        loopq.evaluate(f"looped:{folder}[1:3]x2", {"q": less}, ids)
