"""Hostile files: seeded mutations of everything that loopq reads from a folder, and a count of what became of them."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

import loopq
import loopq._native as native
from loopq.calibrate.dump import Dump, DumpFile, Manifest
from loopq.calibrate.sums_file import write_accumulator
from loopq.errors import LoopqError
from loopq.formats.convert import inspect_any, read_any, write_as
from loopq.formats.record import RECORD
from loopq.layers.shared import SharedParameter
from loopq.layers.transforms import ChannelScale, Rotation
from loopq.storage.files import RawTensor, read_tensors, write_json, write_tensors
from loopq.storage.model_files import write_files

from ..support.checkpoints import checkpoint, layer
from .counts import Counts, before

#: Codes of a title and of colour, markup of two kinds, and a line that nobody may take for one of loopq's.
EVIL = "\x1b]0;x\x07\x9b2J\r\u202e<script>x</script>`[x](y:z)\nforged"
DEEP = "[" * 3000 + "]" * 3000
VALUES = [
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**30, 10**50, -(2**70), 0.5, 1e400, -1e400, float("nan"),
    "", "x", "F7", "\ud800", "a" * 300, "a" * 100_000, "a\nb", "a\0b", "../x", "..", ".", "/etc/passwd", "a/b",
    "C:\\x", [], {}, [[]], [1], ["x"], {"x": 1}, [None] * 3, "0" * 64, "g" * 64, "12345678901234567890", {"": ""},
    [[1, 2], [3]], "é", "re:(a+)+$", "re:(",
    EVIL,
]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A folder that is read.

    `index` is the file that says what belongs to it, `protected` whether every change of a file must be noticed,
    `facts` reads the folder and returns what was in it.
    """

    name: str
    folder: Path
    facts: Callable[[Path, Path], str]
    index: str
    protected: bool

    def files(self) -> list[str]:
        """Names of its files."""
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())


def digest(*parts) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def bytes_of(tensors) -> dict[str, str]:
    """Dtype, shape and contents of tensors."""
    return {n: f"{t.dtype} {t.shape} {hashlib.sha256(t.data).hexdigest()}" for n, t in tensors.items()}


def checkpoint_facts(folder: Path, out: Path) -> str:
    """Read a checkpoint in every way there is, and write it again."""
    stored = read_any(folder)
    inspect_any(folder)
    layers = [(x.settings(), bytes_of(x.tensors()), dict(x.report)) for x in stored.layers.values()]
    for quantized in stored.layers.values():
        quantized.dequantize()
    write_as(out, stored, "native")
    side = {name: hashlib.sha256(data).hexdigest() for name, data in stored.side_files.items()}
    return digest(layers, bytes_of(stored.dense), stored.ties, stored.settings, side)


def dump_facts(folder: Path, out: Path) -> str:
    """Read a dump in every way there is, and solve it."""
    dump = Dump(folder)
    m = dump.manifest
    sums = {}
    for input_group, rows in m.rows.items():
        acc = dump.accumulator(input_group, sorted(rows))
        sums[input_group] = [hashlib.sha256(acc.matrix()).hexdigest(), *(acc.n_rows(t) for t in rows)]
    weights = bytes_of({p.name: dump.weights().raw(p.name) for p in m.parameters})
    loopq.solve(folder, out=out, bits=4, group_size=4, damping=0.1)
    side = {name: hashlib.sha256(data).hexdigest() for name, data in dump.side_files().items()}
    return digest(dataclasses.asdict(m), sums, weights, bytes_of(dict(dump.weights().tensors)), side)


