"""Inputs that change between a kill and the rerun: the bytes of a run from the start, or a refusal."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from ..support.looped import save_dense
from ..support.python_models import MODULE
from ..support.runs import digest
from . import runs
from .counts import Counts, before

#: {room} holds all inputs.
COMMANDS = {
    name: "--register {room}/own.py " + line.replace("*core_block.1*", "*mlp*")
    for name, line in {
        "quantize": f"quantize looped:{{room}}/model[1:3]x2 --out {{out}} {{data}} {runs.PAPER}",
        "best": f"quantize looped:{{room}}/model[1:3]x2 --out {{out}} {{data}} {runs.TINY} --preset best",
        "collect rows": f"collect looped:{{room}}/model[1:3]x2 --out {{out}} {{data}} {runs.COLLECT}",
        "collect sums": f"collect looped:{{room}}/model[1:3]x2 --out {{out}} {{data}} {runs.COLLECT} --hessian",
    }.items()
} | {
    name: line.replace("--exclude *core_block.1*", "--python {room}/made.py:made --depth n_steps")
    for name, line in {
        "module": f"quantize --out {{out}} {{data}} {runs.PAPER}",
        "rows of a module": f"collect --out {{out}} {{data}} {runs.COLLECT}",
        "sums of a module": f"collect --out {{out}} {{data}} {runs.COLLECT} --hessian",
    }.items()
}
#: A model with an attribute, a buffer that is not saved, and a hook. Its file reads them from another one.
MADE = (
    "import json\nfrom pathlib import Path\n"
    + MODULE.replace("torch.tanh(", "self.alpha * self.scale * torch.tanh(")
    + """

def made():
    how = json.loads(Path(__file__).with_name("how.json").read_text())
    model = make()
    model.alpha = how["attribute"]
    model.register_buffer("scale", torch.tensor(how["buffer"]), persistent=False)
    model.core.register_forward_hook(lambda module, given, result: result * how["hook"])
    return model
"""
)
HOW = ("attribute", "buffer", "hook")
DATA = "--calibration {room}/text.jsonl"


def _config(room: Path, rng: random.Random) -> str:
    key, value = rng.choice(
        [
            ("hidden_act", "gelu"),
            ("rms_norm_eps", 0.1),
            ("num_attention_heads", 2),
            ("max_position_embeddings", 99),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 2.0}),
            ("attention_bias", False),
            ("initializer_range", 0.5),
            ("of_another_tool", 1),
            ("eos_token_id", 7),
        ]
    )
    return _json(room / "model" / "config.json", key, value)


def _json(path: Path, key: str, value: object) -> str:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    return f"{path.name}: {key}"


def _weight(room: Path, rng: random.Random) -> str:
    path = room / "model" / "model.safetensors"
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensors[name].view(-1)[0] += 0.25
    save_file(tensors, path, metadata={"format": "pt"})
    return name


def _new(name: str, text: str) -> Callable[[Path, random.Random], str]:
    def change(room: Path, rng: random.Random) -> str:
        (room / name).write_text(text)
        return name

    return change


def _how(room: Path, rng: random.Random) -> str:
    return _json(room / "how.json", rng.choice(HOW), 0.5)


Change = Callable[[Path, random.Random], str]
_TEXT = _new(
    "text.jsonl", "\n".join(json.dumps({"input_ids": [n + 5 * k for k in range(16)]}) for n in (6, 80, 9))
)
CHANGES_OF_A_MODULE: tuple[Change, ...] = (
    _how,
    _how,
    _how,
    _new("made.py", MADE.replace("tanh", "sin")),
    _TEXT,
    lambda room, rng: "nothing",
)
CHANGES: tuple[Change, ...] = (
    _config,
    _config,
    _weight,
    lambda room, rng: _json(room / "model" / "generation_config.json", "top_k", 3),
    _new("model/special_tokens_map.json", "{}"),
    _new("model/notes.txt", "new"),
    _new("own.py", "import helper\nX = 2\n"),
    _new("helper.py", "Y = 2\n"),
    _TEXT,
    lambda room, rng: "nothing",
)


def changes(base: Path, n_cases: int, rng: random.Random, until: float) -> Counts:
    """Kill a command at a random change of files, change one input, and run it again; compare with a new run."""
    counts = Counts()
    bench = runs.Bench.__new__(runs.Bench)
    bench.base, bench.inputs, bench.commands = base, {}, COMMANDS
    pristine = base / "pristine"
    _make(pristine)
    n_events: dict[str, int] = {}
    for number in before(until, range(n_cases)):
        name = list(COMMANDS)[number % len(COMMANDS)]
        with runs.place(base) as trial:
            room = trial / "room"
            shutil.copytree(pristine, room)
            bench.inputs = {"room": room, "data": DATA.format(room=room)}
            if name not in n_events:
                seen = base / "events"
                _counted(bench, name, trial / "count" / "out", seen)
                n_events[name] = int(seen.read_text())
            killed = rng.randint(1, n_events[name])
            runs.finish(bench.start(name, trial / "a" / "out", functools.partial(runs.at_event, killed)))
            what = rng.choice(CHANGES_OF_A_MODULE if "module" in name else CHANGES)(room, rng)
            code, said = runs.finish(bench.start(name, trial / "a" / "out")), bench.said()
            fresh, text = runs.finish(bench.start(name, trial / "b" / "out")), bench.said()
            wrong = ""
            if "Traceback" in said + text or code not in (0, 1, 2):
                wrong = f"exit code {code}: {said[-300:]}"
            elif code == 0 and (fresh != 0 or digest(trial / "a" / "out") != digest(trial / "b" / "out")):
                wrong = f"another result than a new run ({said[-300:]})"
            elif code == 1 and fresh == 0 and not _there(said):
                wrong = f"refused: {said[-300:]}"
        outcome = "the bytes of a new run"
        if code:
            outcome = (
                "refused, since another run's work lies there" if fresh == 0 else "refused, as a new run is"
            )
        counts.add(outcome, wrong and f"{name}, change {killed} of {n_events[name]}, {what}: {wrong}")
    return counts


def _there(said: str) -> bool:
    """Whether a run was refused because a killed one had left other work, or had ended."""
    return (
        bool(runs.THERE.search(said))
        or "something else than this command writes" in said
        or "another" in said
    )


def _counted(bench: runs.Bench, name: str, out: Path, seen: Path) -> None:
    def count() -> None:
        events = runs.at_event(0)
        runs.AT_END.append(lambda: seen.write_text(str(len(events))))

    code = runs.finish(bench.start(name, out, count))
    assert code == 0, bench.said()


def _make(room: Path) -> None:
    save_dense(room / "model")
    (room / "own.py").write_text("import helper\nX = 1\n")
    (room / "helper.py").write_text("Y = 1\n")
    (room / "made.py").write_text(MADE)
    (room / "how.json").write_text(json.dumps(dict.fromkeys(HOW, 1.0)))
    lines = [json.dumps({"input_ids": [n + 3 * k for k in range(16)]}) for n in (5, 70, 9)]
    (room / "text.jsonl").write_text("\n".join(lines))
