"""Runs that are killed, run twice at once, or run out of disk: the leftovers must be right and complete."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from loopq.terminal.interrupts import INTERRUPTED

from ..support.runs import digest
from . import counts as counted
from .counts import Counts

COLLECT = "--n-prompts 3 --seq-len 16 --batch-size 1 --n-steps 2 --threads 1 --exclude *core_block.1*"
TINY = f"{COLLECT} --group-size 16 --set rank_threshold=none"
PAPER = f"{TINY} --preset paper"
FIT = "--fit 23 --set fit_bits=2,4 --set fit_group_sizes=16"
REPRODUCE = "--n-calibration 3 --n-evaluation 2 --n-prompts 2 --seq-len 16 --n-seeds 1"
#: Command lines by name: {model} is the tiny model, {rows} and {sums} dumps of it, {checkpoint} a checkpoint, {out}
#: what is written.
COMMANDS = {
    "quantize": f"quantize {{model}} --out {{out}} {PAPER}",
    "memory": f"quantize {{model}} --out {{out}} {PAPER} --memory {{memory}}",
    "format": f"quantize {{model}} --out {{out}} {PAPER} --format gptq",
    "balanced": f"quantize {{model}} --out {{out}} {PAPER} --set step_weights=balanced",
    "best": f"quantize {{model}} --out {{out}} {TINY} --preset best",
    "asymmetric": f"quantize {{model}} --out {{out}} {PAPER} --inputs asymmetric --set sweeps=2",
    "loop metric": f"quantize {{model}} --out {{out}} {TINY} --preset best --inputs open",
    "closed loop": f"quantize {{model}} --out {{out}} {PAPER} --inputs closed-loop",
    "fit": f"quantize {{model}} --out {{out}} {PAPER} {FIT}",
    "trellis": f"quantize {{model}} --out {{out}} {TINY} --method trellis --bits 2",
    "evaluate": f"quantize {{model}} --out {{out}} {PAPER} --evaluate -",
    "collect rows": f"collect {{model}} --out {{out}} {COLLECT} --shard-batches 1",
    "collect sums": f"collect {{model}} --out {{out}} {COLLECT} --hessian --per-step",
    "solve rows": "solve {rows} --out {out} --method gptq --group-size 16 --threads 1",
    "solve sums": "solve {sums} --out {out} --group-size 16 --threads 1",
    "merge": "merge {sums} {more} --out {out}",
    "export": "export {checkpoint} --out {out} --format compressed-tensors",
    "reproduce": "reproduce rank {model} --work {out}/work --out {out}/record --threads 1 --n-steps 2 "
    + REPRODUCE,
}
AT_END: list[Callable[[], object]] = []
THERE = re.compile("exists and is not empty|holds a finished dump")


class Bench:
    """A folder with everything the commands read, and what each of them writes when nothing happens to it.

    `until` is the time of the monotonic clock at which a campaign ends, however much is left.
    """

    def __init__(self, base: Path, commands: dict[str, str] = COMMANDS) -> None:
        from benches.zoo.store import save_model

        from ..conftest import tiny_model

        self.base, self.names, self.until, self.commands = base, list(commands), math.inf, commands
        self.tried: set[str] = set()
        self.inputs: dict[str, object] = {"model": base / "model", "memory": 250_000}
        save_model(tiny_model(), base / "model")
        by_name = {
            "rows": "collect rows",
            "sums": "collect sums",
            "more": "collect sums",
            "checkpoint": "quantize",
        }
        for name, command in by_name.items():
            self.inputs[name] = base / name
            line = COMMANDS[command].format(**self.inputs, out=base / name).split()
            self._run(line + ["--seed", "1"] * (name == "more"))
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import loopq.run.model_source, transformers"], check=True)
        self.start_up = time.monotonic() - began
        self.wanted, self.seconds, self.n_events = {}, {}, {}
        # Of the same name as later outputs, since a card names its folder.
        first = base / "first" / "out"
        for name in self.names:
            new = True
            while new:
                first.parent.mkdir()
                self.seconds[name], self.n_events[name], new = self._run(self.line(name, first))
                self.wanted[name] = digest(first)
                shutil.rmtree(first.parent)

    def _run(self, line: list[str]) -> tuple[float, int, bool]:
        """Run a command; its seconds, its changes of files, and whether it imported anything.

        Imports of a command happen here, so that the timing covers its work alone.
        """
        began = time.monotonic()
        code = finish(begin(line, self.base / "log", self._observe))
        assert code == 0, f"{line}: {self.said()}"
        seconds = time.monotonic() - began
        events, *modules = (self.base / "observed").read_text().splitlines()
        new = [module for module in modules if module not in sys.modules and module not in self.tried]
        for module in new:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        self.tried.update(new)
        return seconds, int(events), bool(new)

    def _observe(self) -> None:
        file, seen = self.base / "observed", at_event(0)
        AT_END.append(lambda: file.write_text("\n".join([str(len(seen)), *sys.modules])))

    def start(self, name: str, out: Path, before: Callable[[], object] = lambda: None) -> int:
        """Start a command in a separate process; return its number."""
        return begin(self.line(name, out), self.base / "log", before)

    def line(self, name: str, out: Path) -> list[str]:
        """Arguments of a command."""
        return self.commands[name].format(**self.inputs, out=out).split()

    def said(self) -> str:
        """Output of the last process."""
        return (self.base / "log").read_text(errors="replace").strip()

    def settled(self, name: str, place: Path, may_have_ended: bool) -> str:
        """Run a command to its end; say what is wrong with what is there then, or nothing.

        A command with finished and cleared work is refused: its output exists.
        """
        code = finish(self.start(name, place / "out"))
        if code != 0 and not (may_have_ended and code == 1 and THERE.search(self.said())):
            return f"the rerun ends with {code}: {self.said()[-300:]}"
        left = sorted(p.name for p in place.iterdir() if p.name not in ("out", ".out.lock"))
        if left:
            return f"left behind: {left}"
        return "" if digest(place / "out") == self.wanted[name] else "another result"


def kill_me() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def at_event(number: int, act: Callable[[], object] = kill_me) -> list[str]:
    """Kill this process, or do something else, when it is about to do the n-th thing with a file; 0 only counts."""
    seen: list[str] = []

    def hook(event: str, args: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event.startswith(("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")):
            seen.append(event)
            if len(seen) == number:
                act()

    sys.addaudithook(hook)
    return seen


@contextlib.contextmanager
def place(base: Path) -> Iterator[Path]:
    """An empty folder for one trial."""
    folder = base / "trial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


#: Where the output of a process comes from and where it goes: through a pipe, which no limit of a file's size stops.
_OUTPUTS: dict[int, tuple[int, Path]] = {}


def begin(argv: list[str], log: Path, before: Callable[[], object] = lambda: None) -> int:
    read, write = os.pipe()
    process = os.fork()
    if process:
        os.close(write)
        _OUTPUTS[process] = read, log
        return process
    code = 70
    try:
        for number in (1, 2):
            os.dup2(write, number)
        # A child that the command forks may outlive it, and keeps only what it inherits.
        os.close(write)
        # Under pytest they would write where it collects output.
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        import loopq.storage.journal
        from loopq.cli import main

        # Every batch is saved: a kill at any moment then finds something half done.
        loopq.storage.journal.SNAPSHOT_SECONDS = loopq.storage.journal.SNAPSHOT_TIMES = 0.0
        before()
        code = main(argv)
        for function in AT_END:
            function()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001  # what is looked for
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def finish(process: int) -> int:
    """Wait for the end of a process and keep what it said; return its exit code."""
    read, log = _OUTPUTS.pop(process)
    with os.fdopen(read, "rb") as output:
        log.write_bytes(output.read())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kills(bench: Bench, n_kills: int, rng: random.Random) -> Counts:
    """Kill commands up to four times in a row, and let them end: byte for byte the same result.

    Half of the kills come at a random moment, half just before a random one of the command's changes to files.
    `n_tried` counts the sequences.
    """
    counts = Counts()
    done = 0
    names = itertools.cycle(bench.names)
    for name in counted.before(bench.until, names):
        if done >= n_kills:
            break
        with place(bench.base) as folder:
            may_have_ended = False
            for _ in range(rng.randint(1, 4)):
                at_change = rng.random() < 0.5
                code = (_at_a_change if at_change else _at_a_moment)(bench, name, folder / "out", rng)
                # A moment may lie behind the last change.
                may_have_ended |= code == 0 or not at_change
                if code != -signal.SIGKILL:
                    counts.outcomes["ended before the kill"] += 1
                    break
                done += 1
            wrong = bench.settled(name, folder, may_have_ended)
        counts.outcomes["kills"] = done
        counts.add("lost or different" if wrong else "the same bytes", wrong and f"{name}: {wrong}")
    return counts


def _at_a_change(bench: Bench, name: str, out: Path, rng: random.Random) -> int:
    """Kill a command just before a random change of files; a third are among the last, on a whole output."""
    n = bench.n_events[name]
    number = rng.randint(1 if rng.random() < 0.67 else max(1, n - 8), n)
    return finish(bench.start(name, out, functools.partial(at_event, number)))


def _at_a_moment(bench: Bench, name: str, out: Path, rng: random.Random) -> int:
    """Kill a command at a random moment, some after they stood still; the exit code."""
    process = bench.start(name, out)
    time.sleep(rng.uniform(0, 1.05) * bench.seconds[name])
    with _stopped(process, rng.random() < 0.2):
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    return finish(process)


@contextlib.contextmanager
def _stopped(process: int, really: bool) -> Iterator[None]:
    """Let a process stand still meanwhile, as Ctrl-Z or a busy machine does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP if really else 0)
    yield
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)


