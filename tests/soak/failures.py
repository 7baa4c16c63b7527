"""The n-th allocation of the core fails, or the n-th call on a file of a run: an error, or an end for want of memory.

Nothing half written is left, and the same command goes on afterwards. `failpoint.c` is compiled and loaded into a
process that runs this file, so calls of the core and of libraries fail as well as those of Python. One call fails, or
some in a row, since the core keeps a reserve for one.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .counts import Counts

HERE = Path(__file__).parent
#: How many calls fail in a row, from one on.
MANY = (1, 2, 4, 32, 10**9)
#: Commands of `runs` whose calls on files fail.
COMMANDS = ("solve sums", "quantize", "merge", "collect rows", "export", "solve rows", "collect sums")


def compiler() -> list[str]:
    """A C compiler of the system, or that of the package ziglang."""
    return ["cc"] if shutil.which("cc") else [sys.executable, "-m", "ziglang", "cc"]


def library(base: Path) -> Path:
    """Compile the failpoints into a folder."""
    file = base / "failpoint.so"
    subprocess.run(
        [*compiler(), "-O1", "-fPIC", "-shared", "-o", file, HERE / "failpoint.c", "-ldl"], check=True
    )
    return file


def failures(base: Path, n_cases: int, rng: random.Random, until: float) -> Counts:
    """Compile the failpoints, and run `_campaign` in a process that has them."""
    left = min(until - time.monotonic(), 1e9)
    job = json.dumps([str(base), n_cases, rng.randrange(10**9), left])
    answer = base / "answer.json"
    subprocess.run(
        [sys.executable, "-m", "tests.soak.failures", job, answer],
        env=os.environ | {"LD_PRELOAD": str(library(base))},
        check=True,
    )
    counts = Counts()
    for outcome, wrong in json.loads(answer.read_text()):
        counts.add(outcome, wrong)
    return counts


def _campaign(base: Path, n_cases: int, rng: random.Random, until: float) -> list[tuple[str, str]]:
    """Half of the cases each, in turn: outcome, and what is wrong."""
    failed: list[tuple[str, str]] = []
    kinds = itertools.cycle([_Core(base), _Files(base)])
    for kind in itertools.islice(kinds, n_cases):
        if time.monotonic() > until:
            break
        failed.append(kind.case(rng))
    return failed


def mapped(file: str | None) -> tuple[int, int]:
    """First and last address of a library. Others may lie beside it, also some of the same name."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [int(end, 16) for line in lines if line[-1] == file for end in line[0].split("-")]
    return min(ends), max(ends)


def _arm(low: int, high: int, folder: str, number: int, many: int = 1) -> None:
    ctypes.CDLL(None).failpoint(
        ctypes.c_size_t(low),
        ctypes.c_size_t(high),
        folder.encode(),
        ctypes.c_long(number),
        ctypes.c_long(many),
    )


def _seen() -> int:
    return int(ctypes.CDLL(None).failpoint_seen())


class _Core:
    """Calls of the core, one allocation of which fails."""

    def __init__(self, base: Path) -> None:
        from ..native.test_want_of_memory import CALLS

        self.log, self.text = base / "core", CALLS
        self.n: dict[str, int] = {}
        # In a process of its own: a fork has no threads of the core, so that none may run before it.
        self._forked(lambda: self.log.write_text("\n".join(self._calls())))
        self.names = self.log.read_text().splitlines()

    def _calls(self) -> dict[str, Callable[[], Any]]:
        room: dict[str, Any] = {}
        exec(self.text, room)
        return dict(room["calls"])

    def _forked(self, work: Callable[[], object]) -> int:
        process = os.fork()
        if not process:
            with self.log.open("wb") as log:
                os.dup2(log.fileno(), 2)
            try:
                work()
                os._exit(0)
            finally:
                os._exit(70)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def _run(self, name: str, number: int, many: int = 1) -> None:
        from loopq.errors import LoopqError

        call = self._calls()[name]
        _arm(*mapped(importlib.import_module("loopq._native").__file__), "", number, many)
        said = "done"
        try:
            call()
        except (LoopqError, MemoryError) as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException as error:  # noqa: BLE001  # what is looked for
            said = f"Traceback: {type(error).__name__}: {error}"
        n = _seen()
        _arm(0, 0, "", -1)
        self.log.write_text(f"{n} {said}")

    def case(self, rng: random.Random) -> tuple[str, str]:
        name = rng.choice(self.names)
        if name not in self.n:
            self._forked(lambda: self._run(name, 0))
            self.n[name] = int(self.log.read_text().split()[0])
        number = rng.randint(1, max(1, self.n[name]))
        many = rng.choice(MANY)
        code = self._forked(lambda: self._run(name, number, many))
        text = self.log.read_text(errors="replace")
        case = f"core, {name}, allocation {number} of {self.n[name]}, {many} in a row"
        if code == 0 and "Traceback" not in text:
            return f"core: {'goes on' if ' done' in text else 'an error of loopq'}", ""
        if code == -6 and "memory allocation of" in text:
            return "core: ends for want of memory", ""
        return f"core: exit code {code}", f"{case}: {code}: {text[-300:]}"


def _whole(out: Path) -> bool:
    """Whether an output says that it is complete: its list of files is written last, and a mark of its work goes."""
    return not (out / "collecting.json").exists() and any(
        (out / name).exists() for name in ("loopq.json", "manifest.json", "loopq_export.json")
    )


class _Files:
    """Commands, one call of which on a file fails."""

    def __init__(self, base: Path) -> None:
        from . import runs

        place = base / "failing"
        place.mkdir()
        self.runs, self.folder = runs, str(place)
        self.bench = runs.Bench(place, {name: runs.COMMANDS[name] for name in COMMANDS})
        self.n: dict[str, int] = {}

    def case(self, rng: random.Random) -> tuple[str, str]:
        runs, bench = self.runs, self.bench
        name = rng.choice(bench.names)
        if name not in self.n:
            with runs.place(bench.base) as folder:
                runs.AT_END.append(lambda: (bench.base / "n").write_text(str(_seen())))
                runs.finish(bench.start(name, folder / "out", lambda: _arm(0, 0, self.folder, 0)))
                runs.AT_END.clear()
                self.n[name] = int((bench.base / "n").read_text())
        number, many = rng.randint(1, self.n[name]), rng.choice(MANY)
        with runs.place(bench.base) as folder:
            code = runs.finish(
                bench.start(name, folder / "out", lambda: _arm(0, 0, self.folder, number, many))
            )
            text = bench.said()
            wrong = ""
            if code not in (0, 1) or "Traceback" in text or (code and "error" not in text.splitlines()[-1]):
                wrong = f"exit code {code}: {text[-300:]}"
            # A folder with the name of the output is complete.
            elif _whole(folder / "out") and runs.digest(folder / "out") != bench.wanted[name]:
                wrong = f"half an output ({text[-200:]})"
            wrong = wrong or bench.settled(name, folder, True)
        outcome = f"files: {'refused in one line' if code else 'goes on'}"
        return outcome, wrong and f"{name}, call {number} of {self.n[name]}, {many} in a row: {wrong}"


def main(job: str, answer: str) -> None:
    """Run the campaign of a job in this process, and write the cases into a file."""
    base, n_cases, seed, left = json.loads(job)
    failed = _campaign(Path(base), n_cases, random.Random(seed), time.monotonic() + left)
    Path(answer).write_text(json.dumps(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
