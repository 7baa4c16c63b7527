"""A recorded decoding step: its logits, its cache, and what cannot be recorded.

Without a GPU, `torch.fx` records in its place. A replay repeats the operations on the same memory, as a CUDA graph
does.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from loopq.errors import ConfigError
from loopq.runtime import graph
from loopq.runtime.generate import Decoder, Generation
from loopq.runtime.linear import LAYOUTS
from loopq.systems import fixed
from loopq.systems.capabilities import marked
from tests.support.accelerator import DEVICE, accelerator
from tests.support.linear import coded
from tests.support.marks import slow_unless
from tests.support.systems import CASES, open_system, rolled_out

pytestmark = pytest.mark.filterwarnings("ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*")

_TEXT, _MORE = [5, 9, 7, 30, 11, 12], [8, 21, 4, 17, 2, 33, 19]
_RECORDED = (
    "Huginn", "LoopFormer", "Nanbeige", "Ouro", "Parcae", "R-Llama", "looped Llama", "looped Qwen2, windows",
    "transformers Dory", "transformers GPT-2 COCONUT", "transformers GPT-NeoX Ponder", "transformers HRM-Text",
    "transformers Inkling-2", "transformers Mamba", "transformers Zamba", "generic HRM-Text",
)  # fmt: skip
_QUICK = (
    "Huginn", "LoopFormer", "Ouro", "Parcae", "looped Llama", "looped Qwen2, windows", "transformers GPT-2 COCONUT",
    "transformers Mamba",
)  # fmt: skip


class _Recorder:
    """Records on the processor, and counts."""

    def __init__(self) -> None:
        self.records = self.replays = 0

    def __call__(self, step, undo):
        self.records += 1
        for _ in range(2):
            step()
            undo()
        recorded = make_fx(step)()
        undo()
        logits = recorded().clone()
        undo()

        def replay():
            self.replays += 1
            logits.copy_(recorded())

        return replay, logits


@pytest.fixture
def recorder(monkeypatch):
    recorder = _Recorder()
    monkeypatch.setitem(graph.RECORDERS, "cpu", recorder)
    return recorder


@pytest.mark.parametrize("name", slow_unless(lambda name: name in _QUICK, _RECORDED))
def test_replays_give_the_logits_of_a_rollout(name, recorder, monkeypatch):
    monkeypatch.setattr(fixed, "BLOCK", 4)
    case = CASES[name]
    system = open_system(case)
    # Inkling-2's gates and Mamba's scan stay float32.
    exact = name not in ("transformers Inkling-2", "transformers Mamba")
    system.model.to(torch.float64 if exact else torch.float32)
    n_steps = case.depths[-1]
    decoder = Decoder(system, n_steps, Generation(n_tokens=2))
    assert decoder.backend.name == "graph"
    recorder.records = recorder.replays = 0
    # One by one past the room of two tokens, three at once, and another text.
    texts = [(_TEXT, _MORE[:n]) for n in (0, 1, 2, 3, 4, 7)] + [(_TEXT[1:], _MORE[:n]) for n in (0, 1)]
    for first, more in texts:
        text = [*marked(system, first), *more]
        expected = rolled_out(system, text, n_steps)[-1]
        room = 1e-6 if exact else 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(decoder(text), expected, rtol=1e-6 if exact else 1e-5, atol=room)
    # A text that outgrows loopq's own cache needs another recording, and another text does not.
    assert recorder.records == 1 if isinstance(system, fixed.FixedCached) else recorder.records > 1
    assert recorder.replays > recorder.records


def test_a_step_that_depends_on_its_tokens_is_not_recorded(recorder):
    # The recording repeats the choice of experts.
    system = open_system(CASES["looped OLMoE, experts"])
    decoder = Decoder(system, 2, Generation())
    assert decoder.backend.name == "cache"
    assert decoder.declined["graph"] == "a recorded step gives other logits"
    before = recorder.replays
    for n in range(3):
        text = [*_TEXT, *_MORE[:n]]
        torch.testing.assert_close(decoder(text), rolled_out(system, text, 2)[-1], rtol=1e-4, atol=1e-5)
    assert recorder.replays == before > 0


def test_a_failed_recording_leaves_the_models_cache(monkeypatch):
    def fails(step, undo):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(graph.RECORDERS, "cpu", fails)
    system = open_system(CASES["looped Llama"])
    decoder = Decoder(system, 2, Generation())
    assert "operation not permitted when stream is capturing" in decoder.declined["graph"]
    assert decoder.backend.name == "cache"
    for n in range(3):
        text = [*_TEXT, *_MORE[:n]]
        torch.testing.assert_close(decoder(text), rolled_out(system, text, 2)[-1], rtol=1e-4, atol=1e-5)


def test_a_cache_that_changes_its_size_is_not_recorded(recorder):
    declined = Decoder(open_system(CASES["IQuest"]), 2, Generation()).declined["graph"]
    assert declined == "no graph: dict changes its size"
    assert recorder.records == 0


def test_positions_end_the_room_of_a_recording(recorder):
    system = open_system(CASES["Huginn"])
    decoder = Decoder(system, 1, Generation(n_tokens=100))
    text = list(range(4, 36))
    for n in (31, 32):
        torch.testing.assert_close(decoder(text[:n]), rolled_out(system, text[:n], 1)[-1])
    with pytest.raises(ConfigError, match="huginn: 33 tokens, but the model has 32 positions"):
        decoder([*text, 5])


def test_steps_are_launched_one_by_one_without_a_recorder():
    decoder = Decoder(open_system(CASES["looped Llama"]), 2, Generation())
    assert decoder.declined["graph"] == "loopq records steps on a GPU, not on cpu"


#: Operations that wait for the device, because their result or its size is a number of the processor.
_WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::equal",
)


class _AsCaptured(TorchDispatchMode):
    """Refuses a copy from the processor and what waits for the device, as a capture does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _WAITS:
            raise RuntimeError(f"{name} waits for the device")
        if name in ("aten::_to_copy", "aten::copy_"):
            devices = {x.device.type for x in args if isinstance(x, torch.Tensor)}
            devices.add(torch.device(kwargs.get("device") or next(iter(devices))).type)
            if devices != {DEVICE}:
                raise RuntimeError(f"{name} from the processor")
        return func(*args, **kwargs)