def writers(bench: Bench, n_pairs: int, rng: random.Random) -> Counts:
    """Start the same command twice with one output: one of them writes it, or both come after each other.

    Now and then the first one stands still until the second one ended. A command that is refused says why in one line.
    """
    counts = Counts()
    names = itertools.islice(itertools.cycle(bench.names), n_pairs)
    for name in counted.before(bench.until, names):
        with place(bench.base) as folder:
            first = bench.start(name, folder / "out")
            time.sleep(rng.uniform(0, bench.seconds[name]))
            with _stopped(first, rng.random() < 0.3):
                codes = [finish(bench.start(name, folder / "out"))]
                said = bench.said()
            codes.append(finish(first))
            said += f"\n{bench.said()}"
            wrong = bench.settled(name, folder, 0 in codes)
            if any(code not in (0, 1) for code in codes) or "Traceback" in said:
                wrong = f"exit codes {codes}: {said[-300:]}"
        counts.add(f"exit codes {sorted(codes)}", wrong and f"{name}: {wrong}")
    return counts


def interrupts(bench: Bench, n_runs: int, rng: random.Random) -> Counts:
    """Press Ctrl-C at a random moment of a program, imports included: code 130 in one line within a second, or half
    the time of a start where that is longer.

    The same command resumes afterwards.
    """
    counts = Counts()
    slowest = 0.0
    names = itertools.islice(itertools.cycle(bench.names), n_runs)
    for name in counted.before(bench.until, names):
        with place(bench.base) as folder:
            argv = bench.line(name, folder / "out")
            with (bench.base / "log").open("wb") as log:
                program = subprocess.Popen(
                    [sys.executable, "-m", "loopq", *argv], stdout=log, stderr=subprocess.STDOUT
                )
                time.sleep(rng.uniform(0, bench.start_up + bench.seconds[name]))
                began = time.monotonic()
                program.send_signal(signal.SIGINT)
                code = program.wait()
            took, text = time.monotonic() - began, bench.said()
            slowest = max(slowest, took if code == INTERRUPTED else 0)
            wrong = _ill_interrupted(code, text, took, max(1, bench.start_up / 2))
            # The signal may have come behind the last change.
            wrong = wrong or bench.settled(name, folder, True)
        counts.add(f"exit code {code}", wrong and f"{name}: {wrong}")
    counts.outcomes["ms at most"] = round(1000 * slowest)
    return counts


