"""Calls of the core with arguments of any shape, type, order and value give a result or one error, never an
abort.

Calls run in processes of their own, with a bound on memory. A process that ends by a signal or that stands still names
its last call. `python -m tests.soak.arrays SEED N LOG` is such a process.
"""

from __future__ import annotations

import copy
import json
import math
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import loopq._native as native
from loopq.errors import LoopqError

from .counts import Counts

#: Address space beyond what a process has, seconds of a call until Ctrl-C, of a process, and calls of one process.
MEMORY, PATIENCE, SECONDS, CALLS = 2 << 30, 5, 600, 500
NUMBERS = (
    -(2**63), -(2**31), -1, 0, 1, 2, 3, 5, 7, 8, 16, 17, 31, 64, 255, 256, 513, 65_536, 2**31, 2**32, 2**53, 2**63,
    2**64, 10**30,
)  # fmt: skip
FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-300, 1e-40, 0.5, 1.0, 7e4, 1e30, 1e300)
THINGS = (
    None, True, "", "x", "max", "natural", b"x", [], [0], (), (1, 2), {}, [None], [1.5], ["a"], [math.nan], object,
)  # fmt: skip
TYPES = ("f2", "f4", "f8", ">f4", "i1", "u1", "i2", "u2", "i4", "i8", "u8", "c8", "?", "O", "U1", "M8[s]")
FINE = (LoopqError, TypeError, ValueError, OverflowError, MemoryError)
Call = tuple[Callable[..., Any], list[Any], dict[str, Any]]