def checkpoints(base: Path) -> list[Target]:
    """Checkpoints of every format, with and without what loopq adds, of both versions."""
    plain = layer(8, 32, name="x.0.a.weight")
    turned = layer(4, 16, 3, 8, False, name="x.0.b.weight").with_transform(Rotation(16, "random", 4))
    scaled = layer(4, 16, 8, -1, name="x.0.c.weight").with_transform(
        ChannelScale(np.full(16, 0.5, np.float32))
    )
    whole = checkpoint(plain, turned, scaled, ties={"lm_head.weight": "embed.weight"})
    grids = checkpoint(plain, layer(8, 24, 4, 16, name="x.0.d.weight"), ties={"x.1.a.weight": "x.0.a.weight"})
    zeros = checkpoint(
        layer(8, 32, 4, 16, False, name="x.0.a.weight"), layer(8, 32, 8, -1, False, name="x.0.b.weight")
    )
    kinds = [
        ("native", whole, "native", None),
        ("ct", grids, "compressed-tensors", "split"),
        ("ct-bare", zeros, "compressed-tensors", None),
        ("gptq", grids, "gptq", "keep"),
        ("gptq-bare", zeros, "gptq_v2", None),
        ("shards", checkpoint(plain), "gptq", None),
    ]
    for name, model, kind, ragged in kinds:
        write_as(base / name, model, kind, ragged=ragged)
    for name in ("ct-bare", "gptq-bare", "shards"):
        (base / name / RECORD).unlink()
    tensors = read_tensors(base / "shards" / "model.safetensors")
    (base / "shards" / "model.safetensors").unlink()
    parts = {"one.safetensors": sorted(tensors)[:4], "two.safetensors": sorted(tensors)[4:]}
    for file, names in parts.items():
        write_tensors(base / "shards" / file, {n: tensors[n] for n in names})
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {n: file for file, names in parts.items() for n in names},
    }
    write_json(base / "shards" / "model.safetensors.index.json", index)
    indexes = {"native": "loopq.json", "shards": "model.safetensors.index.json"}
    return [
        Target(name, base / name, checkpoint_facts, indexes.get(name, "config.json"), name == "native")
        for name, *_ in kinds
    ]


def dumps(base: Path) -> list[Target]:
    """A dump of rows and a dump of Hessians."""
    rng = np.random.default_rng(3)
    shared = (
        SharedParameter("x.q.weight", ("x.q",), 8, 6, "out_in", 2, "attention"),
        SharedParameter("x.k.weight", ("x.k",), 8, 6, "in_out", 2, "attention"),
    )
    rows = {t: rng.normal(size=(40, 8)).astype(np.float32) for t in range(2)}
    model = {
        "x.q.weight": RawTensor.of(rng.normal(size=(6, 8)).astype(np.float32)),
        "x.k.weight": RawTensor.of(rng.normal(size=(8, 6)).astype(np.float32)),
    }
    targets = []
    for kind in ("rows", "hessian"):
        folder = base / kind
        files = write_files(folder / "model", model, {"config.json": b"{}"})
        if kind == "rows":
            cuts = {"00000": slice(0, 25), "00001": slice(25, 40)}
            paths = [folder / "shards" / f"{number}.safetensors" for number in cuts]
            sums = [
                write_tensors(path, {f"x.q.weight/{t}": RawTensor.of(rows[t][cut]) for t in rows})
                for path, cut in zip(paths, cuts.values(), strict=True)
            ]
        else:
            acc = native.HessianAccumulator(8, [0, 1], per_step=True)
            for t in rows:
                acc.update(t, rows[t])
            acc.finish()
            paths = [folder / "hessians" / "000.safetensors"]
            sums = [write_accumulator(paths[0], acc)]
        input_group = ("x.q.weight", True) if kind == "hessian" else ("", False)
        Manifest(
            kind=kind,
            system="made",
            n_steps=2,
            seed=0,
            calibration={
                "source": "made",
                "packing": "none",
                "n_prompts": 4,
                "n_tokens": 40,
                "sha256": "0" * 64,
            },
            rows_dtype="F32" if kind == "rows" else "",
            parameters=shared,
            input_groups={"x.q.weight": "x.q.weight", "x.k.weight": "x.q.weight"},
            rows={"x.q.weight": {0: 40, 1: 40}},
            files=tuple(
                DumpFile(str(p.relative_to(folder)), s, p.stat().st_size, *input_group)
                for p, s in zip(paths, sums, strict=True)
            ),
            model=tuple(files),
            ties={},
            loopq_version="0",
        ).write(folder)
        targets.append(Target(kind, folder, dump_facts, "manifest.json", True))
    return targets


