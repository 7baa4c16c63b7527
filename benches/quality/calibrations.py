"""KL on five kinds of text after calibration on the text that ships, on WikiText and on novels, for SmolLM2's loop.

``python -m benches.zoo.smollm2 fetch && nice python -m benches.quality.calibrations`` quantizes
``.cache/smollm2/looped`` with preset fast, INT3 in groups of 64. Each row is kept in ``.cache/smollm2/calibrations``
and is not computed again. The last column is the worst kind's KL: the best calibration has the lowest.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
from pathlib import Path
from typing import Any, Literal

import loopq
from loopq import zoo
from loopq.calibrate.data import TokenSet, windows
from loopq.calibrate.prompts import CalibrationTake, calibration_tokens
from loopq.models.load import LoadedModel, load_model

BITS: Literal[3] = 3
GROUP, LENGTH, N_TESTS = 64, 128, 16
CALIBRATIONS = ("shipped", "wikitext", "novels")
TESTS = ("encyclopedia", "novels", "mathematics", "code", "languages")


def tests(loaded: LoadedModel, data: Path) -> dict[str, TokenSet]:
    """Prompts of each kind. No calibration text has any of them."""
    with (data / "gsm8k" / "test.jsonl").open() as lines:
        problems = "\n\n".join(f"{r['question']}\n{r['answer']}" for r in map(json.loads, lines))
    with lzma.open(zoo.mixed_text("evaluation"), "rt", encoding="utf-8") as lines:
        passages = [json.loads(line) for line in lines]
    texts = {
        "encyclopedia": (data / "wikitext2" / "wiki.test.raw").read_text("utf-8"),
        "novels": _novel(data / "corpus_english_novels" / "english_novels.jsonl.xz"),
        "mathematics": problems,
        **{k: "\n\n".join(p["text"] for p in passages if p["kind"] == k) for k in TESTS[3:]},
    }
    return {
        kind: windows(text[:100_000], loaded.encode, LENGTH, N_TESTS, kind) for kind, text in texts.items()
    }


def _novel(path: Path) -> str:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return str(json.loads(next(lines))["text"])[5000:505_000]


def row(work: Path, data: Path, name: str, n_prompts: int, threads: int) -> dict[str, list[float]]:
    """KL and its interval on each kind after one calibration."""
    kept = work / "calibrations" / f"{name}-{n_prompts}.json"
    if kept.exists():
        saved: dict[str, list[float]] = json.loads(kept.read_text())
        return saved
    loaded = load_model(str(work / "looped"), dtype="float32")
    files: dict[str, Any] = {"shipped": None, "wikitext": data / "wikitext2" / "wiki.valid.raw"}
    if name == "novels":
        files[name] = work / "novel.txt"
        files[name].write_text(_novel(data / "corpus_eltec_eng" / "eltec_eng.jsonl.xz"), "utf-8")
    tokens = calibration_tokens(loaded, files[name], CalibrationTake(n_prompts, LENGTH))
    result = loopq.quantize(loaded, tokens, preset="fast", bits=BITS, group_size=GROUP, threads=threads)
    measured = {}
    for kind, prompts in tests(loaded, data).items():
        one = loopq.evaluate(loaded, {name: result}, prompts, threads=threads)[1]
        interval = one.kl_interval()
        assert interval is not None
        measured[kind] = [float(one.kl.mean()), interval.low, interval.high]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(measured))
    return measured


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(".cache/smollm2"))
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LOOPQ_DATA", "../shared/data")))
    parser.add_argument("--n-prompts", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    print(f"| calibration | {' | '.join(TESTS)} | worst |\n|---|{'---|' * len(TESTS)}---|")
    for name in CALIBRATIONS:
        measured = row(args.work, args.data, name, args.n_prompts, args.threads)
        cells = " | ".join(f"{kl:.4f} [{low:.3f}, {high:.3f}]" for kl, low, high in measured.values())
        print(f"| {name} | {cells} | {max(kl for kl, _, _ in measured.values()):.4f} |", flush=True)


if __name__ == "__main__":
    main()
