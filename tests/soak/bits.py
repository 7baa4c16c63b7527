"""One flipped bit in a file of a checkpoint or a dump: every one must be noticed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from loopq.calibrate.dump import Dump
from loopq.errors import LoopqError
from loopq.formats.convert import read_any

from .counts import Counts, before
from .files import Target, checkpoints, dumps, replace


def flips(base: Path, every: int, rng: random.Random, until: float) -> Counts:
    """Flip one random bit of every so-manieth byte of every file and read the folder again, in random order.

    A flip that turns JSON into other JSON of the same content ("1e-3" into "1E-3") changes nothing that is read; those
    are counted apart.
    """
    counts = Counts()
    there = [t for t in (*checkpoints(base), *dumps(base)) if t.protected]
    whole = {t.name: t.facts(t.folder, base / f"facts-{t.name}") for t in there}
    cases = []
    for target in there:
        for file in target.files():
            n_bytes = (target.folder / file).stat().st_size
            cases += [(target, file, place) for place in range(rng.randrange(every), n_bytes, every)]
    rng.shuffle(cases)
    for target, file, place in before(until, cases):
        content = (target.folder / file).read_bytes()
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        replace(target.folder / file, bytes(changed))
        outcome = _outcome(target, whole[target.name], base)
        replace(target.folder / file, content)
        fine = outcome in ("noticed", "same content")
        what = f"{target.name}/{file}, byte {place}: {content[place]} -> {changed[place]}: {outcome}"
        counts.add(f"{target.name}: {outcome.partition(':')[0]}", "" if fine else what)
    return counts


def _outcome(target: Target, whole: str, base: Path) -> str:
    try:
        (read_any if target.name == "native" else Dump)(target.folder)
    except LoopqError:
        return "noticed"
    except Exception as error:  # noqa: BLE001  # what is counted
        return f"traceback: {type(error).__name__}: {error}"
    shutil.rmtree(base / "again", ignore_errors=True)
    return "same content" if target.facts(target.folder, base / "again") == whole else "not noticed"