def places(data, at=()):
    """Every path in a JSON value."""
    yield at
    for key, value in (
        data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    ):
        yield from places(value, (*at, key))


def follow(data, path):
    for key in path:
        data = data[key]
    return data


def changed_json(text: str, rng: random.Random) -> tuple[str, object]:
    """Change one thing in a JSON text; the text, and the data where they are still known."""
    if rng.random() < 0.06:
        return rng.choice(
            [
                DEEP,
                "",
                "{",
                "[]",
                "null",
                "\ufeff" + text,
                text[: rng.randrange(len(text))],
                text + "}",
                text.replace("{", "{" + '"x": ' + DEEP + ",", 1),
            ]
        ), None
    data = json.loads(text)
    path = rng.choice([p for p in places(data) if p] or [()])
    if not path:
        return json.dumps(rng.choice(VALUES)), None
    holder, key = follow(data, path[:-1]), path[-1]
    kind = rng.choice(["value", "value", "value", "delete", "add", "double", "rename", "move", "nudge"])
    if kind == "value":
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == "delete":
        del holder[key]
    elif kind == "move":
        holder[key] = copy.deepcopy(follow(data, rng.choice(list(places(data)))))
    elif kind == "nudge":
        old = holder[key]
        holder[key] = (
            old + rng.choice([-1, 1])
            if type(old) in (int, float)
            else f"{old}0"
            if isinstance(old, str)
            else [old]
        )
    elif isinstance(holder, list):
        holder.insert(
            rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice([holder[key], rng.choice(VALUES)]))
        )
    elif kind == "add":
        holder[
            rng.choice(["new", "", "sha256", "version", "transform", "input_group", "../x", "x" * 300])
        ] = rng.choice(VALUES)
    elif kind == "rename":
        holder[rng.choice([f"{key}x", "", "../x", "a/b", key.upper(), "\ud800"])] = holder.pop(key)
    else:
        holder[f"@{key}"] = rng.choice([holder[key], *VALUES])
        return json.dumps(data).replace(f'"@{key}"', f'"{key}"', 1), None
    return json.dumps(data), data


