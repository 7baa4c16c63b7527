"""Outputs in whose place an input, or something else than a plain file stands: it stays as it was."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from pathlib import Path

from .counts import Counts, before
from .files import tree
from .inputs import _run

SMALL = "--n-prompts 2 --seq-len 12 --n-steps 2"
ROUNDED = f"{SMALL} --method rtn --group-size 16"
RANK = "--n-steps 2 --n-calibration 2 --n-evaluation 1 --n-prompts 2 --seq-len 12 --n-seeds 1"
#: {node} is the output in question, {out} another new one.
LINES = {
    "page of quantize": f"quantize {{model}} --out {{out}} {ROUNDED} --html {{node}}",
    "checkpoint": f"quantize {{model}} --out {{node}} {ROUNDED}",
    "page of evaluate": f"evaluate {{model}} {{checkpoint}} {SMALL} --html {{node}}",
    "export": "export {checkpoint} --out {node} --format compressed-tensors",
    "GGUF": "export {checkpoint} --out {node} --format gguf",
    "imatrix": "export {sums} --out {node} --format imatrix",
    "dump": f"collect {{model}} --out {{node}} {SMALL} --hessian",
    "sum": "merge {sums} {sums} --out {node}",
    "solved": "solve {sums} --out {node} --method rtn --group-size 16",
    "page of diagnose": f"diagnose {{model}} {SMALL} --quick --html {{node}}",
    "JSON of diagnose": f"diagnose {{model}} {SMALL} --quick --json {{node}}",
    "work of diagnose": f"diagnose {{model}} {SMALL} --work {{node}}",
    "page of demo": "demo --page {node}",
    "pages of demo": "demo --html {node}",
    "record": f"reproduce rank {{model}} --work {{out}} --out {{node}} {RANK}",
    "work of a record": f"reproduce rank {{model}} --work {{node}} --out {{out}} {RANK}",
    "lock": f"quantize {{model}} --out {{locked}} {ROUNDED}",
    "card": "card {carded}",
    "picture": "card {pictured}",
}
KINDS = (
    "pipe", "null", "full", "dangling", "link", "link to a device", "link to itself", "hard", "socket", "folder",
    "input", "input", "input",
)  # fmt: skip


def _node(kind: str, place: Path) -> None:
    """Put a node of a kind somewhere. Devices need root; without it a pipe stands for them."""
    beside = place.parent / "precious"
    beside.write_text("years of work")
    if kind in ("null", "full") and os.geteuid() == 0:
        os.mknod(place, 0o666 | stat.S_IFCHR, os.makedev(1, 3 if kind == "null" else 7))
    elif kind in ("pipe", "null", "full"):
        os.mkfifo(place)
    elif kind == "hard":
        os.link(beside, place)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(place.parent)
        socket.socket(socket.AF_UNIX).bind(place.name)
        os.chdir(here)
    elif kind == "folder":
        place.mkdir()
        (place / "precious").write_text("years of work")
    else:
        targets = {"dangling": "nowhere", "link": "precious", "link to itself": place.name}
        place.symlink_to(targets.get(kind, "/proc/self/fd/1"))


def _takes(line: str, given: dict[str, Path]) -> list[str]:
    """The inputs of a line that names its output; none for others."""
    return [name for name in given if "{node}" in LINES[line] and f"{{{name}}}" in LINES[line]]


def _input(
    given: dict[str, Path], line: str, place: Path, rng: random.Random
) -> tuple[Path, dict[str, Path]]:
    """Copy an input of a line; the copy, and names under which it, or a file in it, is the output."""
    name = rng.choice(_takes(line, given))
    folder = Path(shutil.copytree(given[name], place / name))
    return folder, {name: folder, "node": rng.choice([folder, *(folder / file for file in tree(folder))])}


def _looked(place: Path, kind: str) -> dict[str, object]:
    if kind == "input":
        return dict(tree(place))
    status = place.lstat()
    beside = place.parent / "precious"
    # A folder for work gets files beside those in it.
    inner = (place / "precious").read_text() if stat.S_ISDIR(status.st_mode) else ""
    return {
        "kind": stat.S_IFMT(status.st_mode),
        "device": status.st_rdev,
        "beside": beside.read_text(),
        "nowhere": (place.parent / "nowhere").exists(),
        "within": inner,
    }


def nodes(base: Path, model: Path, n_cases: int, rng: random.Random, until: float) -> Counts:
    """Give every output of the commands as an input, device, pipe, link, hard link, socket or full folder."""
    counts = Counts()
    given = {"model": model, "checkpoint": base / "q", "sums": base / "sums"}
    for line in (
        f"quantize {{model}} --out {{checkpoint}} {ROUNDED}",
        f"collect {{model}} --out {{sums}} {SMALL} --hessian",
    ):
        assert _run(line.format(**given).split())[0] == 0
    # Pages go into a folder that is there, which takes minutes.
    cases = [(line, kind) for line in LINES for kind in KINDS if (line, kind) != ("pages of demo", "folder")]
    cases = [(line, kind) for line, kind in cases if kind != "input" or _takes(line, given)]
    rng.shuffle(cases)
    for number in before(until, range(n_cases)):
        line, kind = cases[number % len(cases)]
        shutil.rmtree(place := base / "node", ignore_errors=True)
        place.mkdir()
        node = place / {"lock": ".q.lock", "card": "README.md", "picture": "card.png"}.get(line, "node")
        if line in ("card", "picture"):
            shutil.copytree(given["checkpoint"], place, dirs_exist_ok=True)
            node.unlink(missing_ok=True)
        names = given | {
            "node": node, "out": place / "out", "locked": place / "q", "carded": place, "pictured": place
        }  # fmt: skip
        if kind == "input":
            node, others = _input(given, line, place, rng)
            names |= others
        else:
            _node(kind, node)
        before_it = _looked(node, kind)
        code, text = _run(LINES[line].format(**names).split())
        wrong = ""
        if code not in (0, 1, 2) or "Traceback" in text:
            wrong = f"exit code {code}: {text[-300:]}"
        elif not os.path.lexists(node):
            wrong = "is gone"
        elif not before_it.items() <= _looked(node, kind).items():
            wrong = f"{names['node']}: {before_it!r:.300} became {_looked(node, kind)!r:.300}"
        counts.add("goes on" if code == 0 else "refused in one line", wrong and f"{line}, {kind}: {wrong}")
    shutil.rmtree(base / "node", ignore_errors=True)
    return counts