def _grid(rng: random.Random, **fixed: Any) -> native.Grid:
    kinds: list[dict[str, Any]] = [
        {"bits": rng.choice([2, 3, 4, 8]), "symmetric": rng.random() < 0.5},
        {"bits": 3, "signed": True, "scale_search": "mse"},
        {"bits": 4, "scale_dtype": rng.choice(["float16", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"])},
        {"bits": 2, "levels": [-40, -10, 10, 40]},
    ]
    return native.Grid(**{"group_size": rng.choice([8, 16, 32, -1, 5]), **rng.choice(kinds), **fixed})


def _streams(rng: random.Random) -> native.Grid:
    return native.Grid(
        bits=2, group_size=32, scale_dtype="float16", trellis=(rng.choice([4, 6]), rng.choice([2, 8, 512]))
    )


class Interrupted(BaseException):
    """The exception of Ctrl-C: some calls would take years, and have to stop then."""


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted


class Valid:
    """Arguments that fit together, of small sizes."""

    def __init__(self, rng: random.Random) -> None:
        draws = np.random.default_rng(rng.randrange(2**32))
        self.rng, self.m, self.dim = rng, rng.choice([1, 2, 6, 16, 64]), rng.choice([1, 8, 17, 32, 64])
        self.w = draws.normal(size=(self.m, self.dim)).astype("f4")
        self.x = draws.normal(size=(2 * self.dim, self.dim)).astype("f4")
        self.h = self.x.T.astype("f8") @ self.x
        self.mu = np.full(self.dim, 0.1)
        self.codes = draws.integers(-8, 8, size=(self.m, self.dim)).astype("i1")
        self.threads = rng.choice([1, 2])

    def factor(self, **more: Any) -> native.DampedFactor:
        return native.DampedFactor(self.h, self.mu, threads=1, **more)

    def left(self) -> list[native.DampedFactor]:
        return [native.DampedFactor(np.eye(self.m), np.zeros(self.m), threads=1)]

    def sums(self) -> native.HessianAccumulator:
        hessian = native.HessianAccumulator(self.dim, [0, 1], per_step=True, threads=1)
        hessian.update(0, self.x)
        return hessian

    def summed(self) -> native.HessianAccumulator:
        hessian = self.sums()
        hessian.finish()
        return hessian

    def layout(self) -> tuple[native.CpuLayout, np.ndarray, np.ndarray]:
        """A layout, its packed codes, and scales."""
        group = self.rng.choice([8, 16, -1])
        layout = native.CpuLayout(self.m, self.dim, native.Grid(bits=4, group_size=group))
        packed = np.zeros(layout.n_bytes, "u1")
        n_groups = 1 if group == -1 else -(-self.dim // group)
        scales = np.ones((self.m, n_groups), "f4")
        layout.pack(self.codes, scales, packed, threads=1)
        return layout, packed, scales

    def block(self) -> dict[str, Any]:
        """Arguments of `CpuRunner`: one block of one head of four columns, and a head."""
        z = lambda *s: np.random.default_rng(0).normal(size=s).astype("f4")  # noqa: E731
        weights = [(None, z(*s), None, None) for s in ((8, 4), (12, 4), (4, 4), (16, 4))]
        weights.append((None, z(4, 8), None, [(2, [z(2, 2), z(2)])]))
        block = {
            "heads": 1, "kv_heads": 1, "head": 4, "neighbours": False, "scale": 0.5, "qk_bias": [], "gates": False,
            "qkv": [1], "out": 2, "gate_up": [3], "down": 4, "qk_norms": None, "norms": [[None] * 3] * 2,
        }  # fmt: skip
        return {
            "weights": weights, "norms": [([1.0] * 4, 1e-6)], "blocks": [block], "order": [("block", 0)], "head": 0,
            "precision": "int8", "kept": "float32",
        }  # fmt: skip


def _runs(v: Valid, rng: random.Random) -> Call:
    asked = v.block()
    if rng.random() < 0.3:
        asked = _changed(asked, rng)
    n = rng.choice([1, 2, 5])
    runner = native.CpuRunner(**asked)
    args = [np.ones((n, 4), "f4"), np.tile(np.float32([1, 0]), (8, 2)), np.zeros((min(n, 2), 8), "f4")]
    return lambda *a, **k: [runner.run(*a, **k) for _ in range(2)], args, {"threads": 1}


def _file(v: Valid) -> Path:
    from safetensors.numpy import save_file

    path = Path(tempfile.gettempdir()) / "rows.safetensors"
    save_file({"x": v.x}, path)
    return path


FUNCTIONS: dict[str, Callable[[Valid, random.Random], Call]] = {
    "HessianAccumulator": lambda v, r: (native.HessianAccumulator, [v.dim, [0, 1]], {"per_step": True, "threads": 1}),
    "update": lambda v, r: (v.sums().update, [1, v.x], {}),
    "update_file": lambda v, r: (v.sums().update_file, [1, _file(v), "x"], {}),
    "n_rows": lambda v, r: (v.sums().n_rows, [1], {}),
    "matrix": lambda v, r: (v.summed().matrix, [[0, 1]], {"weights": [1.0, 0.5]}),
    "diagonal": lambda v, r: (v.summed().diagonal, [[0]], {}),
    "trace": lambda v, r: (v.summed().trace, [0], {}),
    "merge": lambda v, r: (v.summed().merge, [v.summed()], {}),
    "from_state": lambda v, r: (native.HessianAccumulator.from_state, [v.summed().state()], {"threads": 1}),
    "DampedFactor": lambda v, r: (
        native.DampedFactor, [v.h, v.mu],
        {"order": r.choice(["natural", "diagonal", "conditional"]), "precision": "float64", "threads": v.threads},
    ),
    "shift": lambda v, r: (v.factor().shift, [v.w, v.h, 0.5], {"threads": v.threads}),
    "Grid": lambda v, r: (
        native.Grid, [],
        {"bits": 4, "group_size": 8, "symmetric": True, "signed": False, "scale_dtype": "float16", "scale_bits": None,
         "scale_exponent": 0, "scale_search": "max", "trellis": None, "levels": None, "units": None},
    ),
    "fit_levels": lambda v, r: (
        native.fit_levels, [v.w, np.ones(v.dim), native.Grid(bits=2, group_size=8, levels=[-40, -10, 10, 40])],
        {"threads": 1},
    ),
    "rtn": lambda v, r: (native.rtn, [v.w, _grid(r)], {"threads": v.threads}),
    "gptq": lambda v, r: (
        native.gptq, [v.w, v.factor(), _grid(r)],
        {"scales": r.choice(["group", "static"]), "block_size": 8, "threads": 1},
    ),
    "GptqCdSettings": lambda v, r: (
        native.GptqCdSettings, [_grid(r)], {"beam": 2, "sweeps": 1, "rounds": 1, "refit": True}
    ),
    "gptq_cd": lambda v, r: (
        native.gptq_cd, [v.w, v.factor(), native.GptqCdSettings(_grid(r), beam=2, sweeps=2, rounds=2, refit=True)],
        {"threads": v.threads},
    ),
    "coupled": lambda v, r: (
        native.coupled,
        [v.w, v.factor(), v.left(), native.GptqCdSettings(_grid(r), beam=2, sweeps=2, rounds=2, refit=True)],
        {"passes": 1, "threads": v.threads},
    ),
    "trellis": lambda v, r: (native.trellis, [v.w, v.factor(), v.left(), _streams(r)], {"threads": v.threads}),
    "dequantize": lambda v, r: (
        native.dequantize, [v.codes, np.ones((v.m, 1), "f4"), None, native.Grid(bits=4, group_size=-1)], {}
    ),
    "dequantize a trellis": lambda v, r: (
        native.dequantize,
        [np.full((v.m, v.dim), -1, "i1"), np.ones((v.m, -(-v.dim // 32)), "f4"), None, _streams(r)], {},
    ),
    "proxy": lambda v, r: (native.proxy, [v.w, r.choice([None, v.w + 1]), v.h], {"threads": 1}),
    "eigvalsh": lambda v, r: (native.eigvalsh, [v.h], {"threads": 1}),
    "count_above": lambda v, r: (native.count_above, [v.h, [1e-3, 0.1]], {"threads": 1}),
    "pack_dense": lambda v, r: (native.pack_dense, [v.codes, 4, 8], {}),
    "unpack_dense": lambda v, r: (native.unpack_dense, [native.pack_dense(v.codes, 4, 8), 4, v.dim, 8], {}),
    "marlin_pack": lambda v, r: (native.marlin_pack, [np.zeros((64, 32), "i1"), np.ones((64, 2), "f4")], {}),
    "marlin_unpack": lambda v, r: (
        native.marlin_unpack, list(native.marlin_pack(np.zeros((64, 32), "i1"), np.ones((64, 2), "f4"))), {}
    ),
    "w4_pack": lambda v, r: (native.w4_pack, [np.zeros((16, 96), "i1"), 1], {}),
    "w4_unpack": lambda v, r: (native.w4_unpack, [native.w4_pack(np.zeros((16, 96), "i1")), 96, 1], {}),
    "cpu_read": lambda v, r: (native.cpu_read, [np.zeros(100, "u1")], {"repeats": 2, "threads": 1}),
    "CpuLayout": lambda v, r: (native.CpuLayout, [v.m, v.dim, _grid(r)], {}),
    "pack": lambda v, r: (lambda a: (a[0].pack, [v.codes, a[2], a[1]], {"zeros": None, "threads": 1}))(v.layout()),
    "unpack": lambda v, r: (lambda a: (a[0].unpack, [a[1]], {"threads": 1}))(v.layout()),
    "rows": lambda v, r: (lambda a: (a[0].rows, [a[1], np.array([0, v.m - 1])], {}))(v.layout()),
    "multiply": lambda v, r: (
        lambda a: (
            a[0].multiply, [a[1], v.x, np.zeros((2 * v.dim, v.m), "f4")],
            {"bias": None, "precision": r.choice(["int8", "fixed16", "fixed24"]), "threads": v.threads},
        )
    )(v.layout()),
    "CpuRunner": lambda v, r: (native.CpuRunner, [], v.block()),
    "run": _runs,
}  # fmt: skip


def _array(given: np.ndarray, rng: random.Random) -> Any:
    """Another array in the place of one: of another shape, type or order, or with other values."""
    array = np.array(given)
    kind = rng.choice(
        ["value", "value", "type", "shape", "order", "steps", "axes", "repeated", "locked", "unaligned"]
    )
    if kind == "value" and array.size:
        values = FLOATS if array.dtype.kind == "f" else [-128, -9, -1, 7, 8, 15, 16, 127, 255]
        flat = array.reshape(-1)
        with np.errstate(all="ignore"):
            flat[rng.randrange(flat.size) :: rng.choice([1, 3, 10**9])] = np.array(rng.choice(values)).astype(
                array.dtype
            )
    elif kind == "type":
        with np.errstate(all="ignore"):
            array = np.real(array).astype(rng.choice(TYPES))
    elif kind == "shape":
        array = np.zeros(
            [rng.choice([0, 1, 2, 3, n, n + 1, max(n - 1, 0)]) for n in array.shape], array.dtype
        )
    elif kind == "order":
        array = np.asfortranarray(array)
    elif kind == "steps":
        array = np.repeat(array, 2, axis=-1)[..., :: rng.choice([2, -2])] if array.ndim else array
    elif kind == "axes":
        array = rng.choice([array[None], array.reshape(-1), array.T, np.float64(1.0), array[..., None]])
    elif kind == "repeated":
        array = np.broadcast_to(array.reshape(-1)[:1], array.shape) if array.size else array
    elif kind == "locked":
        array.setflags(write=False)
    else:
        array = np.frombuffer(b"\0" + array.tobytes(), "u1")[1:].view(array.dtype).reshape(array.shape)
    return array


def _changed(value: Any, rng: random.Random) -> Any:
    """Something else in the place of an argument, or of something within it."""
    if rng.random() < 0.1:
        return rng.choice(THINGS)
    if isinstance(value, np.ndarray):
        return _array(value, rng)
    if isinstance(value, dict | list | tuple) and value and rng.random() < 0.9:
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        key = rng.choice(list(items))
        items[key] = _changed(items[key], rng)
        if rng.random() < 0.1:
            del items[key]
        return items if isinstance(value, dict) else type(value)(items.values())
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(NUMBERS)
    return rng.choice([*FLOATS, *NUMBERS] if isinstance(value, float) else [*THINGS, *NUMBERS])


def _one(name: str, seed: str) -> str:
    """The outcome of one call."""
    rng = random.Random(seed)
    try:
        function, args, keywords = FUNCTIONS[name](Valid(rng), rng)
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            places = [*range(len(args)), *keywords]
            place = rng.choice(places)
            holder: Any = args if isinstance(place, int) else keywords
            holder[place] = _changed(copy.copy(holder[place]), rng)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            function(*args, **keywords)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        return "interrupted"
    except FINE as error:
        return (
            "refused"
            if "\n" not in str(error) and "panick" not in str(error)
            else f"more than a line: {error!r}"
        )
    except BaseException as error:  # noqa: BLE001  # what is looked for
        return f"{type(error).__name__}: {error}"[:300]
    return "a result"


def _process(seed: str, first: int, log: Path) -> None:
    """Calls one after the other; each is written down before it begins, and its outcome afterwards."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _interrupt)
    names = list(FUNCTIONS)
    with log.open("w", buffering=1) as file, np.errstate(all="ignore"):
        for number in range(first, first + CALLS):
            name = names[number % len(names)]
            file.write(json.dumps([name, number]) + "\n")
            file.write(json.dumps(_one(name, f"{seed} {number}")) + "\n")


def calls(n_calls: int, rng: random.Random, until: float) -> Counts:
    """Make calls in processes of their own, and count what became of them."""
    counts, number, seed = Counts(), 0, str(rng.randrange(10**9))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        while number < n_calls and time.monotonic() < until:
            command = [sys.executable, "-m", "tests.soak.arrays", seed, str(number), str(log)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
                end = (
                    f"ended by signal {-done.returncode}"
                    if done.returncode < 0
                    else f"said {done.stderr[-300:]!r}"
                )
                end = end if done.returncode or done.stderr else ""
            except subprocess.TimeoutExpired:
                end = "stands still"
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            for (name, case), outcome in zip(lines[::2], [*lines[1::2], end], strict=False):
                fine = outcome in ("a result", "refused", "interrupted")
                counts.add(
                    outcome.partition(":")[0],
                    "" if fine else f"{name}, `_one({name!r}, '{seed} {case}')`: {outcome}",
                )
            if end and len(lines) % 2 == 0:
                counts.add("ill end", end)
            number += max(len(lines[::2]), 1)
    return counts


if __name__ == "__main__":
    _process(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
