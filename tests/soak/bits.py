"""One flipped bit in a file of a checkpoint or a dump: every one must be noticed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from loopq.calibrate.dump import Dump
from loopq.errors import LoopqError
from loopq.formats.convert import read_any

from .files import Target, checkpoints, dumps, replace
from .runs import Counts


def flips(base: Path, every: int, rng: random.Random) -> Counts:
    """Flip one random bit of every so-manieth byte of every file and read the folder again.

    A flip that turns JSON into other JSON of the same content ("1e-3" into "1E-3") changes nothing that is read; those
    are counted apart.
    """
    counts = Counts()
    for target in [t for t in (*checkpoints(base), *dumps(base)) if t.protected]:
        read = read_any if target.name == "native" else Dump
        whole = target.facts(target.folder, base / f"facts-{target.name}")
        for file in target.files():
            content = (target.folder / file).read_bytes()
            for place in range(rng.randrange(every), len(content), every):
                changed = bytearray(content)
                changed[place] ^= 1 << rng.randrange(8)
                replace(target.folder / file, bytes(changed))
                what = f"{target.name}/{file}, byte {place}: {content[place]} -> {changed[place]}"
                _read(target, read, (what, whole), base, counts)
            replace(target.folder / file, content)
    return counts


def _read(target: Target, read, known: tuple[str, str], base: Path, counts: Counts) -> None:
    what, whole = known
    try:
        read(target.folder)
    except LoopqError:
        counts.outcomes[f"{target.name}: noticed"] += 1
    except Exception as error:  # noqa: BLE001  # what is counted
        counts.outcomes["tracebacks"] += 1
        counts.failures.append(f"{what}: {type(error).__name__}: {error}")
    else:
        shutil.rmtree(base / "again", ignore_errors=True)
        same = target.facts(target.folder, base / "again") == whole
        counts.outcomes[f"{target.name}: {'same content' if same else 'not noticed'}"] += 1
        if not same:
            counts.failures.append(f"{what}: not noticed")
