"""Processes that share one command: some are killed, others live on or resume; the bytes are those of one."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ..support.runs import digest
from .counts import Counts, before
from .runs import THERE, Bench, at_event, finish, place

COLLECT = "--n-prompts 24 --seq-len 50 --batch-size 1 --n-steps 2 --threads 1 --exclude *core_block.1*"
#: Command lines as in `runs.COMMANDS`, which one process alone can run too.
COMMANDS = {
    "ranks": f"collect {{model}} --out {{out}} {COLLECT} --hessian --per-step --rank-timeout 60",
    "workers": "solve {rows} --out {out} --group-size 16 --threads 1 --worker",
}
SIZES = {"ranks": (1, 2, 3, 4), "workers": (1, 2, 5)}


def _environment(name: str, rank: int, world: int, port: int) -> Callable[[], None]:
    """Variables that torchrun sets for one of several ranks."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port}

    def before() -> None:
        if name == "ranks":
            os.environ.update({key: str(value) for key, value in variables.items()})

    return before


def _run(
    bench: Bench, name: str, out: Path, world: int, rng: random.Random | None = None
) -> list[tuple[int, str]]:
    """Run a command in several processes; return exit code and error of each.

    With `rng`, a random one of them is killed at a random moment. As with torchrun, the end of a rank ends the others;
    workers go on.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = {bench.start(name, out, _environment(name, rank, world, port)) for rank in range(world)}
    end = time.monotonic() + rng.uniform(0, 1.2) * bench.seconds[name] if rng else None
    ended: list[tuple[int, str]] = []
    while running:
        for process in list(running):
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                running.remove(process)
                code = finish(process)
                ended.append((code, bench.said() if code else ""))
        if rng is not None and end is not None and time.monotonic() >= end and running:
            os.kill(rng.choice(sorted(running)), signal.SIGKILL)
            end = None
        if name == "ranks" and any(code for code, _ in ended):
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)
        time.sleep(0.002)
    return ended


def _campaign(bench: Bench, name: str, n_kills: int, rng: random.Random) -> Counts:
    counts = Counts()
    done = 0
    while done < n_kills and time.monotonic() < bench.until:
        world = 0
        with place(bench.base) as folder:
            for _ in range(rng.randint(1, 3)):
                world = rng.choice([n for n in SIZES[name] if n != world])
                codes = [code for code, _ in _run(bench, name, folder / "out", world, rng)]
                killed = codes.count(-signal.SIGKILL)
                done += killed
                counts.outcomes[f"kills of one of {world}"] += killed
                if not killed or (folder / "out" / "loopq.json").exists():
                    counts.outcomes["ended before the kill"] += not killed
                    break
            world = rng.choice([n for n in SIZES[name] if n != world])
            bad = [(code, text[-300:]) for code, text in _run(bench, name, folder / "out", world) if code]
            # A kill may have come after the end of the work.
            wrong = "" if any(THERE.search(text) for _, text in bad) or not bad else f"{world} go on: {bad}"
            left = sorted(p.name for p in folder.iterdir() if p.name not in ("out", ".out.lock"))
            if not wrong and left:
                wrong = f"left behind: {left}"
            if not wrong and digest(folder / "out") != bench.wanted[name]:
                wrong = "another result"
        counts.outcomes["kills"] = done
        counts.add(f"ended by {world}: {'wrong' if wrong else 'the same bytes'}", wrong)
    return counts


def ranks(bench: Bench, n_kills: int, rng: random.Random) -> Counts:
    """Kill random ranks of a collection at random moments, and go on with another number of them."""
    return _campaign(bench, "ranks", n_kills, rng)


def workers(bench: Bench, n_kills: int, rng: random.Random) -> Counts:
    """Kill random workers of a solve while the others go on, and start another number of them."""
    return _campaign(bench, "workers", n_kills, rng)


def holders(bench: Bench, n_runs: int, rng: random.Random) -> Counts:
    """Kill a command after it forked a child, which lives on: the same command goes on at once, and the child holds
    nothing.
    """
    counts = Counts()
    log = bench.base / "forked"
    names = itertools.islice(itertools.cycle(bench.names), n_runs)
    for name in before(bench.until, names):
        with place(bench.base) as folder:
            killed = rng.randint(1, bench.n_events[name])
            forked = rng.randint(1, killed)

            def both(killed: int = killed, forked: int = forked) -> None:
                # Opened before anything counts, since opening it is a thing that is done with a file.
                noted = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                at_event(forked, lambda: _fork(noted))
                at_event(killed)

            finish(bench.start(name, folder / "out", both))
            child = log.read_text()
            try:
                wrong = bench.settled(name, folder, True) if child else "no child"
            finally:
                if child:
                    os.kill(int(child), signal.SIGKILL)
        counts.add("lost or different" if wrong else "the same bytes", wrong and f"{name}: {wrong}")
    return counts


def _fork(noted: int) -> None:
    """Leave a child that stands still, as a server does that the user's code started."""
    child = os.fork()
    if child:
        os.write(noted, str(child).encode())
        return
    # The campaign waits for the end of what goes there.
    for number in (1, 2):
        os.close(number)
    while True:
        time.sleep(600)
