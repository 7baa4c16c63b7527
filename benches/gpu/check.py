"""Does everything run on the device, and say what the processor says?

Commands of a user on small trained models, and tiny random models of every adapter: each once on the
processor and once on the device. A failure puts the end of its traceback into the record and stops nothing.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.kernels.sections import Keep

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("huginn_small", str(ROOT / "benches" / "zoo" / "weights" / "ouro_small"))
PROMPTS = ("--n-prompts", "4", "--seq-len", "48")
#: Least share of equal codes; most relative difference of one checkpoint's KL, of sums and of rows.
SAME_CODES, SAME_KL, SAME_SUMS = 0.99, 0.02, 1e-3
#: The loop metric's descent takes other turns where a sum's last bit differs: then the KL may be so much larger.
NEAR_KL = 0.3
#: Lines of a traceback that the record keeps.
LINES = 12

Row = dict[str, Any]
Result = Any


@dataclass
class Place:
    """A device, and what the commands left there."""

    device: str
    folder: Path
    results: dict[str, Result] = field(default_factory=dict)

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)


def call(*command: str) -> str:
    """Run a command of `loopq` in this process; give what it printed. Its errors come as they are, with their cause."""
    from loopq.cli import parse

    args = parse(list(command))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = args.run(args)
    if code:
        raise RuntimeError(f"loopq {' '.join(command)}: exit code {code}: {out.getvalue()[-400:]}")
    return out.getvalue()


@dataclass(frozen=True)
class Rounded:
    """Codes by layer, and the KL that they lead to."""

    codes: dict[str, NDArray[Any]]
    kl: float


def rounded(model: str, at: Place, name: str, *options: str) -> Rounded:
    """Read a checkpoint, and evaluate it on the device that made it."""
    from loopq.formats.convert import read_any

    codes = {n: np.asarray(layer.codes) for n, layer in read_any(Path(at / name)).layers.items()}
    return Rounded(codes, measured(model, at, at / name, *options)[0])


def measured(model: str, at: Place, *command: str) -> list[float]:
    """KL of some checkpoints."""
    printed = json.loads(call("evaluate", model, *command, "--json", *PROMPTS, "--device", at.device))
    rows = printed if isinstance(printed, list) else printed["weights"]
    return [float(row["kl"]) for row in rows[1:]]


# ---- what a user types -------------------------------------------------------------------------------------------


def quantized(*options: str) -> Callable[[str, Place, Place], Result]:
    """A quantization with some options."""

    def work(model: str, at: Place, _: Place) -> Result:
        name = "quantize-" + "-".join(o.strip("-") for o in options)
        call("quantize", model, "--out", at / name, *options, *PROMPTS, "--device", at.device)
        kept = options[options.index("--dtype") :] if "--dtype" in options else ()
        return rounded(model, at, name, *kept)

    return work


def evaluated(model: str, at: Place, first: Place) -> Result:
    """KL of the processor's checkpoint."""
    return {"kl": measured(model, at, first / "quantize-")[0]}


def evaluated_page(model: str, at: Place, first: Place) -> Result:
    """A page with every layer's error."""
    page = at / "page.html"
    call("evaluate", model, first / "quantize-", "--html", page, *PROMPTS, "--device", at.device)
    return {}


def collected_rows(model: str, at: Place, _: Place) -> Result:
    """The first rows that each layer reads."""
    from loopq.storage.files import map_tensors

    call("collect", model, "--out", at / "rows", *PROMPTS, "--device", at.device)
    shard = sorted(Path(at / "rows").glob("shards/*.safetensors"))[0]
    return {name: np.asarray(t.array(), np.float64) for name, t in map_tensors(shard).items()}


def collected_sums(model: str, at: Place, _: Place) -> Result:
    """Hessians of a dump with loop metrics."""
    from loopq.calibrate.dump import Dump

    call(
        "collect",
        model,
        "--out",
        at / "sums",
        "--hessian",
        "--metric",
        "loop",
        *PROMPTS,
        "--device",
        at.device,
    )
    dump = Dump(Path(at / "sums"))
    groups = dict.fromkeys(dump.manifest.input_groups.values())
    steps = range(dump.manifest.n_steps)
    return {g: np.asarray(dump.accumulator(g, list(steps)).matrix()) for g in groups}


def solved(model: str, at: Place, _: Place) -> Result:
    """Codes from the device's own dump."""
    call("solve", at / "sums", "--out", at / "solved")
    return rounded(model, at, "solved")


def diagnosed(model: str, at: Place, _: Place) -> Result:
    """The sections of a diagnosis that train nothing."""
    call(
        "diagnose",
        model,
        "--json",
        at / "diagnosis.json",
        "--only",
        "ranks,overlap,ablation,injection,feedback,groups",
        "--n-prompts",
        "2",
        "--seq-len",
        "32",
        "--device",
        at.device,
    )
    return {}


def checked(model: str, at: Place, _: Place) -> Result:
    """The checks of an adapter."""
    call("check", model, "--device", at.device)
    return {}