def _captured(step, undo):
    step()
    undo()
    with _AsCaptured():
        logits = step().clone()
    undo()

    def replay():
        with _AsCaptured():
            logits.copy_(step())

    return replay, logits


def _copies(out):
    return out * _ONE.to(out.device)


def _waits(out):
    return out * float(out.abs().max() > 0)


_ONE = torch.ones(())


@pytest.mark.parametrize("name", _RECORDED[:6])
def test_a_step_in_loopqs_own_cache_does_not_touch_the_processor(name, monkeypatch):
    monkeypatch.setitem(graph.RECORDERS, DEVICE, _captured)
    system = open_system(CASES[name])
    with accelerator():
        system.model.to(DEVICE)
        assert Decoder(system, 1, Generation()).declined.get("graph") is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, None),
        (_copies, "a recorded step cannot be used (RuntimeError: aten::_to_copy from the processor)"),
        (
            _waits,
            "a recorded step cannot be used (RuntimeError: aten::_local_scalar_dense waits for the device)",
        ),
    ],
)
def test_a_step_does_not_touch_the_processor(change, reason, monkeypatch):
    monkeypatch.setitem(graph.RECORDERS, DEVICE, _captured)
    monkeypatch.setattr(LAYOUTS["codes"], "devices", (DEVICE,))
    system = coded(open_system(CASES["looped Llama"]), 3, levels=(-64, -36, -20, -9, 0, 9, 20, 36))
    with accelerator():
        system.model.to(DEVICE)
        if change is not None:
            system.model.model.norm.register_forward_hook(lambda _, args, out: change(out))
        assert Decoder(system, 2, Generation()).declined.get("graph") == reason
