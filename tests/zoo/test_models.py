"""Every zoo model, tiny and untrained: determinism, steps, invocation counts, save and load."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from loopq import zoo  # noqa: E402
from loopq.errors import CheckpointError, ConfigError  # noqa: E402
from loopq.zoo._model import ZooModel  # noqa: E402
from loopq.zoo.measure import bits_by_depth, bits_per_byte  # noqa: E402

from .tiny import TINY, Tiny, tiny  # noqa: E402

IDS = torch.arange(3 * 12).reshape(3, 12) * 7 % 251


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=sorted(TINY))
def model(request: pytest.FixtureRequest) -> ZooModel:
    return tiny(request.param)


def spec(model: ZooModel) -> Tiny:
    """Return what the tiny model must show."""
    return TINY[model.config.model_type.removeprefix("loopq-zoo-")]


def linear_calls(model: ZooModel, depth: int) -> Counter[str]:
    """Return how often each linear module is called in one rollout of the given depth."""
    calls: Counter[str] = Counter()
    hooks = []
    for name, module in model.named_modules():
        if hasattr(module, "weight") and module.weight is not None and module.weight.ndim == 2:
            calls[name] = 0
            hooks.append(module.register_forward_hook(lambda *_, key=name: calls.update([key])))
    with torch.no_grad():
        model(IDS, num_steps=depth, seed=0)
    for hook in hooks:
        hook.remove()
    return calls


@torch.no_grad()
def test_same_seed_gives_the_same_bits(model: ZooModel) -> None:
    first = model(IDS, seed=3)
    assert first.shape == (3, 12, 256)
    assert first.dtype == torch.float32
    assert torch.equal(first, model(IDS, seed=3))
    assert torch.isfinite(first).all()


@torch.no_grad()
def test_logits_look_only_back(model: ZooModel) -> None:
    full = model(IDS, seed=3)
    init = model.states(IDS, seed=3)[0][:, :7]
    part = model(IDS[:, :7], init_state=init)
    torch.testing.assert_close(part, full[:, :7], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_chained_single_steps_are_the_rollout(model: ZooModel) -> None:
    depth = max(spec(model).depths)
    embeds = model.embed_inputs(IDS)
    state = model.initialize_state(embeds, seed=5)
    for step in range(model.n_updates(depth)):
        state = model.iterate_one_step(embeds, state, step, depth)
    assert torch.equal(model.predict_from_latents(state), model(IDS, num_steps=depth, seed=5))


@torch.no_grad()
def test_depth_changes_the_answer(model: ZooModel) -> None:
    if spec(model).depths == (1,):
        with pytest.raises(ConfigError, match="num_steps must be 1, got 3"):
            model(IDS, num_steps=3)
        return
    one, three = model(IDS, num_steps=1, seed=1), model(IDS, num_steps=3, seed=1)
    assert (one - three).abs().max() > 1e-3


def test_bits_by_depth_are_the_bits_of_each_rollout(model: ZooModel) -> None:
    depths = spec(model).depths
    found = bits_by_depth(model, IDS.numpy(), depths, seed=4, batch=2)
    assert list(found) == list(depths)
    for n, bits in found.items():
        assert abs(bits - bits_per_byte(model, IDS.numpy(), n, seed=4)) < 1e-5


def test_rows_do_not_depend_on_the_batch_they_are_in(model: ZooModel) -> None:
    with torch.no_grad():
        whole = model.rollout(IDS, seed=2)
        last = model.rollout(IDS[1:], seed=2, first_row=1)
    torch.testing.assert_close(last, whole[1:], atol=2e-5, rtol=1e-4)


def test_each_shared_linear_is_called_once_a_step(model: ZooModel) -> None:
    for depth in spec(model).depths:
        assert dict(linear_calls(model, depth)) == spec(model).calls(model, depth)


def test_gradient_reaches_every_used_parameter(model: ZooModel) -> None:
    model.training_loss(IDS, max(spec(model).depths)).backward()
    unused = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert unused == spec(model).unused


def test_save_then_load_is_exact(model: ZooModel, tmp_path: Path) -> None:
    model.save(tmp_path / "m")
    again = zoo.load(tmp_path / "m")
    assert type(again) is type(model)
    assert not again.training
    assert again.config == model.config
    for (name, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b), name
    with torch.no_grad():
        assert torch.equal(model(IDS, seed=1), again(IDS, seed=1))


def test_stored_in_half_precision_is_the_rounded_model(model: ZooModel, tmp_path: Path) -> None:
    model.save(tmp_path, torch.float16)
    again = type(model).load(tmp_path)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a.half().float(), b)


def test_damaged_folders_are_refused(model: ZooModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="not a readable zoo model"):
        zoo.load(tmp_path)
    weights.write_bytes(content)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"n_embd": 32', '"n_embd": 64'))
    with pytest.raises(CheckpointError, match="do not fit the config"):
        zoo.load(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_half_precision_is_the_same_model(model: ZooModel, dtype: torch.dtype, tolerance: float) -> None:
    exact = model(IDS, seed=1)
    half = model.to(dtype)
    embeds = half.embed_inputs(IDS)
    state = half.initialize_state(embeds, seed=1)
    if half.n_updates(half.config.n_steps):
        state = half.iterate_one_step(embeds, state, 0, half.config.n_steps)
    assert state.dtype == dtype
    logits = half(IDS, seed=1)
    assert logits.dtype == torch.float32
    assert (logits - exact).norm() / exact.norm() < tolerance


# Besides the kinds' own demands: an odd rotated width, heads that do not divide, a depth that is not there.
WRONG = [
    ("huginn", {"n_embd": 34}, r"n_embd must be a multiple of 4 \(2 \* n_heads\), got 34"),
    ("huginn", {"n_core": 0}, "n_core must be an integer of at least 1, got 0"),
    ("huginn", {"n_coda": -1}, "n_coda must be an integer of at least 0, got -1"),
    ("huginn", {"n_steps": 2.0}, r"n_steps must be an integer of at least 1, got 2\.0"),
    ("rllama", {"n_kv_heads": 3}, r"n_heads must be a multiple of 3 \(1 \* n_kv_heads\), got 4"),
    ("ouro", {"n_layers": 0}, "n_layers must be an integer of at least 1, got 0"),
    ("nanbeige", {"head_dim": 5}, "head_dim must be a multiple of 2, got 5"),
    ("loopformer", {"n_heads": 3}, r"n_embd must be a multiple of 3 \(1 \* n_heads\), got 32"),
    ("parcae", {"n_embd": 16}, "n_embd must be an integer of at least 32, got 16"),
    ("ponder", {"rotary_pct": 0.0}, "rotary_dim must be an integer of at least 2, got 0"),
    ("mamba", {"n_steps": 2}, "there is no loop over depth, so n_steps must be 1, got 2"),
    ("control", {"n_steps": 2}, "there is no loop over depth, so n_steps must be 1, got 2"),
    ("mamba", {"dt_rank": True}, "dt_rank must be an integer of at least 1, got True"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_bad_settings_are_refused(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"loopq-zoo-{name}: {message}"):
        zoo.model_class(f"loopq-zoo-{name}").from_config({**TINY[name].config, **change})


def test_bad_inputs_are_refused(model: ZooModel) -> None:
    with pytest.raises(ConfigError, match="num_steps must be at least 1"):
        model(IDS, num_steps=0)
    with pytest.raises(ConfigError, match="input_ids must be an integer array"):
        model(IDS.float())
    with pytest.raises(ConfigError, match="unknown settings"):
        type(model).from_config({"n_embd": 32, "widht": 3})
    with pytest.raises(ConfigError, match="model_type"):
        type(model).from_config({"model_type": "other"})