def _ill_interrupted(code: int, text: str, took: float, longest: float) -> str:
    """The fault in the end of a program after Ctrl-C, or nothing."""
    if "Traceback" in text and "loopq" in text:
        return f"a traceback: {text[-300:]}"
    if code == INTERRUPTED:
        if took > longest:
            return f"took {took:.2f} s"
        return "" if "interrupted" in text.splitlines()[-1] else f"said nothing: {text[-300:]}"
    # Python may not have reached loopq yet, or the program had ended.
    return f"exit code {code}: {text[-300:]}" if code not in (0, -signal.SIGINT) and "loopq" in text else ""


def _less_disk(rng: random.Random) -> tuple[str, Callable[[], object]]:
    limit = int(2 ** rng.uniform(6, 17))

    def before() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return f"files of {limit} bytes", before


def _less_memory(rng: random.Random) -> tuple[str, Callable[[], object]]:
    extra = int(2 ** rng.uniform(16, 27))

    def before() -> None:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + extra,) * 2)

    return f"{extra} bytes more of memory", before


def _less_files(rng: random.Random) -> tuple[str, Callable[[], object]]:
    more = rng.randint(0, 24)

    def before() -> None:
        held = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + more,) * 2)

    return f"{more} more open files", before


LIMITS = (_less_disk, _less_memory, _less_files)


def limits(bench: Bench, n_runs: int, rng: random.Random) -> Counts:
    """Give a run little disk, memory or few files: it prints one line and leaves nothing half done, and the
    same command resumes afterwards."""
    counts = Counts()
    for number in counted.before(bench.until, range(n_runs)):
        name = bench.names[number // len(LIMITS) % len(bench.names)]
        what, small = LIMITS[number % len(LIMITS)](rng)
        with place(bench.base) as folder:
            code, text = finish(bench.start(name, folder / "out", small)), bench.said()
            wrong = ""
            if code not in (0, 1) or "Traceback" in text:
                wrong = f"{what}: exit code {code}: {text[-300:]}"
            elif code == 1 and (folder / "out" / "loopq.json").exists():
                wrong = f"{what}: half an output"
            wrong = wrong or bench.settled(name, folder, code == 0)
        counts.add(
            f"{LIMITS[number % len(LIMITS)].__name__[6:]}: {'refused in one line' if code else 'enough'}",
            wrong and f"{name}: {wrong}",
        )
    return counts
