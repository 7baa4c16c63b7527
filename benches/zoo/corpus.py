"""Training and held-out bytes: the English novels of ELTeC, split by whole records."""

from __future__ import annotations

import json
import lzma
import os
import unicodedata
from pathlib import Path

import numpy as np

from loopq.paper.plbert import data_folder

REPOSITORY = Path(__file__).resolve().parents[2]
HELD_OUT_EVERY = 20
_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "...", "£": "L", "\r": None}
)


def to_ascii(text: str) -> str:
    """Return the text in plain ASCII: quotes and dashes straightened, accents dropped."""
    text = unicodedata.normalize("NFKD", text.translate(_ASCII))
    return text.encode("ascii", "ignore").decode("ascii")


def prepare(cache: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return training bytes, held-out bytes (both uint8) and the ids of the held-out novels.

    The novel at every `HELD_OUT_EVERY`-th place is held out whole. The packed bytes are kept in ``cache``.
    """
    cache.mkdir(parents=True, exist_ok=True)
    files = [cache / "train.npy", cache / "held_out.npy", cache / "held_out.json"]
    if not all(f.exists() for f in files):
        parts: tuple[list[str], list[str]] = ([], [])
        ids = []
        data = data_folder(None)
        if data is None or not (data / "corpus_eltec_eng").is_dir():
            raise SystemExit(f"no corpus_eltec_eng in {data}: set LOOPQ_DATA to the folder of data sets")
        source = data / "corpus_eltec_eng" / "eltec_eng.jsonl.xz"
        with lzma.open(source, "rt", encoding="utf-8") as lines:
            for i, line in enumerate(lines):
                record = json.loads(line)
                held = i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
                parts[held].append(to_ascii(record["text"]))
                if held:
                    ids.append(record["id"])
        for file, part in zip(files, parts, strict=False):
            tmp = file.with_suffix(f".{os.getpid()}.part.npy")
            np.save(tmp, np.frombuffer("\n\n".join(part).encode("ascii"), dtype=np.uint8))
            tmp.replace(file)
        files[2].write_text(json.dumps(ids), encoding="utf-8")
    return (
        np.load(files[0], mmap_mode="r"),
        np.load(files[1], mmap_mode="r"),
        json.loads(files[2].read_text()),
    )