def generated(model: str, at: Place, first: Place) -> Result:
    """Text of the model and of its checkpoint, by codes."""
    for source in (model, first / "quantize-"):
        call("run", source, "The sea was", "--n-tokens", "8", "--device", at.device)
    return {}


COMMANDS: dict[str, Callable[[str, Place, Place], Result]] = {
    "quantize": quantized(),
    "quantize, paper": quantized("--preset", "paper"),
    "quantize, fast": quantized("--preset", "fast"),
    "evaluate": evaluated,
    "collect, rows": collected_rows,
    "collect, loop metric": collected_sums,
    "solve": solved,
    "check": checked,
    "evaluate, page": evaluated_page,
    "run": generated,
    "diagnose": diagnosed,
    "quantize, best": quantized("--preset", "best"),
    "quantize, fit": quantized("--preset", "fast", "--fit", "3.5"),
    "quantize, own text": quantized("--preset", "fast", "--calibration", "self"),
    "quantize, bfloat16": quantized("--preset", "fast", "--dtype", "bfloat16"),
}
#: Commands with results that do not depend on gradients, the model's own text, or rounded activations.
EXACT = ("quantize, paper", "quantize, fast")


def judge(name: str, ours: Result, theirs: Result) -> tuple[bool, str]:
    """Whether the device's result is the processor's, and how near it is."""
    if not theirs:
        return True, "done"
    if isinstance(theirs, Rounded):
        return near(name, ours, theirs)
    if "kl" in theirs:
        off = abs(ours["kl"] / max(theirs["kl"], 1e-12) - 1.0)
        return off <= SAME_KL, f"KL {ours['kl']:.5g}, on the processor {theirs['kl']:.5g}"
    if set(ours) != set(theirs):
        return False, f"other layers: {sorted(set(ours) ^ set(theirs))[:4]}"
    off = max(
        float(np.linalg.norm(ours[k] - v)) / max(float(np.linalg.norm(v)), 1e-30) for k, v in theirs.items()
    )
    return off <= SAME_SUMS, f"at most {off:.1e} apart"


def near(name: str, ours: Rounded, theirs: Rounded) -> tuple[bool, str]:
    """Whether codes are the same, or, where a last bit may turn them, no worse."""
    if ours.codes.keys() != theirs.codes.keys():
        return False, f"other layers: {sorted(ours.codes.keys() ^ theirs.codes.keys())[:4]}"
    size = sum(codes.size for codes in theirs.codes.values())
    same = sum(int((ours.codes[n] == codes).sum()) for n, codes in theirs.codes.items()) / size
    ok = same >= SAME_CODES or (name not in EXACT and ours.kl <= theirs.kl * (1.0 + NEAR_KL))
    return ok, f"{same:.3%} of the codes, KL {ours.kl:.4g}, on the processor {theirs.kl:.4g}"