def seal(data) -> bytes:
    """The attacker's change, and the checksum that matches it."""
    if isinstance(data, dict) and "sha256" in data and "format" in data:
        body = {k: v for k, v in data.items() if k != "sha256"}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        data = body | {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(data).encode()


def seal_files(folder: Path, index: str) -> None:
    """Bring the sums of an index in line with the files that are there."""
    path = folder / index
    data = json.loads(path.read_bytes())
    for key, within in (("files", ""), ("model", "model")):
        for entry in data.get(key, ()) if index in ("loopq.json", "manifest.json") else ():
            file = folder / within / entry["file"]
            if file.is_file():
                content = file.read_bytes()
                entry |= {"sha256": hashlib.sha256(content).hexdigest(), "n_bytes": len(content)}
    replace(path, seal(data))


def replace(path: Path, content: bytes) -> None:
    """Give a path new contents; what it was linked to keeps its own."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


@dataclass
class Case:
    """One mutated folder: what was done, whether it must be refused, and whether sums were brought in line."""

    target: Target
    family: str
    must_refuse: bool = False
    sealed: bool = False


def json_case(target: Target, folder: Path, rng: random.Random) -> Case:
    """Change a JSON file, with or without the sums that belong to it."""
    files = [f for f in target.files() if f.endswith((".json", ".jsonl")) and "tokenizer" not in f]
    file = rng.choice([target.index, *files])
    lines = (
        (folder / file).read_text().splitlines() if file.endswith(".jsonl") else [(folder / file).read_text()]
    )
    number = rng.randrange(len(lines))
    lines[number], data = changed_json(lines[number], rng)
    content = "\n".join(lines).encode(errors="surrogatepass")
    sealed = rng.random() < 0.7
    if sealed and data is not None and not file.endswith(".jsonl"):
        content = seal(data)
    replace(folder / file, content)
    if sealed and file != target.index:
        seal_files(folder, target.index)
    return Case(target, "json", sealed=sealed)


def header_case(target: Target, folder: Path, rng: random.Random) -> Case:
    """Change the header of a safetensors file; sums are brought in line."""
    file = rng.choice([f for f in target.files() if f.endswith(".safetensors")])
    content = (folder / file).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, body = content[8 : 8 + length].decode(), content[8 + length :]
    kind = rng.choice(["json", "json", "json", "length", "overlap", "shift", "swap", "body"])
    data = json.loads(header)
    names = [n for n in data if n != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    if kind == "json":
        header, _ = changed_json(header, rng)
    elif kind == "length":
        length = rng.choice([0, 1, length - 8, length + 8, 2**40, 2**63, 2**64 - 1, 99_999_999, 100_000_001])
    elif kind == "overlap":
        data[one]["data_offsets"] = data[other]["data_offsets"]
        header = json.dumps(data)
    elif kind == "shift":
        data[one]["data_offsets"] = [n + rng.choice([-8, 2, 8]) for n in data[one]["data_offsets"]]
        header = json.dumps(data)
    elif kind == "swap":
        data[one], data[other] = data[other], data[one]
        header = json.dumps(data)
    else:
        body = rng.choice([body + b"\0", body[:-1], b"", body * 2])
    text = header.encode(errors="surrogatepass")
    replace(folder / file, struct.pack("<Q", length if kind == "length" else len(text)) + text + body)
    sealed = target.index in ("loopq.json", "manifest.json") and rng.random() < 0.9
    if sealed:
        seal_files(folder, target.index)
    return Case(target, "header", sealed=sealed)


def bytes_case(target: Target, folder: Path, rng: random.Random) -> Case:
    """Flip bits, cut or lengthen a file, without touching the sums."""
    file = rng.choice(target.files())
    content = bytearray((folder / file).read_bytes())
    kind = rng.choice(["flip", "flip", "flip", "cut", "more", "missing"])
    if kind == "missing":
        (folder / file).unlink()
        return Case(target, "bytes")
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 1, 8])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[rng.randrange(len(content)) :]
    else:
        content += rng.choice([b"\0", b" ", b"x" * 100])
    replace(folder / file, bytes(content))
    return Case(target, "bytes")


def path_case(target: Target, folder: Path, rng: random.Random) -> Case:
    """Let an index name a file outside the folder, which is there, with sums that belong to it."""
    outside = folder.parent / "outside"
    data = json.loads((folder / target.index).read_text())
    names = [p for p in places(data) if p and p[-1] == "file"]
    if target.index == "model.safetensors.index.json":
        names = [p for p in places(data) if p[:1] == ("weight_map",) and len(p) == 2]
    if target.index == "config.json":
        return link_case(target, folder, rng)
    path = rng.choice(names)
    holder, within = follow(data, path[:-1]), folder / "model" if path[0] == "model" else folder
    old = within / holder[path[-1]]
    shutil.copy(old, outside / old.name)
    up = os.path.relpath(outside, within)
    (within / "sub").mkdir()
    (within / "sub" / "link").symlink_to(outside)
    new = rng.choice(
        [
            f"{up}/{old.name}",
            str(outside / old.name),
            f"./{up}/{old.name}",
            f"sub/../{up}/{old.name}",
            f"sub/link/{old.name}",
            f"{up}\\{old.name}",
            f"shards/../{up}/{old.name}",
            f"{up}//{old.name}",
            f"/{outside}/{old.name}",
        ]
    )
    if target.name in ("rows", "hessian") and path[0] == "files" and rng.random() < 0.3:
        # The name is as it has to be, the folder in it leads out.
        shutil.copytree(old.parent, outside / "folder")
        shutil.rmtree(old.parent)
        old.parent.symlink_to(outside / "folder")
    else:
        holder[path[-1]] = new
    if rng.random() < 0.2 and "parameters" in data:
        data["parameters"][0]["name"] = rng.choice(
            ["../PWN", str(outside / "PWN"), "a/../../PWN", "..", "x/y"]
        )
    replace(folder / target.index, seal(data))
    return Case(target, "path", must_refuse=True, sealed=True)


def link_case(target: Target, folder: Path, rng: random.Random) -> Case:
    """Put a link, a pipe or a folder in the place of a file."""
    outside = folder.parent / "outside"
    file = rng.choice(
        [
            f
            for f in target.files()
            if f != "tokenizer.json" and not f.endswith((".py", RECORD, "report.jsonl"))
        ]
    )
    path = folder / file
    kind = rng.choice(["out", "out", "pipe", "folder", "loop", "nothing", "device"])
    if kind == "out":
        shutil.copy(path, outside / path.name)
        path.unlink()
        path.symlink_to(
            rng.choice([outside / path.name, Path(os.path.relpath(outside, path.parent)) / path.name])
        )
    else:
        path.unlink()
        {
            "pipe": lambda: os.mkfifo(path),
            "folder": path.mkdir,
            "loop": lambda: path.symlink_to(path.name),
            "nothing": lambda: path.symlink_to(folder.parent / "nowhere"),
            "device": lambda: path.symlink_to("/dev/zero"),
        }[kind]()
    # quantize_config.json is read only where config.json says nothing.
    return Case(target, "link", must_refuse=file != "quantize_config.json")


FINE = ("refused", "accepted, nothing changed", "accepted, no sum can tell")
FAMILIES = {json_case: 9, header_case: 4, bytes_case: 4, path_case: 2, link_case: 2}


opened: list[str] = []
_watching: list[bool] = []


def _watch(event: str, args: tuple) -> None:
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path = os.path.realpath(os.fsdecode(args[0]))
        if "outside" in path:
            opened.append(path)


def tree(folder: Path) -> dict[str, bytes]:
    """Names and contents below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def outcome(case: Case, box: Path, original: str) -> str:
    """Read a mutated folder and say what became of it."""
    outside = tree(box / "outside")
    opened.clear()
    try:
        facts = case.target.facts(box / "in", box / "out")
    except LoopqError as error:
        text = str(error)
        result = "refused" if "\n" not in text and len(text) < 1000 else f"long message: {text[:300]!r}"
    except Exception as error:  # noqa: BLE001  # what is counted
        result = f"traceback: {type(error).__name__}: {error}"[:300]
    else:
        if facts == original:
            result = "accepted, nothing changed"
        elif case.target.protected and not case.sealed:
            result = "silently accepted"
        else:
            result = "accepted, no sum can tell"
        if case.must_refuse:
            result = "accepted, but had to be refused"
    if opened:
        result = f"read outside: {opened[0]}"
    left = {p.name for p in box.iterdir()} - {"in", "out", "outside", ".out.work"}
    if tree(box / "outside") != outside or left:
        result = f"written outside: {sorted(left)}"
    return result


def campaign(make: Sequence[Callable[[Path], list[Target]]], seeds: range, until: float = math.inf) -> Counts:
    """Run a case for every seed on the folders that are made, until a time of the monotonic clock.

    Nothing has to outlast a power cut here: no file is forced to the disk, and where there is a file system in memory,
    files lie there.
    """
    if not _watching:
        sys.addaudithook(_watch)
        _watching.append(True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with mock.patch("os.fsync"), tempfile.TemporaryDirectory(dir=memory) as name:
        base = Path(name)
        return _campaign([target for one in make for target in one(base)], base, seeds, until)


def _campaign(targets: list[Target], base: Path, seeds: range, until: float) -> Counts:
    counts = Counts()
    original = {t.name: t.facts(t.folder, base / f"first-{t.name}") for t in targets}
    slowest = 0.0
    for seed in before(until, seeds):
        rng = random.Random(seed)
        box = base / f"box-{seed}"
        (box / "outside").mkdir(parents=True)
        target = targets[seed % len(targets)]
        shutil.copytree(target.folder, box / "in", copy_function=os.link)
        case = rng.choices(list(FAMILIES), list(FAMILIES.values()))[0](target, box / "in", rng)
        began = time.monotonic()
        result = outcome(case, box, original[target.name])
        slowest = max(slowest, time.monotonic() - began)
        wrong = "" if result in FINE else f"seed {seed}, {target.name}, {case.family}: {result}"
        counts.add(result.partition(":")[0], wrong)
        shutil.rmtree(box)
    counts.outcomes["ms at most"] = round(1000 * slowest)
    return counts
