"""Runs that are killed, run twice at once, or run out of disk: what is left must be right, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from loopq.terminal.interrupts import INTERRUPTED

from ..support.runs import digest

COLLECT = "--n-prompts 3 --seq-len 16 --batch-size 1 --n-steps 2 --threads 1 --exclude *core_block.1*"
TINY = f"{COLLECT} --group-size 16 --rank-threshold none"
PAPER = f"{TINY} --preset paper"
FIT = "--fit 23 --fit-bits 2,4 --fit-levels even --fit-group-sizes 16"
#: Command lines by name: {model} is the tiny model, {rows} and {sums} dumps of it, {checkpoint} a checkpoint, {out}
#: what is written.
COMMANDS = {
    "quantize": f"quantize {{model}} --out {{out}} {PAPER}",
    "memory": f"quantize {{model}} --out {{out}} {PAPER} --memory {{memory}}",
    "format": f"quantize {{model}} --out {{out}} {PAPER} --format gptq",
    "balanced": f"quantize {{model}} --out {{out}} {PAPER} --step-weights balanced",
    "best": f"quantize {{model}} --out {{out}} {TINY} --preset best",
    "asymmetric": f"quantize {{model}} --out {{out}} {PAPER} --inputs asymmetric --sweeps 2",
    "loop metric": f"quantize {{model}} --out {{out}} {TINY} --preset best --inputs open",
    "closed loop": f"quantize {{model}} --out {{out}} {PAPER} --inputs closed-loop",
    "fit": f"quantize {{model}} --out {{out}} {PAPER} {FIT}",
    "fit fisher": f"quantize {{model}} --out {{out}} {PAPER} {FIT} --fit-score fisher",
    "trellis": f"quantize {{model}} --out {{out}} {TINY} --method trellis --bits 2",
    "evaluate": f"quantize {{model}} --out {{out}} {PAPER} --evaluate -",
    "collect rows": f"collect {{model}} --out {{out}} {COLLECT} --shard-batches 1",
    "collect sums": f"collect {{model}} --out {{out}} {COLLECT} --hessian --per-step",
    "solve rows": "solve {rows} --out {out} --method gptq --group-size 16 --threads 1",
    "solve sums": "solve {sums} --out {out} --group-size 16 --threads 1",
    "merge": "merge {sums} {more} --out {out}",
    "export": "export {checkpoint} --out {out} --format compressed-tensors",
}
AT_END: list[Callable[[], object]] = []
THERE = re.compile("exists and is not empty|holds a finished dump")


@dataclasses.dataclass
class Counts:
    """What became of a campaign: a number for each outcome, and a line for each failure."""

    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[str] = dataclasses.field(default_factory=list)

    def tell(self) -> None:
        """Say how far it is, now and then: campaigns of runs take long."""
        n = self.outcomes["trials"] = self.outcomes["trials"] + 1
        if n % 10 == 0:
            print(f"  {dict(self.outcomes)} {self.failures[-1:]}", file=sys.stderr, flush=True)

    def lines(self) -> list[str]:
        """The counts as text."""
        return [f"{what}: {n}" for what, n in sorted(self.outcomes.items())]


class Bench:
    """A folder with everything the commands read, and what each of them writes when nothing happens to it.

    `until` is the time of the monotonic clock at which a campaign ends, however much is left.
    """

    def __init__(
        self, base: Path, names: list[str], until: float = math.inf, commands: dict[str, str] = COMMANDS
    ) -> None:
        from benches.zoo.store import save_model

        from ..conftest import tiny_model

        self.base, self.names, self.until, self.commands = base, names, until, commands
        self.inputs: dict[str, object] = {"model": base / "model", "memory": 250_000}
        save_model(tiny_model(), base / "model")
        made = {
            "rows": "collect rows",
            "sums": "collect sums",
            "more": "collect sums",
            "checkpoint": "quantize",
        }
        for name, command in made.items():
            self.inputs[name] = base / name
            line = COMMANDS[command].format(**self.inputs, out=base / name)
            assert finish(begin(line.split() + ["--seed", "1"] * (name == "more"), base / "log")) == 0, name
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import loopq.run.source, transformers"], check=True)
        self.start_up = time.monotonic() - began
        self.wanted, self.seconds, self.n_events = {}, {}, {}
        for name in names:
            for _ in range(2):
                began = time.monotonic()
                code = finish(self.start(name, base / "first", self._observe))
                assert code == 0, f"{name}: {self.said()}"
                self.seconds[name] = time.monotonic() - began
                self.wanted[name] = digest(base / "first")
                shutil.rmtree(base / "first")
                events, *modules = (base / "observed").read_text().splitlines()
                self.n_events[name] = int(events)
                # What a command imports on its way is imported here: its time is that of its work from now on.
                for module in modules:
                    with contextlib.suppress(Exception):
                        importlib.import_module(module)

    def _observe(self) -> None:
        file, seen = self.base / "observed", at_event(0)
        AT_END.append(lambda: file.write_text("\n".join([str(len(seen)), *sys.modules])))

    def start(self, name: str, out: Path, before: Callable[[], object] = lambda: None) -> int:
        """Start a command in a process of its own; return its number."""
        return begin(self.commands[name].format(**self.inputs, out=out).split(), self.base / "log", before)

    def said(self) -> str:
        """What the last process said."""
        return (self.base / "log").read_text(errors="replace").strip()

    def settled(self, name: str, place: Path) -> str:
        """Run a command to its end; say what is wrong with what is there then, or nothing."""
        code = finish(self.start(name, place / "out"))
        if code != 0 and not (code == 1 and THERE.search(self.said())):
            return f"the rerun ends with {code}: {self.said()[-300:]}"
        left = sorted(p.name for p in place.iterdir() if p.name not in ("out", ".out.lock"))
        if left:
            return f"left behind: {left}"
        return "" if digest(place / "out") == self.wanted[name] else "another result"


def at_event(number: int) -> list[str]:
    """Kill this process when it is about to do the n-th thing with a file; 0 only counts."""
    seen: list[str] = []

    def hook(event: str, args: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event.startswith(("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")):
            seen.append(event)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)

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
    """
    counts = Counts()
    done = 0
    while done < n_kills and time.monotonic() < bench.until:
        name = bench.names[counts.outcomes["trials"] % len(bench.names)]
        with place(bench.base) as folder:
            for _ in range(rng.randint(1, 4)):
                if rng.random() < 0.5:
                    number = rng.randint(1, bench.n_events[name])
                    process = bench.start(name, folder / "out", functools.partial(at_event, number))
                else:
                    process = bench.start(name, folder / "out")
                    time.sleep(rng.uniform(0, 1.05) * bench.seconds[name])
                    with _stopped(process, rng.random() < 0.2):
                        time.sleep(0.05)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                if finish(process) != -signal.SIGKILL:
                    counts.outcomes["ended before the kill"] += 1
                    break
                done += 1
                counts.outcomes[f"kills of {name}"] += 1
            wrong = bench.settled(name, folder)
        counts.outcomes["lost or different" if wrong else "the same bytes"] += 1
        if wrong:
            counts.failures.append(f"{name}: {wrong}")
        counts.outcomes["kills"] = done
        counts.tell()
    return counts


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

    Now and then the first one stands still until the second one ended.
    """
    counts = Counts()
    for number in range(n_pairs):
        if time.monotonic() > bench.until:
            break
        name = bench.names[number % len(bench.names)]
        with place(bench.base) as folder:
            first = bench.start(name, folder / "out")
            time.sleep(rng.uniform(0, bench.seconds[name]))
            with _stopped(first, rng.random() < 0.3):
                second = finish(bench.start(name, folder / "out"))
            codes = [second, finish(first)]
            counts.outcomes[f"exit codes {sorted(codes)}"] += 1
            wrong = bench.settled(name, folder)
            if any(code not in (0, 1) for code in codes):
                wrong = f"exit codes {codes}: {bench.said()[-300:]}"
        counts.outcomes["wrong" if wrong else "right"] += 1
        if wrong:
            counts.failures.append(f"{name}: {wrong}")
        counts.tell()
    return counts


def interrupts(bench: Bench, n_runs: int, rng: random.Random) -> Counts:
    """Press Ctrl-C at a random moment of a program, imports included: code 130 in one line within a second, or half
    the time of a start where that is longer.

    The same command goes on afterwards.
    """
    counts = Counts()
    slowest = 0.0
    for number in range(n_runs):
        if time.monotonic() > bench.until:
            break
        name = bench.names[number % len(bench.names)]
        with place(bench.base) as folder:
            argv = COMMANDS[name].format(**bench.inputs, out=folder / "out").split()
            with (bench.base / "log").open("wb") as log:
                program = subprocess.Popen(
                    [sys.executable, "-m", "loopq", *argv], stdout=log, stderr=subprocess.STDOUT
                )
                time.sleep(rng.uniform(0, bench.start_up + bench.seconds[name]))
                began = time.monotonic()
                program.send_signal(signal.SIGINT)
                code = program.wait()
            took, text = time.monotonic() - began, bench.said()
            wrong = ""
            if "Traceback" in text and "loopq" in text:
                wrong = f"a traceback: {text[-300:]}"
            elif code == INTERRUPTED:
                slowest = max(slowest, took)
                if took > max(1, bench.start_up / 2):
                    wrong = f"took {took:.2f} s"
                elif "interrupted" not in text.splitlines()[-1]:
                    wrong = f"said nothing: {text[-300:]}"
            # Python itself may not have come to loopq yet, or the program had ended.
            elif code not in (0, -signal.SIGINT) and "loopq" in text:
                wrong = f"exit code {code}: {text[-300:]}"
            counts.outcomes[f"exit code {code}"] += 1
            wrong = wrong or bench.settled(name, folder)
        counts.outcomes["wrong" if wrong else "right"] += 1
        counts.outcomes["slowest, ms"] = round(1000 * slowest)
        if wrong:
            counts.failures.append(f"{name}: {wrong}")
        counts.tell()
    return counts


def full_disk(bench: Bench, n_runs: int, rng: random.Random) -> Counts:
    """Let no file grow beyond a random size: one line, no half output, and the same command goes on afterwards."""
    counts = Counts()
    for number in range(n_runs):
        if time.monotonic() > bench.until:
            break
        name = bench.names[number % len(bench.names)]
        limit = int(2 ** rng.uniform(6, 17))

        def small(limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        with place(bench.base) as folder:
            code, text = finish(bench.start(name, folder / "out", small)), bench.said()
            wrong = ""
            if code not in (0, 1) or "Traceback" in text:
                wrong = f"limit {limit}: exit code {code}: {text[-300:]}"
            elif code == 1 and (folder / "out" / "loopq.json").exists():
                wrong = f"limit {limit}: half an output"
            counts.outcomes["refused in one line" if code else "small enough"] += 1
            wrong = wrong or bench.settled(name, folder)
        counts.outcomes["wrong" if wrong else "right"] += 1
        if wrong:
            counts.failures.append(f"{name}: {wrong}")
        counts.tell()
    return counts