def end_of(error: BaseException) -> list[str]:
    """The last frames of an error's first cause, and the beginning of its message."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = "".join(traceback.format_tb(error.__traceback__)).splitlines()[-LINES:]
    said = str(error).strip().splitlines() or [""]
    frames = [line.replace(f"{ROOT}{os.sep}", "") for line in frames]
    return [line[:200] for line in (*frames, f"{type(error).__name__}: {said[0]}", *said[1:3])]


def compared(name: str, work: Callable[[Place, Place], Result], near: Place, far: Place) -> Row:
    """Do some work on the processor, then on the device."""
    seconds = []
    row: Row = {"name": name, "ok": False}
    for place in (near, far):
        began = time.monotonic()
        try:
            place.results[name] = work(place, near)
        except (Exception, SystemExit) as error:  # noqa: BLE001  what fails is what is asked
            return row | {"detail": f"fails on {place.device}", "traceback": end_of(error)}
        seconds.append(round(time.monotonic() - began, 2))
    ok, detail = judge(name.partition(": ")[2], far.results[name], near.results[name])
    return row | {"ok": ok, "detail": detail, "seconds": seconds}


# ---- every adapter -----------------------------------------------------------------------------------------------


def adapted(case: Any) -> Callable[[Place, Place], Result]:
    """Quantize a tiny model of an adapter by its gradients, where it has any; its codes and the KL."""

    def work(at: Place, _: Place) -> Result:
        import loopq
        from loopq.errors import LoopqError
        from tests.support.systems import open_system, prompts

        system = open_system(case)
        system.model.to(at.device)
        ids = prompts(case, 4).input_ids.tolist()
        options: Mapping[str, Any] = {"bits": 4, "group_size": 16, "rank_threshold": None}
        try:
            result = loopq.quantize(system, ids, **options)
        except LoopqError as error:
            if "metric 'inputs'" not in str(error):
                raise
            result = loopq.quantize(system, ids, metric="inputs", **options)
        kl = float(loopq.evaluate(system, {"": result}, ids)[1].kl.mean())
        return Rounded({name: np.asarray(layer.codes) for name, layer in result.layers.items()}, kl)

    return work


Work = Callable[[Place, Place], Result]


def on(model: str, names: Sequence[str]) -> dict[str, Work]:
    """Commands on a model."""
    return {
        f"{Path(model).name}: {name}": functools.partial(
            lambda command, at, near: command(model, at, near), COMMANDS[name]
        )
        for name in names
    }


def adapters(share: int, of: int) -> dict[str, Work]:
    """A tiny model of each adapter, or of some."""
    from tests.support.systems import CASES

    return {f"adapter: {name}": adapted(case) for name, case in list(CASES.items())[share::of]}


#: Steps of a process in order: a step that reads a result follows the step that makes it.
GROUPS: dict[str, Callable[[], dict[str, Work]]] = {
    "first": lambda: on(
        MODELS[0], ("quantize, fast", "collect, loop metric", "solve", "check", "collect, rows", "diagnose")
    ),
    "second": lambda: on(
        MODELS[0],
        ("quantize", "evaluate", "evaluate, page", "run", "quantize, paper", "quantize, bfloat16"),
    ),
    "third": lambda: on(MODELS[0], ("quantize, best", "quantize, fit", "quantize, own text")),
    "ouro": lambda: on(
        MODELS[1], ("quantize", "evaluate", "collect, loop metric", "solve", "run", "quantize, best")
    ),
    "adapters 0": lambda: adapters(0, 3),
    "adapters 1": lambda: adapters(1, 3),
    "adapters 2": lambda: adapters(2, 3),
}


def work_through(group: str, seconds: float, dry: bool, rows: Any) -> None:
    """Do a group's work in a separate process while time is left; put a row for each item in a queue, None
    last."""
    import pytest
    import torch

    import benches.zoo.register  # noqa: F401  registers the classes

    torch.set_num_threads(max(1, min(4, len(os.sched_getaffinity(0)) // len(GROUPS))))
    second = "cuda"
    scope: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if dry:
        from tests.support.accelerator import DEVICE, accelerator

        second, scope = DEVICE, accelerator()
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as name, scope:
            near, far = (Place(device, Path(name) / device) for device in ("cpu", second))
            for place in (near, far):
                place.folder.mkdir()
            for title, work in list(GROUPS[group]().items())[: 3 if dry else None]:
                if time.monotonic() - began > seconds:
                    rows.put({"name": title, "left_out": "no time was left"})
                    continue
                try:
                    rows.put(compared(title, work, near, far))
                except pytest.skip.Exception as reason:
                    rows.put({"name": title, "left_out": str(reason)})
    except Exception as error:  # noqa: BLE001  as above
        rows.put({"name": group, "ok": False, "detail": "stops", "traceback": end_of(error)})
    rows.put(None)


def section(seconds: float, dry: bool, keep: Keep) -> None:
    """Compare all, in several processes, while time is left; a dry run takes two of them."""
    # Threads that spin while they wait take the cores from those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = multiprocessing.get_context("spawn")
    rows: Any = context.Queue()
    groups = ["first", "adapters 0"] if dry else list(GROUPS)
    began = time.monotonic()
    workers = [
        context.Process(target=work_through, args=(g, seconds, dry, rows), daemon=True) for g in groups
    ]
    for worker in workers:
        worker.start()
    results: list[Row] = []
    at_work = len(workers)
    # A process that hangs or died silently is not waited for.
    while at_work and time.monotonic() - began < seconds + 5 and any(w.is_alive() for w in workers):
        try:
            row = rows.get(timeout=1.0)
        except queue.Empty:
            continue
        if row is None:
            at_work -= 1
            continue
        results.append(row)
        print(
            row["name"],
            row.get("left_out") or ("ok" if row["ok"] else "FAILS"),
            row.get("detail", ""),
            flush=True,
        )
        for line in row.get("traceback", ()):
            print("   ", line, flush=True)
        keep({"rows": results, "unfinished": at_work})
    for worker in workers:
        worker.kill()
    keep({"rows": results, "unfinished": at_work})


def rows(data: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Lines of the record's table: what fails, what was left out, and the rest."""
    done = [r for r in data["rows"] if "left_out" not in r]
    n_good = sum(r["ok"] for r in done)
    lines = [
        (
            "the device says what the processor says",
            f"{n_good} of {len(done)}",
            "met" if n_good == len(done) else "NOT MET",
        )
    ]
    if data["unfinished"]:
        lines.append(("processes that did not end in time", str(data["unfinished"]), "open"))
    for r in sorted(data["rows"], key=lambda r: r.get("ok", True)):
        if "left_out" in r:
            lines.append((r["name"], r["left_out"], "open"))
            continue
        near, far = r.get("seconds", (None, None))
        took = "" if far is None else f"; {far} s, on the processor {near} s"
        lines.append((r["name"], r["detail"] + took, "met" if r["ok"] else "NOT MET"))
    return lines
